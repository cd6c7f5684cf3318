"""Triton kernels for NVIDIA and AMD GPUs.

Without a bias contiguous tensors are one long row, whose last values, where their number is no multiple of 16, are a tile of their own;
other tensors are walked by rows and read by as many values as divide widths and strides. The bias's gradient is summed in two stages of
fixed order: each program adds its rows p, p + P, ... in registers and writes one fp32 row, and the rows are added at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment, as_rows
from ops_math.ops._tiles.activation import activate, activate_with_slope
from ops_math.ops._tiles.walk import GROUP, multiple_of, num_tiles, tail, whole_groups
from ops_math.ops.glu.problem_gelu import GeluProblem
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Device, cdiv, few_warps, next_power_of_2

ACTIVATION = {"none": "gelu", "tanh": "gelu_tanh"}


class Config(NamedTuple):
    """Values a tile, its widest row where there is a bias, warps; in the sum for the bias programs a column of tiles, and tiles loaded
    ahead (1: none)."""

    block: int
    width: int
    num_warps: int
    num_programs: int
    num_stages: int


def supports(p: GeluProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    return "has no fp64 kernel" if "fp64" in (p.x, p.bias, p.out) else None


def configs(p: GeluProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """One or two 16-byte accesses a thread and tensor; with a bias, rows that share its load; fewest warps where a call has too few values
    for all cores."""
    wave = 64 if device.kind == "hip" else 32
    vector = 16 // max(ITEM_SIZE[p.x], ITEM_SIZE[p.out])
    # Tiles loaded ahead win where only dx is stored (H200: 3,596 against 2,991 GB/s), and lose where y is stored too (3,379 and 3,708).
    if phase == "bwd" and p.bias and p.need_dbias:
        wishes = ((8, 1, 512, 1 if p.need_y else 3), (8, 1, 512, 3 if p.need_y else 1), (4, 1, 512, 3), (4, 2, 512, 3), (4, 1, 1024, 1))
    else:
        wishes = ((4, 2, 512, 1), (4, 4, 1024, 1), (8, 2, 1024, 1), (4, 1, 256, 1))
        if p.bias and phase == "fwd":
            wishes = ((4, 4, 1024, 1), *wishes)
        warps = few_warps(p.rows * p.cols, wave * vector, device.num_cores)
        if warps < 4:
            wishes = ((warps, 1, 512, 1), *wishes)
    found = []
    for warps, each, width, num_stages in wishes:
        block = wave * warps * vector * each
        tiles = max(1, -(-p.cols // min(width, next_power_of_2(max(p.cols, 1)))))
        programs = max(1, min(32 // warps * device.num_cores // tiles, -(-p.rows * width // block), 1024))
        if device.kind != "hip" or num_stages == 1:
            found.append(Config(block, width, warps, programs, num_stages))
    return tuple(dict.fromkeys(found))


@triton.jit
def _fwd_tile(
    x_ptr, bias_ptr, y_ptr, rows, cols, x_stride, y_stride, mask,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        # Pointers of the tile's shape: a row of its own would be spread over threads and gathered through shared memory.
        x += tl.load(bias_ptr + tl.broadcast_to(cols, (BLOCK_M, BLOCK_N)), mask=mask, other=0.0).to(tl.float32)

    y = activate(x, ACTIVATION)

    tl.store(y_ptr + rows * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_kernel(
    x_ptr, bias_ptr, y_ptr, num_rows, num_cols, x_stride, y_stride,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, width = num_tiles(num_cols, BLOCK_N), whole_groups(num_cols) if TAIL else multiple_of(num_cols, ALIGN)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < width)
    x_stride, y_stride = multiple_of(x_stride, ALIGN), multiple_of(y_stride, ALIGN)

    _fwd_tile(x_ptr, bias_ptr, y_ptr, rows, cols, x_stride, y_stride, mask, ACTIVATION, HAS_BIAS, BLOCK_M, BLOCK_N)
    if TAIL:
        if tl.program_id(0) == tiles - 1:
            last = tail(num_cols)
            _fwd_tile(x_ptr, bias_ptr, y_ptr, 0, last, 0, 0, last < num_cols, ACTIVATION, False, 1, GROUP)


@triton.jit
def _bwd_tile(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, y_ptr, rows, cols, dy_stride, x_stride, dx_stride, y_stride, mask,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, NEED_Y: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + tl.broadcast_to(cols, (BLOCK_M, BLOCK_N)), mask=mask, other=0.0).to(tl.float32)

    y, slope = activate_with_slope(x, ACTIVATION)

    tl.store(dx_ptr + rows * dx_stride + cols, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_Y:
        tl.store(y_ptr + rows * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, y_ptr, num_rows, num_cols, dy_stride, x_stride, dx_stride, y_stride,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, NEED_Y: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, width = num_tiles(num_cols, BLOCK_N), whole_groups(num_cols) if TAIL else multiple_of(num_cols, ALIGN)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < width)

    _bwd_tile(
        dy_ptr, x_ptr, bias_ptr, dx_ptr, y_ptr, rows, cols,
        multiple_of(dy_stride, ALIGN), multiple_of(x_stride, ALIGN), multiple_of(dx_stride, ALIGN), multiple_of(y_stride, ALIGN), mask,
        ACTIVATION, HAS_BIAS, NEED_Y, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if TAIL:
        if tl.program_id(0) == tiles - 1:
            last = tail(num_cols)
            _bwd_tile(
                dy_ptr, x_ptr, bias_ptr, dx_ptr, y_ptr, 0, last, 0, 0, 0, 0, last < num_cols, ACTIVATION, False, NEED_Y, 1, GROUP
            )  # fmt: skip


@triton.jit
def _bwd_bias_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, y_ptr, partial_ptr, num_rows, num_cols, dy_stride, x_stride, num_programs,
    ACTIVATION: tl.constexpr, NEED_DX: tl.constexpr, NEED_Y: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, x_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(x_stride, ALIGN)
    tiles = tl.cdiv(num_cols, BLOCK_N)
    pid = tl.program_id(0) // tiles
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    bias = tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(pid, tl.cdiv(num_rows, BLOCK_M), num_programs, num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < num_rows) & (cols < num_cols)[None, :]

        dy = tl.load(dy_ptr + rows * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32) + bias

        y, slope = activate_with_slope(x, ACTIVATION)
        dx = tl.where(mask, dy * slope, 0.0)  # a masked lane's slope may be NaN
        dbias += dx

        if NEED_DX:
            tl.store(dx_ptr + rows * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_Y:
            tl.store(y_ptr + rows * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + pid.to(tl.int64) * num_cols + cols, tl.sum(dbias, 0), mask=cols < num_cols)


def _tile(p: GeluProblem, config: Config, flat: bool) -> tuple[int, int, int, int]:
    """Rows and columns to walk, and of a tile."""
    if flat:
        return min(p.rows, 1), p.rows * p.cols, 1, config.block
    block_n = min(next_power_of_2(p.cols), config.width, config.block)
    return p.rows, p.cols, config.block // block_n, block_n


def _constants(shape: tuple[int, int, int, int], strides: tuple[int, ...], flat: bool) -> dict[str, Any]:
    """The kernels' constants for `_tile` and the strides of all tensors."""
    _, num_cols, block_m, block_n = shape
    align = 16 if flat else alignment(num_cols, *strides)
    return {"ALIGN": align, "TAIL": flat and num_cols % 16 != 0, "BLOCK_M": block_m, "BLOCK_N": block_n}


