"""Kernels for rows that start off the 16-byte grid: see `ops_math.ops._tiles.ends`.

Value by value such a row takes 23 instructions a value forward, a body of whole groups 12, as on the grid (sm_90). The ends are tiles
[ENDS, BLOCK_M]: in the body's order of dimensions they would take its layout, eight values a thread and the same on all (Triton 3.6).
The order of a row's sum follows its place among eight, so that no more than level 1 is promised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.ends import body_offsets, cut_of, end_columns, load_part, rows_of, sum_of_row, summed_part


@triton.jit
def _store_normed(y_ptr, total_ptr, offsets, mask, x, rstd, weight):
    y = x * rstd
    if weight is not None:
        y = y * weight
    if total_ptr is not None:
        tl.store(total_ptr + offsets, x.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, num_rows, num_cols, x_stride, residual_stride, eps, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[:, None]
    in_body, in_ends = lanes < whole, (tl.arange(0, ENDS) < num_cols - whole)[:, None]
    weight, end_weight = None, None
    if weight_ptr is not None:
        weight = load_part(weight_ptr, head + lanes, in_body) + weight_offset
        end_weight = load_part(weight_ptr, end_cols, in_ends) + weight_offset
    for tile in tl.range(tl.program_id(0), 8 * tl.cdiv(num_rows, 8 * BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tile, BLOCK_M)
        body_mask, end_mask = (rows < num_rows)[:, None] & in_body, (rows < num_rows)[None, :] & in_ends
        x_begin, residual_begin, begin = rows * x_stride, rows * residual_stride, rows * num_cols

        x = summed_part(x_ptr, residual_ptr, total_ptr, body_offsets(x_begin, lanes), body_offsets(residual_begin, lanes), body_mask)
        ends = summed_part(x_ptr, residual_ptr, total_ptr, x_begin[None, :] + end_cols, residual_begin[None, :] + end_cols, end_mask)

        rstd = tl.rsqrt(sum_of_row(x * x, ends * ends) / num_cols + eps)

        _store_normed(y_ptr, total_ptr, body_offsets(begin, lanes), body_mask, x, rstd[:, None], weight)
        _store_normed(y_ptr, total_ptr, begin[None, :] + end_cols, end_mask, ends, rstd[None, :], end_weight)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def store_gradient(dx_ptr, dsum_ptr, offsets, dsum_offsets, mask, g, xhat, rstd, dot_mean):
    """The gradient of what is normalised, given that of the normalised times the weight, g, and the means over the row."""
    dx = (g - xhat * dot_mean) * rstd
    if dsum_ptr is not None:
        dx += load_part(dsum_ptr, dsum_offsets, mask)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[:, None]
    in_body, in_ends = lanes < whole, (tl.arange(0, ENDS) < num_cols - whole)[:, None]
    if weight_ptr is not None:
        weight = load_part(weight_ptr, head + lanes, in_body) + weight_offset
        end_weight = load_part(weight_ptr, end_cols, in_ends) + weight_offset
    # Rows a tile are added last: between warps a sum in each turn would take longer than the row.
    dw, end_dw = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([ENDS, BLOCK_M], tl.float32)
    for tile in tl.range(tl.program_id(0), 8 * tl.cdiv(num_rows, 8 * BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = rows_of(tile, BLOCK_M)
        body_mask, end_mask = (rows < num_rows)[:, None] & in_body, (rows < num_rows)[None, :] & in_ends
        dy_begin, dsum_begin, x_begin, begin = rows * dy_stride, rows * dsum_stride, rows * x_stride, rows * num_cols

        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        xhat = load_part(x_ptr, body_offsets(x_begin, lanes), body_mask) * rstd[:, None]
        g = load_part(dy_ptr, body_offsets(dy_begin, lanes), body_mask)
        end_xhat = load_part(x_ptr, x_begin[None, :] + end_cols, end_mask) * rstd[None, :]
        end_g = load_part(dy_ptr, dy_begin[None, :] + end_cols, end_mask)

        if dw_ptr is not None:
            dw += g * xhat
            end_dw += end_g * end_xhat
        if dx_ptr is not None:
            if weight_ptr is not None:
                g, end_g = g * weight, end_g * end_weight
            dot_mean = sum_of_row(g * xhat, end_g * end_xhat) / num_cols
            store_gradient(
                dx_ptr, dsum_ptr, body_offsets(begin, lanes), body_offsets(dsum_begin, lanes), body_mask,
                g, xhat, rstd[:, None], dot_mean[:, None],
            )  # fmt: skip
            store_gradient(
                dx_ptr, dsum_ptr, begin[None, :] + end_cols, dsum_begin[None, :] + end_cols, end_mask,
                end_g, end_xhat, rstd[None, :], dot_mean[None, :],
            )  # fmt: skip
    if dw_ptr is not None:
        place = dw_ptr + tl.program_id(0).to(tl.int64) * num_cols
        tl.store(place + head + lanes, tl.sum(dw, 0, keep_dims=True), mask=in_body)
        tl.store(place + end_cols, tl.sum(end_dw, 1, keep_dims=True), mask=in_ends)
