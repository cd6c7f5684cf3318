"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops_math import features
from ops_math.ops.cross_entropy.plain import cross_entropy

STANDS_FOR = ("F.linear", "F.cross_entropy")  # PyTorch's functions that the operator takes the place of


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    recompute: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`F.linear`, then `F.cross_entropy`; the logits exist whole."""
    if not features.autocasts(x.device.type):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return cross_entropy(F.linear(x, weight, bias), target, **options)
