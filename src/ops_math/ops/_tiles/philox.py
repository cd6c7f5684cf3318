"""Random words and dropout masks as tiles: the words of `ops_math.rng`, bit for bit.

Element (row, head, col) is half-word `col % 8` of Philox4x32-7 at counter (col // 8, row, head, offset) under key seed.
A kernel loads the state (seed, offset, first row) itself and adds the first row to its row numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)
M0, M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
W0, W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def _multiply(a, M: tl.constexpr):
    """High and low word of a 32 x 32 bit product.

    One 64-bit product (IMAD.WIDE on sm_90); the language's own Philox has two instructions for each, mul.hi and mul.lo: 92 against
    51 for sixteen elements a thread.
    """
    product = a.to(tl.uint64) * M
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox_tile(seed, c0, c1, c2, c3):
    """Four words for each element that the uint32 counters c0 .. c3 broadcast to; seed is a 64-bit scalar.

    Counters that are a column, a row and scalars make the first two rounds, and half of the third, work on vectors.
    """
    k0 = tl.cast(seed, tl.uint64).to(tl.uint32)
    k1 = (tl.cast(seed, tl.uint64) >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        h0, l0 = _multiply(c0, M0)
        h1, l1 = _multiply(c2, M1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 = tl.add(k0, W0, sanitize_overflow=False)
        k1 = tl.add(k1, W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def keep_bytes(seed, offset, rows, head, groups, threshold):
    """int32 whose bit j says whether element 8 group + j is kept, for rows and groups of columns that broadcast to one tile.

    seed, offset and head are scalars, rows global row numbers and groups column numbers // 8, of any integer type (scalars too),
    threshold `rng.threshold(p)`.
    """
    head, offset = tl.cast(head, tl.uint32), tl.cast(offset, tl.uint32)
    w0, w1, w2, w3 = philox_tile(seed, tl.cast(groups, tl.uint32), tl.cast(rows, tl.uint32), head, offset)
    least = tl.cast(threshold, tl.uint32) << 16
    return _two_bits(w0, least, 0) | _two_bits(w1, least, 2) | _two_bits(w2, least, 4) | _two_bits(w3, least, 6)


@triton.jit
def _two_bits(word, least, AT: tl.constexpr):
    """Bits AT and AT + 1: whether the low and the high half of a word reach the threshold, which `least` has in its high half."""
    return tl.where((word << 16) >= least, 1 << AT, 0) | tl.where(word >= least, 2 << AT, 0)


@triton.jit
def keep_tile(seed, offset, rows, head, first_col, threshold, BLOCK_N: tl.constexpr):
    """Mask [len(rows), BLOCK_N] of the elements to keep in columns first_col, first_col + 1, ...

    seed and offset are scalars, rows [M] global row numbers of any integer type, head a scalar, first_col a multiple of 8, threshold
    `rng.threshold(p)`, BLOCK_N a power of two from 8 on. One Philox call decides eight neighbours, so nothing drawn is thrown away.
    The decisions travel as bits of one integer: a tile of words or of booleans is brought into the layout of a bf16 tile
    through shared memory, this is not (Triton 3.6 and 3.9, sm_90 and gfx942).
    """
    groups = tl.cast(first_col, tl.uint32) // 8 + tl.arange(0, BLOCK_N // 8).to(tl.uint32)
    bits = keep_bytes(seed, offset, rows[:, None], head, groups[None, :], threshold)
    return tl.reshape(bits[:, :, None] & (1 << tl.arange(0, 8))[None, None, :], [rows.shape[0], BLOCK_N]) != 0


@triton.jit
def keep_flat(seed, offset, first_row, first_col, num_cols, threshold, ENDS: tl.constexpr, BLOCK: tl.constexpr):
    """Mask [BLOCK] of the elements to keep among the flat values of a matrix from (first_row, first_col) on, in head 0.

    seed, offset and first_row (global) are scalars, first_col an integer scalar in [0, num_cols), num_cols at least 8, threshold
    `rng.threshold(p)`, BLOCK a power of two from 16 on, ENDS one of at least BLOCK // num_cols + 3.
    Values are taken in eights. Eight neighbours lie in two groups of their row, of which the second is the next eight's first; where the
    row ends among them, the next eight's first group is the next row's, and their second one the row's last. So one Philox call an eight
    is enough, beside a table of the last groups of rows, whose last place has the group behind the tile (three calls an eight made the
    kernel half as long again: 32 instructions a value instead of 23, sm_90, Triton 3.6).
    """
    EIGHTS: tl.constexpr = BLOCK // 8
    eights, ends = tl.arange(0, EIGHTS), tl.arange(0, ENDS)
    flat, behind, first_row = tl.cast(first_col, tl.int64) + 8 * eights, tl.cast(first_col, tl.int64) + BLOCK, tl.cast(first_row, tl.uint32)
    if num_cols.dtype != tl.int64:  # num_cols + BLOCK fits 32 bits without a sign
        flat, behind, num_cols = flat.to(tl.uint32), behind.to(tl.uint32), tl.cast(num_cols, tl.uint32)
    down = flat // num_cols
    cols, below = flat - down * num_cols, behind // num_cols

    rows = tl.add(first_row, down.to(tl.uint32), sanitize_overflow=False)  # global row numbers count modulo 2^32
    first = keep_bytes(seed, offset, rows, 0, cols // 8, threshold)
    end_rows = tl.add(first_row, tl.where(ends == ENDS - 1, below.to(tl.uint32), ends.to(tl.uint32)), sanitize_overflow=False)
    end_cols = tl.where(ends == ENDS - 1, behind - below * num_cols, num_cols - 1)
    table = keep_bytes(seed, offset, end_rows, 0, end_cols // 8, threshold)
    behind_byte = tl.sum(tl.where(ends == ENDS - 1, table, 0))
    following = tl.where(eights == EIGHTS - 1, behind_byte, tl.gather(first, (eights + 1) % EIGHTS, 0))
    last = tl.gather(table, down.to(tl.int32), 0)

    left = tl.minimum(num_cols - cols, 9).to(tl.int32)  # values before the row ends
    here = first | (tl.where(left < 9, last, following) << 8)
    bits = ((here >> (cols % 8).to(tl.int32)) & ((1 << left) - 1)) | (following << left)  # those above bit 7 belong to nobody
    return tl.reshape(bits[:, None] & (1 << tl.arange(0, 8))[None, :], [BLOCK]) != 0
