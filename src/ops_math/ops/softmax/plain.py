"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

STANDS_FOR = ("F.softmax",)  # PyTorch's functions that the operator takes the place of


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`F.softmax`."""
    return F.softmax(x, dim)
