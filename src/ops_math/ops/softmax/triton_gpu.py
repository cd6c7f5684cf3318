"""Triton kernels for NVIDIA and AMD GPUs.

A row lies in registers when it fits (16,384 columns); wider rows are read twice, the second time for the most part from the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment, as_rows
from ops_math.ops._tiles.ends import num_tiles, off_grid, same_cut, widths
from ops_math.ops._tiles.walk import multiple_of
from ops_math.ops.softmax import triton_gpu_ends as cut
from ops_math.ops.softmax.problem import SoftmaxProblem
from ops_math.spec import DTYPE_OF, Device, cdiv, next_power_of_2

WIDEST = 16384  # columns held in registers: 32 warps x 32 lanes x 16 values
WIDE_BLOCK = 4096


class Config(NamedTuple):
    """Rows a tile, columns a tile, warps, columns at the ends of a row (0: rows are not cut)."""

    block_m: int
    block_n: int
    num_warps: int
    ends: int = 0


def supports(p: SoftmaxProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    return "has no fp64 kernel" if "fp64" in (p.x, p.out) else None


def configs(p: SoftmaxProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """The legal configurations, best guess first: rows cut at the 16-byte grid where they start off it or are little wider than a power
    of two, and the others."""
    if p.cols > WIDEST or not off_grid(p.cols):
        return invariant_configs(p, device, phase)
    lanes, most_warps = (64, 16) if device.kind == "hip" else (32, 32)
    block_n, ends = widths(p.cols)
    found: list[Config] = []
    wishes = ((16, 2048), (8, 1024), (16, 1024), (8, 2048), (8, 4096), (32, 4096))  # values a thread, values a tile
    first = (32, 4096) if block_n >= 4096 else (16, 1024) if block_n <= 256 else (16, 2048)  # as an H200 measured (bf16, 2026-11-30)
    for values, tile in (first, *wishes):
        block_m = max(1, min(tile // block_n, 64, next_power_of_2(p.rows // device.num_cores)))  # few rows are spread over all cores
        num_warps = min(max(block_m * block_n // (values * lanes), 1), most_warps)
        # A row of all threads has one value at least of the ends for each: they meet the body in registers.
        config = Config(block_m, block_n, num_warps, max(ends, num_warps * lanes) if block_m == 1 else ends)
        if config not in found and block_m * block_n <= 32 * config.num_warps * lanes:
            found.append(config)
    return (*found, *invariant_configs(p, device, phase))


def invariant_configs(p: SoftmaxProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Those whose order of sums does not follow a row's place among its neighbours: tiles of whole rows; 16 values a thread first, then 32
    and 8, and more rows a tile for narrow ones."""
    lanes, most_warps = (64, 16) if device.kind == "hip" else (32, 32)
    if p.cols > WIDEST:
        return tuple(Config(1, WIDE_BLOCK, num_warps) for num_warps in (16, 8, 4))
    block_n = next_power_of_2(max(p.cols, 1))
    found: list[Config] = []
    narrow = ((8, 2048),) if block_n < 1024 else ()  # sixteen values a thread spill there (sm_100, 8 bytes)
    if alignment(p.cols) < 16 and block_n < 1024:  # fewer warps: 23 instructions a value at 498 columns instead of 40 (sm_90)
        narrow = ((16, 1024), (8, 1024), *narrow)
    if alignment(p.cols) < 16 and block_n >= 4096:  # H200, bf16: 0.95 of a copy at 3,446 columns instead of 0.87
        narrow = ((32, 2048),)
    for values, tile in (*narrow, (16, 2048), (16, 4096), (32, 2048), (8, 2048), (16, 1024)):
        block_m = max(1, min(tile // block_n, 32))
        num_warps = min(max(block_m * block_n // (values * lanes), 1), most_warps)
        config = Config(block_m, block_n, num_warps)
        if config not in found and block_m * block_n <= 32 * num_warps * lanes:
            found.append(config)
    return tuple(found)


@triton.jit
def _fwd_kernel(
    x_ptr, y_ptr, num_rows, num_cols, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)

    x -= tl.max(x, 1)[:, None]
    e = tl.exp(x)
    y = e * (1.0 / tl.sum(e, 1))[:, None]

    tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_wide_kernel(
    x_ptr, y_ptr, num_rows, num_cols, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    tops = tl.full([BLOCK_N], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(tops, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a lane that has seen only -inf holds a sum of 0, not NaN
        sums = sums * tl.exp(tops - shift) + tl.exp(x - shift)
        tops = higher
    top = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - top), 0)
    scale = 1.0 / total
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + row * num_cols + cols, (tl.exp(x - top) * scale).to(y_ptr.dtype.element_ty), mask=cols < num_cols)


@triton.jit
def _bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, num_rows, num_cols, dy_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, y_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(y_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

    y = tl.load(y_ptr + rows[:, None] * y_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)

    dx = y * (dy - tl.sum(y * dy, 1)[:, None])

    tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_wide_kernel(
    dy_ptr, y_ptr, dx_ptr, num_rows, num_cols, dy_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, y_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(y_stride, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    dots = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * y_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        dots += y * tl.load(dy_ptr + row * dy_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
    dot = tl.sum(dots, 0)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + row * y_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * num_cols + cols, (y * (dy - dot)).to(dx_ptr.dtype.element_ty), mask=cols < num_cols)


def _launch(
    p: SoftmaxProblem, config: Config, kernels: tuple[Any, Any, Any], inputs: tuple[torch.Tensor, ...], result: torch.Tensor
) -> None:
    """Start the kernel for cut, whole or wide rows."""
    of_cut, of_whole, of_wide = kernels
    strides = [t.stride(0) for t in inputs]
    if config.ends and same_cut(p.cols, *inputs):
        launch(
            of_cut, (num_tiles(p.rows, config.block_m),), *inputs, result, p.rows, p.cols, *strides,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ENDS=config.ends, num_warps=config.num_warps,
        )  # fmt: skip
        return
    if config.ends:  # rows that do not start together, as of a view
        block_n = next_power_of_2(p.cols)
        block_m = max(1, 1024 // block_n)
        config = Config(block_m, block_n, max(min(block_m * block_n // 512, 16), 1))
    align = alignment(p.cols, *strides)
    launch(
        of_whole if p.cols <= WIDEST else of_wide, (cdiv(p.rows, config.block_m) if p.cols else 0,),
        *inputs, result, p.rows, p.cols, *strides,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGN=align, num_warps=config.num_warps,
    )  # fmt: skip


def launch_fwd(p: SoftmaxProblem, config: Config, x: torch.Tensor) -> torch.Tensor:
    """y."""
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    _launch(p, config, (cut._fwd_kernel, _fwd_kernel, _fwd_wide_kernel), (as_rows(x),), y)
    return y


def launch_bwd(p: SoftmaxProblem, config: Config, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dx."""
    dx = torch.empty(y.shape, dtype=DTYPE_OF[p.x], device=y.device)
    _launch(p, config, (cut._bwd_kernel, _bwd_kernel, _bwd_wide_kernel), (as_rows(dy), as_rows(y)), dx)
    return dx
