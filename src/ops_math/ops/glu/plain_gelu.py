"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

STANDS_FOR = ("F.gelu", "torch.add")  # PyTorch's functions that the operator takes the place of


def gelu(x: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str = "none") -> torch.Tensor:
    """An addition and `F.gelu`."""
    return F.gelu(x if bias is None else x + bias.to(x.dtype), approximate=approximate)
