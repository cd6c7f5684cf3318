"""Rows that start off the 16-byte grid, cut into a body of whole groups of eight values and what is left at the ends.

Rows r, r + 8, r + 16, ... of a matrix start at the same place in a group, whatever its width. A program that keeps to such rows has the
same cut for all of them: `head` values, then `whole` values from a boundary on, then the rest. The body is read and written 16 bytes
at a time, the ends one by one. Nobody touches a neighbour's bytes. Where a width is little above a power of two, what is above it
belongs to the ends as well, so that the body has no idle lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import triton
import triton.language as tl

from ops_math.layout import alignment
from ops_math.spec import Device, next_power_of_2

LEAST = 64  # columns; in narrower rows the ends are most of the work
GROUP = 8  # values; 16 bytes of 16 bits each
HELD_BLOCK, HELD_ENDS = 4096, 512  # columns: eight and one a thread


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


def off_grid(num_cols: int, near: bool = True) -> bool:
    """Whether rows can start anywhere; or, where `near` counts, at some places alone, and are little wider than a power of two."""
    step = alignment(num_cols)
    return num_cols >= LEAST and (step == 1 or (near and step < 16 and widths(num_cols)[0] < num_cols))


def persistent(
    rows: int, num_cols: int, wishes: Iterable[tuple[int, int, int, int]], device: Device
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Rows and columns of a body, warps, programs, stages and columns of the ends, of each wish that is legal, once.

    A wish is values a tile, values a thread, stages, and warps a core, or 0 for one program for each tile. Else programs are persistent,
    since each loads the parameters value by value; they must be as many as the registers hold, since one more waits for all the others.
    """
    lanes, most_warps = (64, 16) if device.kind == "hip" else (32, 32)
    block_n, least_ends = widths(num_cols)
    seen = set()
    for tile, values, num_stages, warps_a_core in wishes:
        block_m = max(1, min(tile // block_n, 16, next_power_of_2(rows // device.num_cores)))  # few rows are spread over all cores
        num_warps = min(max(block_m * block_n // (values * lanes), 1), most_warps)
        tiles, most = max(num_tiles(rows, block_m), 8), max(device.num_cores * max(warps_a_core // num_warps, 1) // 8 * 8, 8)
        # A row of all threads has one value at least of the ends for each: they meet the body in registers.
        ends = max(least_ends, num_warps * lanes) if block_m == 1 else least_ends
        found = (block_m, block_n, num_warps, min(tiles, most) if warps_a_core else tiles, num_stages, ends)
        if found not in seen and block_m * block_n <= 32 * num_warps * lanes and (device.kind != "hip" or num_stages == 1):
            seen.add(found)
            yield found


def held_ends(num_cols: int) -> int:
    """Columns of the ends of a row whose sums are held in registers; 0 where it need not be cut."""
    return 0 if alignment(num_cols) >= GROUP else HELD_ENDS


def held_blocks(num_cols: int) -> int:
    """Blocks of such a row."""
    return -(-(num_cols - held_ends(num_cols)) // HELD_BLOCK)


def held(rows: int, num_cols: int, most: int, kept: int, device: Device) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Rows and columns of a block, warps, programs, blocks loaded ahead, columns of the ends (0: rows are not cut) and blocks a row, where
    one program a core holds sums over rows in registers, of at most `most` blocks; of at most `kept` blocks it keeps the row there as well,
    and all loads are under way at once: the fastest wherever it is offered (H200, bf16, 12,001 to 16,384 columns: 0.54 to 0.91 of a copy,
    with two blocks ahead 0.46 to 0.70, with one no more than that), even where a thread keeps 64 bytes on the stack (sm_90, Triton 3.6,
    `rms_norm` at 15,993 columns beside a third tensor: 0.54 and 0.50).

    Rows that are read by eights where they start are not cut.
    """
    num_warps = 8 if device.kind == "hip" else 16  # 512 threads, of which each has 128 registers: eight of them are a block's sum
    ends, blocks = held_ends(num_cols), held_blocks(num_cols)
    programs = max(min(rows, device.num_cores), 1)
    if blocks <= most:
        for ahead in dict.fromkeys((blocks, 2) if blocks <= kept else (2,)):
            yield 1, HELD_BLOCK, num_warps, max(programs // 8 * 8, 8) if ends else programs, ahead, ends, blocks


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
def boundary(begin):
    """The first boundary from an offset on; written so that the compiler sees that it is one."""
    return (begin + 7) // 8 * 8


@triton.jit
def body_offsets(begin, lanes):
    """Offsets [BLOCK_M, BLOCK_N] of the bodies of rows that begin at `begin` [BLOCK_M], so that the compiler sees the boundaries."""
    return ((begin + 7) // 8 * 8)[:, None] + lanes


@triton.jit
def _added(a, b, c, d):
    return a + c, b + d


@triton.jit
def _met(body, ends):
    """Body [1, BODY] and ends [ENDS, 1] of a row added in the registers of its threads, to [MET, 1]."""
    MET: tl.constexpr = min(body.shape[1] // 8, ends.shape[0])
    eights = tl.sum(tl.sum(tl.reshape(body, (body.shape[1] // (8 * MET), MET, 8)), 2), 0)
    if ends.shape[0] > MET:
        ends = tl.sum(tl.reshape(ends, (ends.shape[0] // MET, MET, 1)), 0)
    return eights[:, None] + ends


@triton.jit
def top_of_row(body, ends):
    """The largest values [BLOCK_M] of rows whose parts are `body` [BLOCK_M, BODY] and `ends` [ENDS, BLOCK_M]: see `sum_of_row`."""
    if body.shape[0] == 1:
        MET: tl.constexpr = min(body.shape[1] // 8, ends.shape[0])
        eights = tl.max(tl.max(tl.reshape(body, (body.shape[1] // (8 * MET), MET, 8)), 2), 0)
        if ends.shape[0] > MET:
            ends = tl.max(tl.reshape(ends, (ends.shape[0] // MET, MET, 1)), 0)
        return tl.max(tl.maximum(eights[:, None], ends), 0)
    return tl.maximum(tl.max(body, 1), tl.max(ends, 0))


@triton.jit
def sum_of_row(body, ends):
    """The sums [BLOCK_M] of rows whose parts are `body` [BLOCK_M, BODY] and `ends` [ENDS, BLOCK_M].

    The parts of a row that is a whole tile are added before its threads meet: each meeting is three barriers, for which memory waits.
    """
    if body.shape[0] == 1:
        return tl.sum(_met(body, ends), 0)
    return tl.sum(body, 1) + tl.sum(ends, 0)


@triton.jit
def sums_of_row(body, ends, other_body, other_ends):
    """The sums [BLOCK_M] of one quantity and of another, in one meeting of threads: see `sum_of_row`."""
    if body.shape[0] == 1:
        return tl.reduce((_met(body, ends), _met(other_body, other_ends)), 0, _added)
    return tl.sum(body, 1) + tl.sum(ends, 0), tl.sum(other_body, 1) + tl.sum(other_ends, 0)


@triton.jit
def load_part(ptr, offsets, mask):
    """Values in fp32, zero where masked."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def shifted(ptr, room_ptr, head, whole, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr):
    """Where this program finds parameters of the body from a boundary on: its own part of `room_ptr`, into which they are copied once.

    Read where they are they would come value by value for each row, and take the registers that wide rows need for sums.
    """
    mine_ptr = room_ptr + tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK_N)
    for i in tl.range(0, BLOCKS, num_stages=1):
        lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(mine_ptr + lanes, tl.load(ptr + head + lanes, mask=lanes < whole, other=0.0))
    tl.debug_barrier()  # whichever thread reads them, they are there
    return mine_ptr


@triton.jit
def summed_part(x_ptr, residual_ptr, total_ptr, x_offsets, residual_offsets, mask):
    """What is normalised: x, or x + residual as it is rounded when stored."""
    x = load_part(x_ptr, x_offsets, mask)
    if residual_ptr is not None:
        x = (x + load_part(residual_ptr, residual_offsets, mask)).to(total_ptr.dtype.element_ty).to(tl.float32)
    return x
