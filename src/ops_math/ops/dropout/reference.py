"""The definition. M rows (all leading dimensions), N columns; x_MN."""

from __future__ import annotations

import torch

from ops_math.rng import Rng, honoured, keep_mask, state_for


def dropout(x_MN: torch.Tensor, p: float, *, rng: Rng | None = None) -> torch.Tensor:
    """y = x / (1 - p) where the mask keeps, 0 elsewhere, p the chance that a mask of half-words has."""
    if p == 0.0:
        return x_MN
    rows = torch.arange(x_MN.shape[:-1].numel(), device=x_MN.device)
    keep_MN = keep_mask(state_for("dropout", rng, x_MN.device), rows, 0, x_MN.shape[-1], p).view(x_MN.shape)
    return torch.where(keep_MN, x_MN / (1 - honoured(p)), 0.0)
