"""Triton kernels for NVIDIA and AMD GPUs.

A row lies in registers when it fits; wider rows are walked in blocks. Programs of the backward are persistent: each owns tiles
p, p + P, ... and one fp32 row of partial sums for each parameter, which a second kernel adds in a fixed order, without atomics.
A pointer that is None stands for a tensor that is absent, and compiles to nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.dispatch import absent
from ops_math.layout import alignment, as_rows
from ops_math.ops._tiles.ends import same_cut
from ops_math.ops._tiles.partials import sum_rows, tile_of_sum
from ops_math.ops._tiles.philox import keep_tile
from ops_math.ops._tiles.rows import layer_norm_gradient, merged_moments, moments
from ops_math.ops._tiles.walk import multiple_of
from ops_math.ops.layer_norm import triton_gpu_columns as columns
from ops_math.ops.layer_norm import triton_gpu_ends as cut
from ops_math.ops.layer_norm import triton_gpu_held
from ops_math.ops.layer_norm.problem import LayerNormProblem, total_dtype
from ops_math.ops.layer_norm.triton_gpu_choice import (
    COLUMNS_M,
    COLUMNS_N,
    WIDE_BLOCK,
    configs,
    invariant_configs,
    is_wide,
    passes,
    supports,
)
from ops_math.ops.layer_norm.triton_gpu_config import Config
from ops_math.rng import honoured, threshold
from ops_math.spec import DTYPE_OF, cdiv, next_power_of_2

__all__ = ["configs", "invariant_configs", "launch_bwd", "launch_fwd", "passes", "supports"]


@triton.jit
def _parameter(ptr, cols, num_cols):
    """A parameter [1, BLOCK_N] in fp32."""
    return tl.load(ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _drop(x, state_ptr, rows, first_col, threshold, scale, BLOCK_N: tl.constexpr):
    """x scaled where the mask keeps, 0 elsewhere."""
    seed, offset, first_row = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    return tl.where(keep_tile(seed, offset, rows + first_row, 0, first_col, threshold, BLOCK_N), x * scale, 0.0)


@triton.jit
def _summed(
    x_ptr, residual_ptr, x_bias_ptr, state_ptr, total_ptr, rows, first_col, mask, num_cols, x_stride, residual_stride, threshold, scale,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What is normalised, zero where masked: x, or dropout(x + x_bias) + residual as it is rounded when stored."""
    cols = first_col + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if x_bias_ptr is not None:
            x += _parameter(x_bias_ptr, cols, num_cols)
        if state_ptr is not None:
            x = _drop(x, state_ptr, rows, first_col, threshold, scale, BLOCK_N)
        x = (x + residual).to(total_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, x_bias_ptr, state_ptr, y_ptr, narrow_ptr, total_ptr, mean_ptr, rstd_ptr,
    num_rows, num_cols, x_stride, residual_stride, eps, threshold, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride, residual_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN), multiple_of(residual_stride, ALIGN)
    cols = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        x = _summed(
            x_ptr, residual_ptr, x_bias_ptr, state_ptr, total_ptr, rows, 0, mask, num_cols, x_stride, residual_stride, threshold, scale,
            BLOCK_N,
        )  # fmt: skip

        centred, mean, variance = moments(x, cols < num_cols, num_cols)
        rstd = tl.rsqrt(variance + eps)
        y = centred * rstd[:, None]
        if weight_ptr is not None:  # loaded late: held over the sums, the parameters would halve the rows in flight
            y = y * _parameter(weight_ptr, cols, num_cols)
        if bias_ptr is not None:
            y = y + _parameter(bias_ptr, cols, num_cols)

        if total_ptr is not None:
            tl.store(total_ptr + rows[:, None] * num_cols + cols[None, :], x.to(total_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        if narrow_ptr is not None:
            tl.store(narrow_ptr + rows[:, None] * num_cols + cols[None, :], y.to(narrow_ptr.dtype.element_ty), mask=mask)
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def _fwd_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, x_bias_ptr, state_ptr, y_ptr, narrow_ptr, total_ptr, mean_ptr, rstd_ptr,
    num_rows, num_cols, x_stride, residual_stride, eps, threshold, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride, residual_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN), multiple_of(residual_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    count, mean, squares = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        x = _summed(
            x_ptr, residual_ptr, x_bias_ptr, state_ptr, total_ptr, rows, start, mask, num_cols, x_stride, residual_stride, threshold,
            scale, BLOCK_N,
        )  # fmt: skip
        if total_ptr is not None:
            tl.store(total_ptr + rows[:, None] * num_cols + cols[None, :], x.to(total_ptr.dtype.element_ty), mask=mask)
        width = tl.minimum(num_cols - start, BLOCK_N)
        _, block_mean, block_variance = moments(x, cols < num_cols, width)
        count, mean, squares = merged_moments(count, mean, squares, width, block_mean, block_variance * width)
    rstd = tl.rsqrt(squares / num_cols + eps)
    tl.store(mean_ptr + rows, mean)
    tl.store(rstd_ptr + rows, rstd)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        # Computed again rather than read back: a thread may not read what another one stored.
        x = _summed(
            x_ptr, residual_ptr, x_bias_ptr, state_ptr, total_ptr, rows, start, mask, num_cols, x_stride, residual_stride, threshold,
            scale, BLOCK_N,
        )  # fmt: skip
        y = (x - mean[:, None]) * rstd[:, None]
        if weight_ptr is not None:
            y = y * _parameter(weight_ptr, cols, num_cols)
        if bias_ptr is not None:
            y = y + _parameter(bias_ptr, cols, num_cols)
        tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        if narrow_ptr is not None:
            tl.store(narrow_ptr + rows[:, None] * num_cols + cols[None, :], y.to(narrow_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _incoming(dy_ptr, dy_narrow_ptr, rows, cols, mask, dy_stride, narrow_stride):
    """The gradient of y: of itself, and of its narrow copy where that has one."""
    g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if dy_narrow_ptr is not None:
        g += tl.load(dy_narrow_ptr + rows[:, None] * narrow_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    return g


@triton.jit
def _bwd_kernel(
    dy_ptr, dy_narrow_ptr, dsum_ptr, total_ptr, weight_ptr, mean_ptr, rstd_ptr, state_ptr, dtotal_ptr, dx_ptr, dw_ptr, db_ptr, dx_bias_ptr,
    num_rows, num_cols, dy_stride, narrow_stride, dsum_stride, total_stride, threshold, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, narrow_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(narrow_stride, ALIGN)
    dsum_stride, total_stride = multiple_of(dsum_stride, ALIGN), multiple_of(total_stride, ALIGN)
    cols = tl.arange(0, BLOCK_N)
    if weight_ptr is not None:
        weight = _parameter(weight_ptr, cols, num_cols)
    dw, db, dx_bias = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        total = tl.load(total_ptr + rows[:, None] * total_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = _incoming(dy_ptr, dy_narrow_ptr, rows, cols, mask, dy_stride, narrow_stride)
        if dsum_ptr is not None:
            dsum = tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)

        xhat = (total - mean[:, None]) * rstd[:, None]
        if dw_ptr is not None:
            dw += tl.sum(g * xhat, 0)
        if db_ptr is not None:
            db += tl.sum(g, 0)
        if dtotal_ptr is not None or dx_ptr is not None or dx_bias_ptr is not None:
            if weight_ptr is not None:
                g = g * weight + 0.0  # one fma, which rounds: see layer_norm_gradient
            dtotal = layer_norm_gradient(g, xhat, rstd, tl.sum(g, 1) / num_cols, tl.sum(g * xhat, 1) / num_cols)
            if dsum_ptr is not None:
                dtotal += dsum
            if dtotal_ptr is not None:
                tl.store(dtotal_ptr + rows[:, None] * num_cols + cols[None, :], dtotal.to(dtotal_ptr.dtype.element_ty), mask=mask)
            if state_ptr is not None and (dx_ptr is not None or dx_bias_ptr is not None):
                dtotal = _drop(dtotal, state_ptr, rows, 0, threshold, scale, BLOCK_N)
            if dx_bias_ptr is not None:
                dx_bias += tl.sum(dtotal, 0)
            if dx_ptr is not None:
                tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dtotal.to(dx_ptr.dtype.element_ty), mask=mask)
    place = tl.program_id(0).to(tl.int64) * num_cols + cols
    if dw_ptr is not None:
        tl.store(dw_ptr + place, dw, mask=cols < num_cols)
    if db_ptr is not None:
        tl.store(db_ptr + place, db, mask=cols < num_cols)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + place, dx_bias, mask=cols < num_cols)


@triton.jit
def _bwd_wide_kernel(
    dy_ptr, dy_narrow_ptr, dsum_ptr, total_ptr, weight_ptr, mean_ptr, rstd_ptr, state_ptr, dtotal_ptr, dx_ptr, means_ptr,
    num_rows, num_cols, dy_stride, narrow_stride, dsum_stride, total_stride, threshold, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, narrow_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(narrow_stride, ALIGN)
    dsum_stride, total_stride = multiple_of(dsum_stride, ALIGN), multiple_of(total_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mean, rstd = tl.load(mean_ptr + rows), tl.load(rstd_ptr + rows)
    gs, dots = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        total = tl.load(total_ptr + rows[:, None] * total_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = _incoming(dy_ptr, dy_narrow_ptr, rows, cols, mask, dy_stride, narrow_stride)
        if weight_ptr is not None:
            g = g * _parameter(weight_ptr, cols, num_cols)
        gs += g
        dots += g * (total - mean[:, None]) * rstd[:, None]
    g_mean, dot_mean = tl.sum(gs, 1) / num_cols, tl.sum(dots, 1) / num_cols
    tl.store(means_ptr + 2 * rows, g_mean)
    tl.store(means_ptr + 2 * rows + 1, dot_mean)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        total = tl.load(total_ptr + rows[:, None] * total_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = _incoming(dy_ptr, dy_narrow_ptr, rows, cols, mask, dy_stride, narrow_stride)
        if weight_ptr is not None:
            g = g * _parameter(weight_ptr, cols, num_cols)
        dtotal = layer_norm_gradient(g, (total - mean[:, None]) * rstd[:, None], rstd, g_mean, dot_mean)
        if dsum_ptr is not None:
            dtotal += tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if dtotal_ptr is not None:
            tl.store(dtotal_ptr + rows[:, None] * num_cols + cols[None, :], dtotal.to(dtotal_ptr.dtype.element_ty), mask=mask)
        if dx_ptr is not None:
            if state_ptr is not None:
                dtotal = _drop(dtotal, state_ptr, rows, start, threshold, scale, BLOCK_N)
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dtotal.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_columns_kernel(
    dy_ptr, dy_narrow_ptr, dsum_ptr, total_ptr, weight_ptr, mean_ptr, rstd_ptr, state_ptr, means_ptr, dw_ptr, db_ptr, dx_bias_ptr,
    num_rows, num_cols, dy_stride, narrow_stride, dsum_stride, total_stride, threshold, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, narrow_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(narrow_stride, ALIGN)
    dsum_stride, total_stride = multiple_of(dsum_stride, ALIGN), multiple_of(total_stride, ALIGN)
    first_col = tl.program_id(1) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    if weight_ptr is not None:
        weight = _parameter(weight_ptr, cols, num_cols)
    dw, db, dx_bias = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        total = tl.load(total_ptr + rows[:, None] * total_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = _incoming(dy_ptr, dy_narrow_ptr, rows, cols, mask, dy_stride, narrow_stride)
        mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)

        xhat = (total - mean[:, None]) * rstd[:, None]
        if dw_ptr is not None:
            dw += tl.sum(g * xhat, 0)
        if db_ptr is not None:
            db += tl.sum(g, 0)
        if dx_bias_ptr is not None:
            if weight_ptr is not None:
                g = g * weight
            g_mean = tl.load(means_ptr + 2 * rows, mask=rows < num_rows, other=0.0)
            dot_mean = tl.load(means_ptr + 2 * rows + 1, mask=rows < num_rows, other=0.0)
            dtotal = layer_norm_gradient(g, xhat, rstd, g_mean, dot_mean)
            if dsum_ptr is not None:
                dtotal += tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            if state_ptr is not None:
                dtotal = _drop(dtotal, state_ptr, rows, first_col, threshold, scale, BLOCK_N)
            dx_bias += tl.sum(dtotal, 0)
    place = tl.program_id(0).to(tl.int64) * num_cols + cols
    if dw_ptr is not None:
        tl.store(dw_ptr + place, dw, mask=cols < num_cols)
    if db_ptr is not None:
        tl.store(db_ptr + place, db, mask=cols < num_cols)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + place, dx_bias, mask=cols < num_cols)


@triton.jit
def _sum_partials_kernel(
    dw_partial_ptr, db_partial_ptr, dx_bias_partial_ptr, dw_ptr, db_ptr, dx_bias_ptr, num_partials, num_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)  # one parameter a program, so that the three sums run side by side
    if dw_ptr is not None:
        if which == 0:
            sum_rows(dw_partial_ptr, dw_ptr, num_partials, num_cols, BLOCK_M, BLOCK_N)
    if db_ptr is not None:
        if which == 1:
            sum_rows(db_partial_ptr, db_ptr, num_partials, num_cols, BLOCK_M, BLOCK_N)
    if dx_bias_ptr is not None:
        if which == 2:
            sum_rows(dx_bias_partial_ptr, dx_bias_ptr, num_partials, num_cols, BLOCK_M, BLOCK_N)


def _contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def _uncut(p: LayerNormProblem, config: Config, phase: str) -> Config:
    """What does the work of a configuration for tensors whose rows do not start together, as of a view."""
    if not config.ends:
        return config
    block_n = WIDE_BLOCK if is_wide(p, phase) else next_power_of_2(p.cols)
    block_m = max(1, min(config.block_m, 1024 // block_n))
    return Config(block_m, block_n, max(min(block_m * block_n // 512, 16), 1), config.num_programs, 1)


def _mask_scalars(p: LayerNormProblem) -> tuple[int, float]:
    return threshold(p.dropout_p), 1.0 / (1.0 - honoured(p.dropout_p))


def launch_fwd(
    p: LayerNormProblem,
    config: Config,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    x_bias: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """y, sum (empty without a residual), mean [rows], rstd [rows] and y once more in the narrow dtype (empty without one)."""
    shape = x.shape
    y = x.new_empty(shape, dtype=DTYPE_OF[p.out])
    narrow = x.new_empty(shape, dtype=DTYPE_OF[p.narrow]) if p.narrow else None
    total = None if residual is None else x.new_empty(shape, dtype=total_dtype(p))
    mean, rstd = x.new_empty(p.rows, dtype=torch.float32), x.new_empty(p.rows, dtype=torch.float32)
    x_MN = as_rows(x)
    residual_MN = None if residual is None else as_rows(residual)
    sizes = p.cols, x_MN.stride(0), 0 if residual_MN is None else residual_MN.stride(0)
    parameters = _contiguous(weight), _contiguous(bias)
    if config.ends and same_cut(p.cols, x_MN, residual_MN):
        launch(
            cut._fwd_kernel, (config.num_programs,), x_MN, residual_MN, *parameters, y, total, mean, rstd, p.rows, *sizes, p.eps,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ENDS=config.ends, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        config = _uncut(p, config, "fwd")
        wide = config.block_n < p.cols
        align = alignment(*sizes)
        launch(
            _fwd_wide_kernel if wide else _fwd_kernel, (p.rows if wide else config.num_programs,),
            x_MN, residual_MN, *parameters, _contiguous(x_bias), state, y, narrow, total, mean, rstd,
            p.rows, *sizes, p.eps, *_mask_scalars(p),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, ALIGN=align, num_warps=config.num_warps,
            registers=config.registers,
        )  # fmt: skip
    return y, absent(x) if total is None else total, mean, rstd, absent(x) if narrow is None else narrow


def launch_bwd(
    p: LayerNormProblem,
    config: Config,
    dy: torch.Tensor,
    dy_narrow: torch.Tensor | None,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dtotal, dx, dweight, dbias, dx_bias (empty where not needed)."""
    dtotal = total.new_empty(total.shape) if p.need_dtotal else None
    dx = total.new_empty(total.shape, dtype=DTYPE_OF[p.x]) if p.need_dx else None
    wanted = ((p.need_dw, p.weight), (p.need_db, p.bias), (p.need_dx_bias, p.x_bias))
    sums = [total.new_empty(p.cols, dtype=DTYPE_OF[name]) if need else None for need, name in wanted]
    partials: list[torch.Tensor | None] = [None, None, None]
    if p.need_dw or p.need_db or p.need_dx_bias:  # one buffer for the three
        buffer = total.new_empty((3, config.num_programs, p.cols), dtype=torch.float32)
        partials = [part if need else None for part, (need, _) in zip(buffer.unbind(), wanted, strict=True)]
    total_MN, dy_MN = as_rows(total), as_rows(dy)
    narrow_MN, dsum_MN = (None if t is None else as_rows(t) for t in (dy_narrow, dsum))
    inputs = dy_MN, narrow_MN, dsum_MN, total_MN, _contiguous(weight), mean, rstd, state
    strides = [0 if t is None else t.stride(0) for t in inputs[:4]]
    if config.blocks and (not config.ends or same_cut(p.cols, dy_MN, dsum_MN, total_MN)):
        triton_gpu_held.launch_bwd(p, config, inputs, dtotal, dx, partials, (p.cols, strides[0], *strides[2:]))
    elif config.by_columns:
        columns.launch_bwd(p, config, inputs, dtotal, dx, partials, (p.cols, strides[0], *strides[2:]))
    elif config.ends and same_cut(p.cols, dy_MN, dsum_MN, total_MN):
        late = config.late and inputs[4] is not None
        room = inputs[4].new_empty((config.num_programs, config.block_n)) if late else None  # type: ignore[union-attr]
        launch(
            cut._bwd_kernel, (config.num_programs,), dy_MN, dsum_MN, total_MN, inputs[4], room, mean, rstd, dtotal, dx, *partials[:2],
            p.rows, p.cols, strides[0], *strides[2:],
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, ENDS=config.ends, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        _launch_uncut_bwd(p, _uncut(p, config, "bwd"), inputs, dtotal, dx, partials, (p.cols, *strides))
    if any(need for need, _ in wanted):
        programs, tile = tile_of_sum(p.cols)
        launch(_sum_partials_kernel, (programs, 3), *partials, *sums, config.num_programs, p.cols, **tile)
    return tuple(absent(total) if t is None else t for t in (dtotal, dx, *sums))


def _launch_uncut_bwd(
    p: LayerNormProblem,
    config: Config,
    inputs: tuple[torch.Tensor | None, ...],
    dtotal: torch.Tensor | None,
    dx: torch.Tensor | None,
    partials: list[torch.Tensor | None],
    sizes: tuple[int, ...],
) -> None:
    """Gradients of rows and partial sums of those of parameters; wide rows first, then the sums, which read the rows' means."""
    align = alignment(*sizes)
    scalars = p.rows, *sizes, *_mask_scalars(p)
    if config.block_n >= p.cols:
        launch(
            _bwd_kernel, (config.num_programs,), *inputs, dtotal, dx, *partials, *scalars,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, ALIGN=align, num_warps=config.num_warps,
        )  # fmt: skip
        return
    means = torch.empty((p.rows, 2), dtype=torch.float32, device=inputs[3].device)  # type: ignore[union-attr]
    if dtotal is not None or dx is not None or p.need_dx_bias:
        launch(
            _bwd_wide_kernel, (p.rows,), *inputs, dtotal, dx, means, *scalars,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, ALIGN=align, num_warps=config.num_warps,
        )  # fmt: skip
    if any(t is not None for t in partials):
        launch(
            _bwd_columns_kernel, (config.num_programs, cdiv(p.cols, COLUMNS_N)), *inputs, means, *partials, *scalars,
            BLOCK_M=COLUMNS_M, BLOCK_N=COLUMNS_N, ALIGN=align, num_warps=4,
        )  # fmt: skip
