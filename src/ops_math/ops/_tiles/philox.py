"""Random words and dropout masks as tiles: the words of `ops_math.rng`, bit for bit.

The word of element (row, head, col) is word `col % 4` of Philox4x32-7 at counter (col // 4, row, head, offset) under key seed.
A kernel loads the state (seed, offset, first row) itself and adds the first row to its row numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def words_tile(seed, offset, rows, head, first_col, BLOCK_N: tl.constexpr):
    """Words [len(rows), BLOCK_N] (uint32) of columns first_col, first_col + 1, ...

    seed and offset are scalars, rows [M] global row numbers of any integer type, head a scalar, first_col a multiple of 4,
    BLOCK_N a power of two from 4 on. One Philox call makes four neighbours, so nothing that is drawn is thrown away.
    """
    groups = tl.cast(first_col, tl.uint32) // 4 + tl.arange(0, BLOCK_N // 4).to(tl.uint32)
    zero = tl.zeros([rows.shape[0], BLOCK_N // 4], tl.uint32)
    c0 = zero + groups[None, :]
    c1 = zero + rows.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero + tl.cast(head, tl.uint32), zero + tl.cast(offset, tl.uint32), ROUNDS)
    even, odd = tl.join(w0, w2), tl.join(w1, w3)  # joined pairwise so that the flattened order is w0 w1 w2 w3
    return tl.reshape(tl.join(even, odd), [rows.shape[0], BLOCK_N])


@triton.jit
def keep_tile(seed, offset, rows, head, first_col, threshold, BLOCK_N: tl.constexpr):
    """Mask [len(rows), BLOCK_N] of elements to keep; threshold is `rng.threshold(p)`, the rest as in `words_tile`."""
    return words_tile(seed, offset, rows, head, first_col, BLOCK_N) >= tl.cast(threshold, tl.uint32)
