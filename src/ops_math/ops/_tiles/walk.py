"""How elementwise kernels walk memory: in tiles of rows, or of one long row, whose masks let values be read sixteen bytes at a time.

Values are read together only where the compiler knows that the mask is the same for all of them, so it must know of which number a
width is a multiple. Of arguments it learns whether that number is 16, and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(16)  # values of which the mask is one: at least 16 bytes in each dtype


@triton.jit
def num_tiles(n, BLOCK: tl.constexpr):
    """How many tiles n values make, without the overflow of `tl.cdiv` where n is within a tile of 2^31."""
    return ((tl.cast(n, tl.uint64) + (BLOCK - 1)) // BLOCK).to(tl.int32)


@triton.jit
def multiple_of(n, ALIGN: tl.constexpr):
    """n, of which the launcher knows that it is a multiple of ALIGN (`layout.alignment`), so that the compiler knows too."""
    if ALIGN < 16 and ALIGN > 1:
        n = n // ALIGN * ALIGN
    return n


@triton.jit
def whole_groups(n):
    """The values of n that are in groups of 16; the others, fewer than 16, are a tile of their own (`tail`)."""
    return n // GROUP * GROUP


@triton.jit
def tail(n):
    """Places [16] of the values behind the whole groups; those from n on do not exist."""
    return whole_groups(n) + tl.arange(0, GROUP)


@triton.jit
def tail_of_pairs(n):
    """Places [32] of the same values where each is two neighbours; those from 2 n on do not exist."""
    return 2 * tl.cast(whole_groups(n), tl.int64) + tl.arange(0, 2 * GROUP)