def _grid(num_rows: int, num_cols: int, block_m: int, block_n: int) -> tuple[int, ...]:
    return (cdiv(num_rows, block_m) * cdiv(num_cols, block_n),)


def launch_activation(activation: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """y = activation(x), elementwise; y contiguous."""
    rows = as_rows(x)
    block_n = min(next_power_of_2(max(rows.shape[1], 1)), 1024)
    shape, strides = (rows.shape[0], rows.shape[1], 1024 // block_n, block_n), (rows.stride(0), rows.shape[1])
    launch(
        _fwd_kernel, _grid(*shape), rows, rows, y, *shape[:2], *strides,
        ACTIVATION=activation, HAS_BIAS=False, **_constants(shape, strides, False), num_warps=4,
    )  # fmt: skip


def launch_fwd(p: GeluProblem, config: Config, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    rows = as_rows(x)
    flat = bias is None and rows.is_contiguous()
    shape = _tile(p, config, flat) if y.numel() else (0, 0, 1, 1)
    strides = (0, 0) if flat else (rows.stride(0), p.cols)
    launch(
        _fwd_kernel, _grid(*shape), rows, rows if bias is None else bias.contiguous(), y, *shape[:2], *strides,
        ACTIVATION=ACTIVATION[p.approximate], HAS_BIAS=bias is not None, **_constants(shape, strides, flat), num_warps=config.num_warps,
    )  # fmt: skip
    return y


def launch_bwd(
    p: GeluProblem, config: Config, dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dbias and y; empty where not asked for."""
    dx = torch.empty(x.shape if p.need_dx else (0,), dtype=x.dtype, device=x.device)
    y = torch.empty(dy.shape if p.need_y else (0,), dtype=dy.dtype, device=x.device)
    dy_rows, rows = as_rows(dy), as_rows(x)
    if p.need_dbias and bias is not None:
        return dx, _launch_bwd_bias(p, config, dy_rows, rows, bias.contiguous(), dx, y), y
    if not p.need_dx:
        return dx, x.new_empty(0), launch_fwd(p, config, x, bias) if p.need_y else y
    flat = bias is None and rows.is_contiguous() and dy_rows.is_contiguous()
    shape = _tile(p, config, flat) if dx.numel() else (0, 0, 1, 1)
    strides = (0,) * 4 if flat else (dy_rows.stride(0), rows.stride(0), p.cols, p.cols)
    launch(
        _bwd_kernel, _grid(*shape), dy_rows, rows, rows if bias is None else bias.contiguous(), dx, y, *shape[:2], *strides,
        ACTIVATION=ACTIVATION[p.approximate], HAS_BIAS=bias is not None, NEED_Y=p.need_y, **_constants(shape, strides, flat),
        num_warps=config.num_warps,
    )  # fmt: skip
    return dx, x.new_empty(0), y


def _launch_bwd_bias(
    p: GeluProblem, config: Config, dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, dx: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """dbias, with dx and y on the way."""
    partial = torch.empty((config.num_programs, p.cols), dtype=torch.float32, device=x.device)
    _, _, block_m, block_n = _tile(p, config, False) if p.cols else (0, 0, 1, 1)
    strides = dy.stride(0), x.stride(0)
    launch(
        _bwd_bias_kernel, (config.num_programs * cdiv(p.cols, block_n),), dy, x, bias, dx, y, partial,
        p.rows, p.cols, *strides, config.num_programs,
        ACTIVATION=ACTIVATION[p.approximate], NEED_DX=p.need_dx, NEED_Y=p.need_y, ALIGN=alignment(p.cols, *strides),
        BLOCK_M=block_m, BLOCK_N=block_n, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return partial.sum(0).to(bias.dtype)
