"""What can be set of RMSNorm's kernels."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Rows a tile, columns a tile, warps, programs, rows loaded ahead (1: none), columns at the ends of a row (0: rows are not cut).

    `sums_on_the_way` is of the wide backward: the weight's gradient is summed by the programs that make dx, not by others afterwards. So
    it is where `blocks` is not 0: sums of so many blocks are held in registers, and it is blocks that are loaded ahead. `registers` a
    thread at most, so that more programs lie on a core (0: as the compiler likes).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_programs: int
    num_stages: int
    ends: int = 0
    sums_on_the_way: bool = False
    blocks: int = 0
    registers: int = 0
