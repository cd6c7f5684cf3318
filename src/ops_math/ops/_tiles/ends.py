"""Rows that start off the 16-byte grid, cut into a body of whole groups of eight values and what is left at the ends.

Rows r, r + 8, r + 16, ... of a matrix start at the same place in a group, whatever its width. A program that keeps to such rows has the
same cut for all of them: `head` values, then `whole` values from a boundary on, then the rest. The body is read and written 16 bytes
at a time, the ends one by one. Nobody touches a neighbour's bytes. Where a width is little above a power of two, what is above it
belongs to the ends as well, so that the body has no idle lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.spec import next_power_of_2

LEAST = 64  # columns; in narrower rows the ends are most of the work
GROUP = 8  # values; 16 bytes of 16 bits each


def widths(num_cols: int) -> tuple[int, int]:
    """Columns of body and ends, powers of two, for rows of `num_cols` (at least LEAST).

    A value of the ends takes 28 instructions and one of the body 12 (sm_90, forward), so that ends of a quarter are worth a body of half.
    """
    body = next_power_of_2(num_cols - GROUP + 2) // 2  # the widest that is full whatever the head
    ends = max(next_power_of_2(num_cols - body), 2 * GROUP)
    if 4 * ends <= body:
        return body, ends
    return next_power_of_2(num_cols // GROUP * GROUP), 2 * GROUP


def num_tiles(rows: int, block_m: int) -> int:
    """Tiles of `block_m` rows eight apart, a multiple of eight."""
    return GROUP * -(-rows // (GROUP * block_m))


def same_cut(num_cols: int, *matrices: torch.Tensor | None) -> bool:
    """Whether row by row all of them start at one place in a group."""
    return num_cols >= LEAST and all(t is None or (t.data_ptr() % 16 == 0 and (t.stride(0) - num_cols) % GROUP == 0) for t in matrices)


@triton.jit
def cut_of(program, num_cols, BODY: tl.constexpr):
    """(head, whole) of the rows of a program: values before the first boundary, and values in the body, a multiple of eight."""
    head = (8 - (program % 8) * num_cols % 8) % 8
    return head, tl.minimum((num_cols - head) // 8, BODY // 8) * 8


@triton.jit
def end_columns(head, whole, ENDS: tl.constexpr):
    """The columns [ENDS] that are not in the body; the first num_cols - whole exist."""
    place = tl.arange(0, ENDS)
    return tl.where(place < head, place, place + whole)


@triton.jit
def rows_of(tile, BLOCK_M: tl.constexpr):
    """The rows [BLOCK_M] of a tile, eight apart; tiles t, t + 8, ... have the same cut."""
    return (tl.cast(tile, tl.int64) // 8) * (8 * BLOCK_M) + tile % 8 + tl.arange(0, BLOCK_M) * 8


@triton.jit
def body_offsets(begin, lanes):
    """Offsets [BLOCK_M, BLOCK_N] of the bodies of rows that begin at `begin` [BLOCK_M], so that the compiler sees the boundaries."""
    return ((begin + 7) // 8 * 8)[:, None] + lanes
