"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_math.spec import compute_dtype

STANDS_FOR = ("F.cross_entropy",)  # PyTorch's functions that the operator takes the place of


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.cross_entropy` of the logits in fp32, with what it lacks around it."""
    wide = logits.to(compute_dtype(logits.dtype))
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    weight = None if class_weight is None else class_weight.to(wide.dtype)
    z, flat = wide.reshape(-1, wide.shape[-1]) if wide.numel() else wide.new_empty((0, wide.shape[-1])), target.reshape(-1).long()
    if not z_loss and reduction != "none" and num_tokens is None:
        return F.cross_entropy(z, flat, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
    loss = F.cross_entropy(z, flat, weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    kept = flat != ignore_index
    if z_loss:
        loss = loss + z_loss * torch.where(kept, torch.logsumexp(z, -1).square(), 0.0)
    if reduction == "none":
        return loss.view(target.shape)
    if reduction == "sum":
        return loss.sum()
    if num_tokens is not None:
        return loss.sum() / torch.where((num_tokens == 0) & ~kept.any(), 1, num_tokens)
    count = kept.sum() if weight is None else torch.where(kept, weight[torch.where(kept, flat, 0)], 0.0).sum()
    return loss.sum() / count
