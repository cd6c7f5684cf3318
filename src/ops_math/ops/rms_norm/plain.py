"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_math.spec import compute_dtype

STANDS_FOR = ("F.rms_norm", "torch.add")  # PyTorch's functions that the operator takes the place of


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0) -> torch.Tensor:
    """`F.rms_norm`, with the offset added to the weight first."""
    if weight is not None and weight_offset:
        weight = weight.to(compute_dtype(weight.dtype)) + weight_offset
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An addition and `F.rms_norm`."""
    total = x + residual
    y = rms_norm(total, weight, eps=eps, weight_offset=weight_offset)
    return y if out_dtype is None else y.to(out_dtype), total
