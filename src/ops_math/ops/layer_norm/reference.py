"""The definition. M rows (all leading dimensions), N columns; x_MN, residual_MN, weight_N, bias_N, x_bias_N."""

from __future__ import annotations

import torch

from ops_math.rng import Rng, honoured, keep_mask, state_for


def layer_norm(
    x_MN: torch.Tensor, weight_N: torch.Tensor | None = None, bias_N: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias."""
    centred_MN = x_MN - x_MN.mean(-1, keepdim=True)
    y_MN = centred_MN * torch.rsqrt(centred_MN.square().mean(-1, keepdim=True) + eps)
    y_MN = y_MN if weight_N is None else y_MN * weight_N
    return y_MN if bias_N is None else y_MN + bias_N


def add_layer_norm(
    x_MN: torch.Tensor,
    residual_MN: torch.Tensor,
    weight_N: torch.Tensor | None = None,
    bias_N: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    x_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    narrow_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """s = dropout(x + x_bias) + residual; y = layer_norm(s), a second time where a narrow copy is asked for."""
    x_MN = x_MN if x_bias is None else x_MN + x_bias
    if dropout_p:
        rows = torch.arange(x_MN.shape[:-1].numel(), device=x_MN.device)
        keep_MN = keep_mask(state_for("add_layer_norm", rng, x_MN.device), rows, 0, x_MN.shape[-1], dropout_p).view(x_MN.shape)
        x_MN = torch.where(keep_MN, x_MN / (1 - honoured(dropout_p)), 0.0)
    sum_MN = x_MN + residual_MN
    y_MN = layer_norm(sum_MN, weight_N, bias_N, eps=eps)
    return (y_MN, sum_MN) if narrow_dtype is None else (y_MN, sum_MN, y_MN.clone())
