"""Kernels for rows that start off the 16-byte grid: see `ops_math.ops._tiles.ends`. Without dropout, x_bias and narrow copy.

The order of a row's sums follows its place among eight, so that no more than level 1 is promised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.ends import cut_of, end_columns, first_boundary, rows_of
from ops_math.ops._tiles.rows import layer_norm_gradient


@triton.jit
def _tile(ptr, offsets, mask):
    """Values in fp32, zero where masked."""
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _summed(x_ptr, residual_ptr, total_ptr, x_offsets, residual_offsets, mask):
    """What is normalised: x, or x + residual as it is rounded when stored."""
    x = _tile(x_ptr, x_offsets, mask)
    if residual_ptr is not None:
        x = (x + _tile(residual_ptr, residual_offsets, mask)).to(total_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _store_normed(y_ptr, total_ptr, offsets, mask, x, centred, rstd, weight, bias):
    y = centred * rstd[:, None]
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    if total_ptr is not None:
        tl.store(total_ptr + offsets, x.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr, num_rows, num_cols, x_stride, residual_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[None, :]
    in_body, in_ends = lanes < whole, (tl.arange(0, ENDS) < num_cols - whole)[None, :]
    weight, end_weight, bias, end_bias = None, None, None, None
    if weight_ptr is not None:
        weight, end_weight = _tile(weight_ptr, head + lanes, in_body), _tile(weight_ptr, end_cols, in_ends)
    if bias_ptr is not None:
        bias, end_bias = _tile(bias_ptr, head + lanes, in_body), _tile(bias_ptr, end_cols, in_ends)
    for tile in tl.range(tl.program_id(0), 8 * tl.cdiv(num_rows, 8 * BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tile, BLOCK_M)
        exists = (rows < num_rows)[:, None]
        x_begin, residual_begin, begin = (rows * x_stride)[:, None], (rows * residual_stride)[:, None], (rows * num_cols)[:, None]

        x = _summed(
            x_ptr, residual_ptr, total_ptr, first_boundary(x_begin) + lanes, first_boundary(residual_begin) + lanes, exists & in_body
        )
        ends = _summed(x_ptr, residual_ptr, total_ptr, x_begin + end_cols, residual_begin + end_cols, exists & in_ends)

        mean = (tl.sum(x, 1) + tl.sum(ends, 1)) / num_cols
        centred, end_centred = tl.where(in_body, x - mean[:, None], 0.0), tl.where(in_ends, ends - mean[:, None], 0.0)
        rstd = tl.rsqrt((tl.sum(centred * centred, 1) + tl.sum(end_centred * end_centred, 1)) / num_cols + eps)

        _store_normed(y_ptr, total_ptr, first_boundary(begin) + lanes, exists & in_body, x, centred, rstd, weight, bias)
        _store_normed(y_ptr, total_ptr, begin + end_cols, exists & in_ends, ends, end_centred, rstd, end_weight, end_bias)
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def _store_gradient(dtotal_ptr, dx_ptr, dsum_ptr, offsets, dsum_offsets, mask, g, xhat, rstd, g_mean, dot_mean):
    dtotal = layer_norm_gradient(g, xhat, rstd, g_mean, dot_mean)
    if dsum_ptr is not None:
        dtotal += _tile(dsum_ptr, dsum_offsets, mask)
    if dtotal_ptr is not None:
        tl.store(dtotal_ptr + offsets, dtotal.to(dtotal_ptr.dtype.element_ty), mask=mask)
    if dx_ptr is not None:
        tl.store(dx_ptr + offsets, dtotal.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, total_ptr, weight_ptr, mean_ptr, rstd_ptr, dtotal_ptr, dx_ptr, dw_ptr, db_ptr, num_rows, num_cols, dy_stride,
    dsum_stride, total_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[None, :]
    in_body, in_ends = lanes < whole, (tl.arange(0, ENDS) < num_cols - whole)[None, :]
    if weight_ptr is not None:
        weight, end_weight = _tile(weight_ptr, head + lanes, in_body), _tile(weight_ptr, end_cols, in_ends)
    dw, end_dw = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, ENDS], tl.float32)
    db, end_db = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, ENDS], tl.float32)
    for tile in tl.range(tl.program_id(0), 8 * tl.cdiv(num_rows, 8 * BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tile, BLOCK_M)
        exists = (rows < num_rows)[:, None]
        dy_begin, dsum_begin, total_begin = (rows * dy_stride)[:, None], (rows * dsum_stride)[:, None], (rows * total_stride)[:, None]
        begin = (rows * num_cols)[:, None]

        mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        total = _tile(total_ptr, first_boundary(total_begin) + lanes, exists & in_body)
        g = _tile(dy_ptr, first_boundary(dy_begin) + lanes, exists & in_body)
        end_total = _tile(total_ptr, total_begin + end_cols, exists & in_ends)
        end_g = _tile(dy_ptr, dy_begin + end_cols, exists & in_ends)

        xhat, end_xhat = (total - mean[:, None]) * rstd[:, None], (end_total - mean[:, None]) * rstd[:, None]
        if dw_ptr is not None:
            dw += tl.sum(g * xhat, 0, keep_dims=True)
            end_dw += tl.sum(end_g * end_xhat, 0, keep_dims=True)
        if db_ptr is not None:
            db += tl.sum(g, 0, keep_dims=True)
            end_db += tl.sum(end_g, 0, keep_dims=True)
        if dtotal_ptr is not None or dx_ptr is not None:
            if weight_ptr is not None:
                g, end_g = g * weight + 0.0, end_g * end_weight + 0.0  # fmas, which round: see layer_norm_gradient
            g_mean = (tl.sum(g, 1) + tl.sum(end_g, 1)) / num_cols
            dot_mean = (tl.sum(g * xhat, 1) + tl.sum(end_g * end_xhat, 1)) / num_cols
            _store_gradient(
                dtotal_ptr, dx_ptr, dsum_ptr, first_boundary(begin) + lanes, first_boundary(dsum_begin) + lanes, exists & in_body,
                g, xhat, rstd, g_mean, dot_mean,
            )  # fmt: skip
            _store_gradient(
                dtotal_ptr, dx_ptr, dsum_ptr, begin + end_cols, dsum_begin + end_cols, exists & in_ends,
                end_g, end_xhat, rstd, g_mean, dot_mean,
            )  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * num_cols
    if dw_ptr is not None:
        tl.store(dw_ptr + place + head + lanes, dw, mask=in_body)
        tl.store(dw_ptr + place + end_cols, end_dw, mask=in_ends)
    if db_ptr is not None:
        tl.store(db_ptr + place + head + lanes, db, mask=in_body)
        tl.store(db_ptr + place + end_cols, end_db, mask=in_ends)
