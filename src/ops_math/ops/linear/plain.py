"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_math.spec import compute_dtype

STANDS_FOR = ("F.linear",)  # PyTorch's functions that the operator takes the place of


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, parts: tuple[int, int] = (1, 1), wide: bool = False
) -> torch.Tensor:
    """`F.linear`, in the wider dtype of arithmetic where that is asked for."""
    if wide:
        dtype = compute_dtype(x.dtype)
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    same = weight.dtype == x.dtype
    return F.linear(x, weight if same else weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
