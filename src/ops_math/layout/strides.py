"""Stride algebra for launchers."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor, num_cols: int | None = None) -> torch.Tensor:
    """`x` as a matrix whose rows are its last dimension (or `num_cols` long), unit stride along a row; a copy only where no view exists."""
    rows = x.reshape(-1, x.shape[-1] if num_cols is None else num_cols) if x.numel() else x.new_empty((0, x.shape[-1]))
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
