"""Triton kernels for NVIDIA and AMD GPUs, the same forward and backward.

One tile of rows and columns a program; or, where rows are contiguous and do not begin at multiples of 8 values, a tile of the flat
values, so that these are read and written 16 bytes at a time: what eight neighbours keep is then put together from two or three groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment, as_rows, dense
from ops_math.ops._tiles.philox import keep_flat, keep_tile
from ops_math.ops._tiles.walk import GROUP, multiple_of, whole_groups
from ops_math.ops.dropout.problem import DropoutProblem
from ops_math.rng import honoured, threshold
from ops_math.spec import ITEM_SIZE, Device, cdiv, few_warps, next_power_of_2

WIDEST = 4096  # columns of a tile
FEWEST_ENDS = tl.constexpr(32)  # places of a tile's table of row ends: a warp makes them at once
MOST_TILES = 2**16 - 1  # programs along a grid's second axis


class Config(NamedTuple):
    """Rows a tile, columns a tile, warps."""

    block_m: int
    block_n: int
    num_warps: int


def supports(p: DropoutProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    return "has no fp64 kernel" if p.x == "fp64" else None


def configs(p: DropoutProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Tiles of 1,024 to 8,192 values, 16 or 8 a thread; 32 where flat values are walked, since a thread's share of the table of row ends
    is then spread over more; one to two warps of 8 a thread where a call has too few values for all cores."""
    found = []
    if _off_eights(p):
        sizes = ((4096, 4), (2048, 2), (2048, 4), (4096, 8), (8192, 8))
        if ITEM_SIZE[p.x] == 4:  # 32 values a thread would be twice the registers
            sizes = ((2048, 4), (1024, 2), (4096, 8), (4096, 4))
    else:
        sizes = (*(((4096, 8), (2048, 4)) if p.cols > 2048 else ((2048, 4), (4096, 8))), (1024, 4), (8192, 16))
    warps = few_warps(p.rows * p.cols, 256, device.num_cores)
    for values, num_warps in sizes if warps == 4 else ((warps * 256, warps), *sizes):
        block_n = min(max(next_power_of_2(max(p.cols, 1)), 8), min(values, WIDEST))
        found.append(Config(max(values // block_n, 1), block_n, num_warps))
    return tuple(found)


def _off_eights(p: DropoutProblem) -> bool:
    """Whether rows begin between multiples of 8 values, and are long enough that eight neighbours meet one end of a row at most."""
    return p.cols > 8 and p.cols % 8 != 0


@triton.jit
def _kernel(
    x_ptr, state_ptr, y_ptr, num_rows, num_cols, x_stride, threshold, scale,
    ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(1) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    num_cols, x_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    seed, offset, first_row = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)

    keep = keep_tile(seed, offset, rows + first_row, 0, first_col, threshold, BLOCK_N)
    y = tl.where(keep, x * scale, 0.0)

    tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _flat_tile(
    x_ptr, state_ptr, y_ptr, first, end, num_cols, threshold, scale, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = first + tl.arange(0, BLOCK)
    start, width = tl.cast(first, tl.int64), tl.cast(num_cols, tl.int64)
    if end.dtype != tl.int64:  # a division in 32 bits is a fifth of one in 64
        start, width = start.to(tl.uint32), width.to(tl.uint32)

    x = tl.load(x_ptr + places, mask=places < end, other=0.0).to(tl.float32)
    seed, offset, first_row = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)

    keep = keep_flat(seed, offset, first_row + start // width, start % width, num_cols, threshold, ENDS, BLOCK)
    y = tl.where(keep, x * scale, 0.0)

    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=places < end)


@triton.jit
def _flat_kernel(
    x_ptr, state_ptr, y_ptr, num_values, num_cols, threshold, scale, TAIL: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    end = whole_groups(num_values) if TAIL else num_values

    _flat_tile(x_ptr, state_ptr, y_ptr, first, end, num_cols, threshold, scale, ENDS, BLOCK)
    if TAIL:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            _flat_tile(x_ptr, state_ptr, y_ptr, tl.cast(end, tl.int64), num_values, num_cols, threshold, scale, FEWEST_ENDS, GROUP)


def _walked_flat(p: DropoutProblem, config: Config, x: torch.Tensor) -> bool:
    """Whether rows lie so that eights of values may cross their ends: rows off eights, and rows of more tiles than a grid has."""
    return (_off_eights(p) or cdiv(p.cols, config.block_n) > MOST_TILES) and x.is_contiguous()


def launch_fwd(p: DropoutProblem, config: Config, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x / (1 - p) where the mask keeps, 0 elsewhere."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_MN = as_rows(x)
    if cdiv(p.cols, config.block_n) > MOST_TILES:
        x_MN = dense(x_MN, "rows of dropout's input", "a row has more tiles than a grid has programs along its second axis")
    if _walked_flat(p, config, x_MN):
        values, block = p.rows * p.cols, config.block_m * config.block_n
        ends = max(FEWEST_ENDS.value, next_power_of_2(block // p.cols + 3))
        launch(
            _flat_kernel, (cdiv(values, block),), x_MN, state, y, values, p.cols, threshold(p.p), 1.0 / (1.0 - honoured(p.p)),
            TAIL=values % 16 != 0, ENDS=ends, BLOCK=block, num_warps=config.num_warps,
        )  # fmt: skip
        return y
    launch(
        _kernel, (cdiv(p.rows, config.block_m), cdiv(p.cols, config.block_n)), x_MN, state, y,
        p.rows, p.cols, x_MN.stride(0), threshold(p.p), 1.0 / (1.0 - honoured(p.p)),
        ALIGN=alignment(p.cols, x_MN.stride(0)), BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y


def launch_bwd(p: DropoutProblem, config: Config, dy: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The same function of the gradient, with the mask drawn again."""
    return launch_fwd(p, config, dy, state)
