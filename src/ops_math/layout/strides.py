"""Stride algebra for launchers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ops_math.layout.copies import copied


def as_rows(x: torch.Tensor, num_cols: int | None = None) -> torch.Tensor:
    """`x` as a matrix whose rows are its last dimension (or `num_cols` long), unit stride along a row; a copy only where no view exists."""
    rows = x.reshape(-1, x.shape[-1] if num_cols is None else num_cols) if x.numel() else x.new_empty((x.shape[:-1].numel(), x.shape[-1]))
    if rows.stride(1) != 1 and rows.shape[1] != 1:
        rows = rows.contiguous()
    if not x.is_contiguous() and rows.is_contiguous() and x.numel():
        copied(rows, "rows of an operator's input", "its strides make no rows")
    return rows


def reshaped(t: torch.Tensor, shape: Sequence[int], what: str, reason: str) -> torch.Tensor:
    """`t.reshape(shape)`, noted where there is no such view: a copy lies dense, and a view of what is not dense does not."""
    made = t.reshape(shape)
    if torch.compiler.is_compiling() or t.is_contiguous() or not made.is_contiguous() or not made.numel():
        return made
    return copied(made, what, reason)


def row_pieces(rows: int, cols: int, device: torch.device, values: int = 2**17) -> list[slice]:
    """Slices of rows for several passes in turn: on the CPU `values` a thread (half a MiB in fp32, so that a pass finds in the cache what
    the one before left there), elsewhere all rows at once."""
    step = max(1, values * torch.get_num_threads() // max(cols, 1)) if device.type == "cpu" else max(rows, 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def alignment(*numbers: int) -> int:
    """The greatest of 16, 8, 4, 2 and 1 that divides all numbers, sizes or strides in elements: by how many a kernel may read at once."""
    return math.gcd(16, *numbers)
