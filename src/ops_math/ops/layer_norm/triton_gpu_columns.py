"""The backward of rows of any width in two kernels: the means of each row, then its gradient together with the sums of columns.

Of 6 bytes a value that a bf16 backward must move 10 are moved, as by a kernel of rows and one of columns after it, but nothing waits: sums
lie in registers until the last row, where that one added them up across warps for each tile. Without dropout, x_bias and narrow copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment
from ops_math.ops._tiles.ends import load_part
from ops_math.ops._tiles.rows import layer_norm_gradient
from ops_math.ops._tiles.walk import multiple_of
from ops_math.ops.layer_norm.problem import LayerNormProblem
from ops_math.ops.layer_norm.triton_gpu_config import Config
from ops_math.spec import cdiv

MEANS_BLOCK = 4096


@triton.jit
def _bwd_means_kernel(
    dy_ptr, total_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, num_cols, dy_stride, total_stride,
    BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, total_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(total_stride, ALIGN)
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
    gs, dots = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=1, loop_unroll_factor=AHEAD):
        cols = start + tl.arange(0, BLOCK_N)
        total = load_part(total_ptr + row * total_stride, cols, cols < num_cols)
        g = load_part(dy_ptr + row * dy_stride, cols, cols < num_cols)
        if weight_ptr is not None:
            g = g * load_part(weight_ptr, cols, cols < num_cols)
        gs += g
        dots += g * (total - mean)
    tl.store(means_ptr + 2 * row, tl.sum(gs, 0) / num_cols)
    tl.store(means_ptr + 2 * row + 1, tl.sum(dots, 0) * rstd / num_cols)


@triton.jit
def _bwd_columns_kernel(
    dy_ptr, dsum_ptr, total_ptr, weight_ptr, mean_ptr, rstd_ptr, means_ptr, dtotal_ptr, dx_ptr, dw_ptr, db_ptr, num_rows, num_cols,
    dy_stride, dsum_stride, total_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN)
    dsum_stride, total_stride = multiple_of(dsum_stride, ALIGN), multiple_of(total_stride, ALIGN)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if weight_ptr is not None:
        weight = load_part(weight_ptr, cols, cols < num_cols)[None, :]
    # Rows a tile are added last: between warps a sum in each turn would take longer than the tile.
    dw, db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = rows < num_rows
        mask = there[:, None] & (cols < num_cols)[None, :]

        total = load_part(total_ptr, rows[:, None] * total_stride + cols[None, :], mask)
        g = load_part(dy_ptr, rows[:, None] * dy_stride + cols[None, :], mask)
        mean, rstd = load_part(mean_ptr, rows, there), load_part(rstd_ptr, rows, there)
        g_mean, dot_mean = load_part(means_ptr, 2 * rows, there), load_part(means_ptr, 2 * rows + 1, there)

        xhat = (total - mean[:, None]) * rstd[:, None]
        dw += g * xhat
        db += g
        if weight_ptr is not None:
            g = g * weight + 0.0  # an fma, which rounds: see layer_norm_gradient
        dtotal = layer_norm_gradient(g, xhat, rstd, g_mean, dot_mean)
        if dsum_ptr is not None:
            dtotal += load_part(dsum_ptr, rows[:, None] * dsum_stride + cols[None, :], mask)
        if dtotal_ptr is not None:
            tl.store(dtotal_ptr + rows[:, None] * num_cols + cols[None, :], dtotal.to(dtotal_ptr.dtype.element_ty), mask=mask)
        if dx_ptr is not None:
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dtotal.to(dx_ptr.dtype.element_ty), mask=mask)
    place = tl.program_id(0).to(tl.int64) * num_cols + cols
    if dw_ptr is not None:
        tl.store(dw_ptr + place, tl.sum(dw, 0), mask=cols < num_cols)
    if db_ptr is not None:
        tl.store(db_ptr + place, tl.sum(db, 0), mask=cols < num_cols)


def launch_bwd(
    p: LayerNormProblem,
    config: Config,
    inputs: tuple[torch.Tensor | None, ...],
    dtotal: torch.Tensor | None,
    dx: torch.Tensor | None,
    partials: list[torch.Tensor | None],
    sizes: tuple[int, ...],
) -> None:
    """The rows' means, then their gradients together with partial sums of those of parameters."""
    dy, _, dsum, total, weight, mean, rstd, _ = inputs
    align, (cols, dy_stride, _, total_stride) = alignment(*sizes), sizes
    means = mean.new_empty((p.rows, 2))  # type: ignore[union-attr]
    launch(
        _bwd_means_kernel, (p.rows,), dy, total, weight, mean, rstd, means, cols, dy_stride, total_stride,
        BLOCK_N=MEANS_BLOCK, ALIGN=align, AHEAD=2, num_warps=8,
    )  # fmt: skip
    launch(
        _bwd_columns_kernel, (config.num_programs, cdiv(cols, config.block_n)),
        dy, dsum, total, weight, mean, rstd, means, dtotal, dx, *partials[:2], p.rows, *sizes,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, ALIGN=align, STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
