"""The definition. M rows, N columns; x_MN, residual_MN, weight_N."""

from __future__ import annotations

import torch


def rms_norm(x_MN: torch.Tensor, weight_N: torch.Tensor | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset)."""
    y_MN = x_MN * torch.rsqrt(x_MN.square().mean(-1, keepdim=True) + eps)
    return y_MN if weight_N is None else y_MN * (weight_N + weight_offset)


def add_rms_norm(
    x_MN: torch.Tensor,
    residual_MN: torch.Tensor,
    weight_N: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """s = x + residual; y = rms_norm(s)."""
    sum_MN = x_MN + residual_MN
    return rms_norm(sum_MN, weight_N, eps=eps, weight_offset=weight_offset), sum_MN
