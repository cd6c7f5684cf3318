"""What can be set of LayerNorm's kernels."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Rows a tile, columns a tile, warps, programs, rows loaded ahead (1: none), columns at the ends of a row (0: rows are not cut).

    Where `blocks` is not 0, the backward of a wide row holds the sums of so many blocks in registers, and loads blocks ahead (all: they are
    kept for the second walk); where `by_columns`, tiles are of the kernel that makes gradients of rows and sums of columns at once, from
    the rows' means. `late` backward programs of cut rows copy the weight to where it is on the grid, and read it for each row. `registers`
    a thread at most, so that more programs lie on a core (0: as the compiler likes).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_programs: int
    num_stages: int
    ends: int = 0
    blocks: int = 0
    by_columns: bool = False
    late: bool = False
    registers: int = 0
