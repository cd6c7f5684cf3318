"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_math.rng import Rng, honoured, keep_mask

STANDS_FOR = ("F.dropout",)  # PyTorch's functions that the operator takes the place of


def dropout(x: torch.Tensor, p: float, *, rng: Rng | None = None) -> torch.Tensor:
    """`F.dropout`; with an Rng its mask, so that switching the library off drops the same elements."""
    if rng is None or p == 0.0:
        return F.dropout(x, p, training=True)
    rows = torch.arange(x.shape[:-1].numel(), device=x.device)
    return x * keep_mask(rng.state, rows, 0, x.shape[-1], p).view(x.shape) * (1 / (1 - honoured(p)))
