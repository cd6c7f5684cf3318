"""Kernels for rows that start off the 16-byte grid: see `ops_math.ops._tiles.ends`. Without dropout, x_bias and narrow copy.

The ends are tiles [ENDS, BLOCK_M], for the reason given there.
The order of a row's sums follows its place among eight, so that no more than level 1 is promised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.ends import body_offsets, cut_of, end_columns, load_part, rows_of, shifted, sum_of_row, summed_part, sums_of_row


@triton.jit
def _store_normed(y_ptr, total_ptr, offsets, mask, x, centred, rstd, weight, bias):
    y = centred * rstd
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
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[:, None]
    in_body, in_ends = lanes < whole, (tl.arange(0, ENDS) < num_cols - whole)[:, None]
    weight, end_weight, bias, end_bias = None, None, None, None
    if weight_ptr is not None:
        weight, end_weight = load_part(weight_ptr, head + lanes, in_body), load_part(weight_ptr, end_cols, in_ends)
    if bias_ptr is not None:
        bias, end_bias = load_part(bias_ptr, head + lanes, in_body), load_part(bias_ptr, end_cols, in_ends)
    for tile in tl.range(tl.program_id(0), 8 * tl.cdiv(num_rows, 8 * BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tile, BLOCK_M)
        body_mask, end_mask = (rows < num_rows)[:, None] & in_body, (rows < num_rows)[None, :] & in_ends
        x_begin, residual_begin, begin = rows * x_stride, rows * residual_stride, rows * num_cols

        x = summed_part(x_ptr, residual_ptr, total_ptr, body_offsets(x_begin, lanes), body_offsets(residual_begin, lanes), body_mask)
        ends = summed_part(x_ptr, residual_ptr, total_ptr, x_begin[None, :] + end_cols, residual_begin[None, :] + end_cols, end_mask)

        mean = sum_of_row(x, ends) / num_cols
        centred, end_centred = tl.where(in_body, x - mean[:, None], 0.0), tl.where(in_ends, ends - mean[None, :], 0.0)
        rstd = tl.rsqrt(sum_of_row(centred * centred, end_centred * end_centred) / num_cols + eps)

        _store_normed(y_ptr, total_ptr, body_offsets(begin, lanes), body_mask, x, centred, rstd[:, None], weight, bias)
        _store_normed(y_ptr, total_ptr, begin[None, :] + end_cols, end_mask, ends, end_centred, rstd[None, :], end_weight, end_bias)
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def store_gradient(dtotal_ptr, dx_ptr, dsum_ptr, offsets, dsum_offsets, mask, g, xhat, rstd, g_mean, dot_mean):
    """The gradient of what is normalised, given that of the normalised times the weight, g, and the means over the row."""
    dtotal = (g - g_mean - xhat * dot_mean) * rstd
    if dsum_ptr is not None:
        dtotal += load_part(dsum_ptr, dsum_offsets, mask)
    if dtotal_ptr is not None:
        tl.store(dtotal_ptr + offsets, dtotal.to(dtotal_ptr.dtype.element_ty), mask=mask)
    if dx_ptr is not None:
        tl.store(dx_ptr + offsets, dtotal.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, total_ptr, weight_ptr, room_ptr, mean_ptr, rstd_ptr, dtotal_ptr, dx_ptr, dw_ptr, db_ptr, num_rows, num_cols,
    dy_stride, dsum_stride, total_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[:, None]
    in_body, in_ends = lanes < whole, (tl.arange(0, ENDS) < num_cols - whole)[:, None]
    if weight_ptr is not None:
        end_weight = load_part(weight_ptr, end_cols, in_ends)
        if room_ptr is None:
            weight = load_part(weight_ptr, head + lanes, in_body)
        else:
            room_ptr = shifted(weight_ptr, room_ptr, head, whole, BLOCK_N, 1)
    dw, end_dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([ENDS, BLOCK_M], tl.float32)
    db, end_db = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([ENDS, BLOCK_M], tl.float32)
    for tile in tl.range(tl.program_id(0), 8 * tl.cdiv(num_rows, 8 * BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tile, BLOCK_M)
        body_mask, end_mask = (rows < num_rows)[:, None] & in_body, (rows < num_rows)[None, :] & in_ends
        dy_begin, dsum_begin, total_begin, begin = rows * dy_stride, rows * dsum_stride, rows * total_stride, rows * num_cols

        mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        total = load_part(total_ptr, body_offsets(total_begin, lanes), body_mask)
        g = load_part(dy_ptr, body_offsets(dy_begin, lanes), body_mask)
        end_total = load_part(total_ptr, total_begin[None, :] + end_cols, end_mask)
        end_g = load_part(dy_ptr, dy_begin[None, :] + end_cols, end_mask)

        xhat, end_xhat = (total - mean[:, None]) * rstd[:, None], (end_total - mean[None, :]) * rstd[None, :]
        if dw_ptr is not None:
            dw += g * xhat
            end_dw += end_g * end_xhat
        if db_ptr is not None:
            db += g
            end_db += end_g
        if dtotal_ptr is not None or dx_ptr is not None:
            if weight_ptr is not None:
                weight_now = weight if room_ptr is None else load_part(room_ptr, lanes, in_body)
                g, end_g = g * weight_now + 0.0, end_g * end_weight + 0.0  # fmas, which round: see layer_norm_gradient
            g_sum, dot_sum = sums_of_row(g, end_g, g * xhat, end_g * end_xhat)
            g_mean, dot_mean = g_sum / num_cols, dot_sum / num_cols
            store_gradient(
                dtotal_ptr, dx_ptr, dsum_ptr, body_offsets(begin, lanes), body_offsets(dsum_begin, lanes), body_mask,
                g, xhat, rstd[:, None], g_mean[:, None], dot_mean[:, None],
            )  # fmt: skip
            store_gradient(
                dtotal_ptr, dx_ptr, dsum_ptr, begin[None, :] + end_cols, dsum_begin[None, :] + end_cols, end_mask,
                end_g, end_xhat, rstd[None, :], g_mean[None, :], dot_mean[None, :],
            )  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * num_cols
    if dw_ptr is not None:
        tl.store(dw_ptr + place + head + lanes, tl.sum(dw, 0, keep_dims=True), mask=in_body)
        tl.store(dw_ptr + place + end_cols, tl.sum(end_dw, 1, keep_dims=True), mask=in_ends)
    if db_ptr is not None:
        tl.store(db_ptr + place + head + lanes, tl.sum(db, 0, keep_dims=True), mask=in_body)
        tl.store(db_ptr + place + end_cols, tl.sum(end_db, 1, keep_dims=True), mask=in_ends)
