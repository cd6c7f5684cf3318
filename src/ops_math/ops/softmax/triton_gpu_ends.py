"""Kernels for rows that start off the 16-byte grid: see `ops_math.ops._tiles.ends`.

The order of a row's sum follows its place among eight, so that no more than level 1 is promised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.ends import body_offsets, cut_of, end_columns, rows_of, sum_of_row, top_of_row


@triton.jit
def _fwd_kernel(
    x_ptr, y_ptr, num_rows, num_cols, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[:, None]
    rows = rows_of(tl.program_id(0), BLOCK_M)
    body_mask = (rows < num_rows)[:, None] & (lanes < whole)
    end_mask = (rows < num_rows)[None, :] & (tl.arange(0, ENDS) < num_cols - whole)[:, None]
    x_begin, begin = rows * x_stride, rows * num_cols

    x = tl.load(x_ptr + body_offsets(x_begin, lanes), mask=body_mask, other=float("-inf")).to(tl.float32)
    ends = tl.load(x_ptr + x_begin[None, :] + end_cols, mask=end_mask, other=float("-inf")).to(tl.float32)

    top = top_of_row(x, ends)
    e, end_e = tl.exp(x - top[:, None]), tl.exp(ends - top[None, :])
    scale = 1.0 / sum_of_row(e, end_e)

    tl.store(y_ptr + body_offsets(begin, lanes), (e * scale[:, None]).to(y_ptr.dtype.element_ty), mask=body_mask)
    tl.store(y_ptr + begin[None, :] + end_cols, (end_e * scale[None, :]).to(y_ptr.dtype.element_ty), mask=end_mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, num_rows, num_cols, dy_stride, y_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    head, whole = cut_of(tl.program_id(0), num_cols, BLOCK_N)
    lanes, end_cols = tl.arange(0, BLOCK_N)[None, :], end_columns(head, whole, ENDS)[:, None]
    rows = rows_of(tl.program_id(0), BLOCK_M)
    body_mask = (rows < num_rows)[:, None] & (lanes < whole)
    end_mask = (rows < num_rows)[None, :] & (tl.arange(0, ENDS) < num_cols - whole)[:, None]
    dy_begin, y_begin, begin = rows * dy_stride, rows * y_stride, rows * num_cols

    y = tl.load(y_ptr + body_offsets(y_begin, lanes), mask=body_mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + body_offsets(dy_begin, lanes), mask=body_mask, other=0.0).to(tl.float32)
    end_y = tl.load(y_ptr + y_begin[None, :] + end_cols, mask=end_mask, other=0.0).to(tl.float32)
    end_dy = tl.load(dy_ptr + dy_begin[None, :] + end_cols, mask=end_mask, other=0.0).to(tl.float32)

    dot = sum_of_row(y * dy, end_y * end_dy)

    tl.store(dx_ptr + body_offsets(begin, lanes), (y * (dy - dot[:, None])).to(dx_ptr.dtype.element_ty), mask=body_mask)
    tl.store(dx_ptr + begin[None, :] + end_cols, (end_y * (end_dy - dot[None, :])).to(dx_ptr.dtype.element_ty), mask=end_mask)
