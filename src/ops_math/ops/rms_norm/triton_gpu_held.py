"""The backward of wide rows, read from memory once: one program a core holds the sums of the weight's gradient in registers.

A row is walked twice in blocks, the second time from the L1 cache: of 28,672 columns in bf16 x and dy take 112 KiB of its 228. The sums
take up to 56 of 128 registers. Where KEEP, the row stays in registers instead, as it came: 8 a block, for up to four blocks. Rows that
start off the 16-byte grid are cut as `ops_math.ops._tiles.ends` says, where ENDS is not 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment
from ops_math.ops._tiles.ends import boundary, cut_of, end_columns, load_part, shifted, sum_of_row
from ops_math.ops._tiles.walk import multiple_of
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.ops.rms_norm.triton_gpu_config import Config
from ops_math.ops.rms_norm.triton_gpu_ends import store_gradient

MOST_BLOCKS = 7  # of 4,096 columns in 16 bits, whose sums one program holds in registers, and the row in its L1 cache
KEPT_BLOCKS = 4  # where it has the row in registers too


@triton.jit
def _weighted(g, weight_ptr, cols, mask, weight_offset):
    if weight_ptr is not None:
        g = g * (load_part(weight_ptr, cols, mask) + weight_offset)
    return g


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, room_ptr, rstd_ptr, dx_ptr, dw_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride,
    weight_offset,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr, ALIGN: tl.constexpr, AHEAD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    if ENDS:
        head, whole = cut_of(tl.program_id(0), num_cols, BLOCKS * BLOCK_N)
        end_cols, in_ends = end_columns(head, whole, ENDS)[:, None], (tl.arange(0, ENDS) < num_cols - whole)[:, None]
        shifted_ptr = weight_ptr
        if weight_ptr is not None:
            shifted_ptr = shifted(weight_ptr, room_ptr, head, whole, BLOCK_N, BLOCKS)
        end_dw = tl.zeros([ENDS, 1], tl.float32)
    else:
        num_cols, dy_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN)
        dsum_stride, x_stride = multiple_of(dsum_stride, ALIGN), multiple_of(x_stride, ALIGN)
        head, whole, shifted_ptr = 0, num_cols, weight_ptr
    sums = (tl.zeros([1, BLOCK_N], tl.float32),) * BLOCKS
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=1):
        at = tl.cast(row, tl.int64)
        dy_begin, dsum_begin, x_begin, begin = at * dy_stride, at * dsum_stride, at * x_stride, at * num_cols
        dy_body, dsum_body, x_body, body = dy_begin, dsum_begin, x_begin, begin
        if ENDS:
            dy_body, dsum_body, x_body, body = boundary(dy_begin), boundary(dsum_begin), boundary(x_begin), boundary(begin)
        rstd = tl.load(rstd_ptr + at)
        dots = tl.zeros([1, BLOCK_N], tl.float32)
        xs, gs = (), ()
        if KEEP:
            for i in tl.static_range(BLOCKS):
                lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                xs = xs + (tl.load(x_ptr + x_body + lanes, mask=lanes < whole, other=0.0),)  # noqa: RUF005 (kernels have no starred ones)
                gs = gs + (tl.load(dy_ptr + dy_body + lanes, mask=lanes < whole, other=0.0),)  # noqa: RUF005
                g = _weighted(gs[i].to(tl.float32), shifted_ptr, lanes, lanes < whole, weight_offset)
                dots += g * xs[i].to(tl.float32)
        else:
            for start in tl.range(0, whole, BLOCK_N, num_stages=1, loop_unroll_factor=AHEAD):
                lanes = start + tl.arange(0, BLOCK_N)[None, :]
                x = load_part(x_ptr + x_body, lanes, lanes < whole)
                g = load_part(dy_ptr + dy_body, lanes, lanes < whole)
                dots += _weighted(g, shifted_ptr, lanes, lanes < whole, weight_offset) * x
        dots *= rstd
        if ENDS:
            end_xhat = load_part(x_ptr + x_begin, end_cols, in_ends) * rstd
            end_g = load_part(dy_ptr + dy_begin, end_cols, in_ends)
            end_dw += end_g * end_xhat
            end_g = _weighted(end_g, weight_ptr, end_cols, in_ends, weight_offset)
            dot_mean = sum_of_row(dots, end_g * end_xhat)[:, None] / num_cols
            store_gradient(dx_ptr, dsum_ptr, begin + end_cols, dsum_begin + end_cols, in_ends, end_g, end_xhat, rstd, dot_mean)
        else:
            dot_mean = tl.sum(dots, 1)[:, None] / num_cols
        added = ()
        for i in tl.static_range(BLOCKS):
            lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            if KEEP:
                x, g = xs[i].to(tl.float32), gs[i].to(tl.float32)
            else:
                x, g = load_part(x_ptr + x_body, lanes, lanes < whole), load_part(dy_ptr + dy_body, lanes, lanes < whole)
            xhat = x * rstd
            added = added + (sums[i] + g * xhat,)  # noqa: RUF005 (kernels have no starred expressions)
            g = _weighted(g, shifted_ptr, lanes, lanes < whole, weight_offset)
            store_gradient(dx_ptr, dsum_ptr, body + lanes, dsum_body + lanes, lanes < whole, g, xhat, rstd, dot_mean)
        sums = added
    place = dw_ptr + tl.program_id(0).to(tl.int64) * num_cols
    for i in tl.static_range(BLOCKS):
        lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(place + head + lanes, sums[i], mask=lanes < whole)
    if ENDS:
        tl.store(place + end_cols, end_dw, mask=in_ends)


def launch_bwd(
    p: RmsNormProblem,
    config: Config,
    inputs: tuple[torch.Tensor | None, ...],
    dx: torch.Tensor | None,
    partial: torch.Tensor | None,
    sizes: tuple[int, ...],
) -> None:
    """dx and partial sums of the weight's gradient, one row for each program."""
    weight, room = inputs[3], None
    if config.ends and weight is not None:
        room = weight.new_empty((config.num_programs, config.blocks * config.block_n))
    launch(
        _bwd_kernel, (config.num_programs,), *inputs[:4], room, inputs[4], dx, partial, p.rows, *sizes, p.weight_offset,
        BLOCK_N=config.block_n, BLOCKS=config.blocks, ENDS=config.ends, ALIGN=alignment(*sizes), AHEAD=config.num_stages,
        KEEP=config.num_stages == config.blocks,
        num_warps=config.num_warps,
    )  # fmt: skip
