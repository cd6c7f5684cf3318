"""The sum of partial sums, one row from each program of a persistent kernel, in an order that follows their number and width alone."""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.spec import cdiv


def tile_of_sum(cols: int) -> tuple[int, dict[str, int]]:
    """Programs of the sum of [P, cols], and their tile: narrow where there would be fewer programs than cores.

    H200, microseconds beside 128 x 32: 1,056 partials of 1,024 columns 3.0 and 6.0, 528 of them 2.1 and 3.7, 528 of 4,096 columns 3.2 and
    4.0; from 8,192 columns on no tile gained more than 0.6 (64 x 16).
    """
    block_m, block_n = (256, 8) if cols <= 2048 else (256, 16) if cols <= 4096 else (128, 32)
    return cdiv(cols, block_n), {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8}


@triton.jit
def sum_rows(partial_ptr, sum_ptr, num_partials, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns of this program of partial [num_partials, num_cols], added up."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_partials, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < num_partials)[:, None] & (cols < num_cols)[None, :]
        sums += tl.load(partial_ptr + rows[:, None].to(tl.int64) * num_cols + cols[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + cols, tl.sum(sums, 0).to(sum_ptr.dtype.element_ty), mask=cols < num_cols)
