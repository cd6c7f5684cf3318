"""The definition. M rows, V classes; logits_MV, target_M, class_weight_V. Row vectors of the call's leading dimensions end in M."""

from __future__ import annotations

import torch


def cross_entropy(
    logits_MV: torch.Tensor,
    target_M: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The expected negative log probability under targets smoothed towards the uniform, plus z_loss * logsumexp^2."""
    num_classes = logits_MV.shape[-1]
    z_MV = logits_MV if softcap is None else softcap * torch.tanh(logits_MV / softcap)
    w_V = torch.ones(num_classes, dtype=z_MV.dtype, device=z_MV.device) if class_weight is None else class_weight.to(z_MV.dtype)
    kept_M = target_M != ignore_index
    outside_M = kept_M & ((target_M < 0) | (target_M >= num_classes))
    index_M = torch.where(kept_M & ~outside_M, target_M, 0).long()

    weight_M = w_V[index_M] * torch.where(outside_M, float("nan"), 1.0).to(z_MV.dtype)
    surprise_MV = -torch.log_softmax(z_MV, -1)
    loss_M = (1 - label_smoothing) * weight_M * surprise_MV.gather(-1, index_M[..., None])[..., 0]
    if label_smoothing:
        loss_M = loss_M + label_smoothing / num_classes * (w_V * surprise_MV).sum(-1)
    if z_loss:
        loss_M = loss_M + z_loss * torch.logsumexp(z_MV, -1).square()
    loss_M = torch.where(kept_M, loss_M, 0.0)

    if reduction == "none":
        return loss_M
    if reduction == "sum":
        return loss_M.sum()
    if num_tokens is None:
        return loss_M.sum() / torch.where(kept_M, weight_M, 0.0).sum()
    return loss_M.sum() / divisor_of(num_tokens, kept_M).to(loss_M.dtype)


def divisor_of(num_tokens: torch.Tensor, kept_M: torch.Tensor) -> torch.Tensor:
    """The global token count; 1 where it is zero and this batch has no token either, so that the loss is 0."""
    return torch.where((num_tokens == 0) & ~kept_M.any(), 1, num_tokens)
