"""The backward of wide rows, read from memory once: one program a core holds the sums of the parameters' gradients in registers.

A row is walked twice in blocks, the second time from the L1 cache: of 16,384 columns in bf16 the sum and dy take 64 KiB of its 228, and
the two sums 64 of 128 registers. Where KEEP, the row stays in registers instead, as it came: 8 a block, for up to three blocks. Rows that
start off the 16-byte grid are cut as `ops_math.ops._tiles.ends` says, where ENDS is not 0. Without dropout, x_bias and narrow copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment
from ops_math.ops._tiles.ends import boundary, cut_of, end_columns, load_part, shifted, sums_of_row
from ops_math.ops._tiles.walk import multiple_of
from ops_math.ops.layer_norm.problem import LayerNormProblem
from ops_math.ops.layer_norm.triton_gpu_config import Config
from ops_math.ops.layer_norm.triton_gpu_ends import store_gradient

MOST_BLOCKS = 4  # of 4,096 columns in 16 bits, whose sums one program holds in registers, and the row in its L1 cache
KEPT_BLOCKS = 3  # where it has the row in registers too; of four a thread would keep 144 to 304 bytes on the stack (sm_90, Triton 3.6)


@triton.jit
def _weighted(g, weight_ptr, cols, mask):
    if weight_ptr is not None:
        g = g * load_part(weight_ptr, cols, mask) + 0.0  # an fma, which rounds: see layer_norm_gradient
    return g


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, total_ptr, weight_ptr, room_ptr, mean_ptr, rstd_ptr, dtotal_ptr, dx_ptr, dw_ptr, db_ptr, num_rows, num_cols,
    dy_stride, dsum_stride, total_stride,
    BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr, ALIGN: tl.constexpr, AHEAD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    if ENDS:
        head, whole = cut_of(tl.program_id(0), num_cols, BLOCKS * BLOCK_N)
        end_cols, in_ends = end_columns(head, whole, ENDS)[:, None], (tl.arange(0, ENDS) < num_cols - whole)[:, None]
        shifted_ptr = weight_ptr
        if weight_ptr is not None:
            shifted_ptr = shifted(weight_ptr, room_ptr, head, whole, BLOCK_N, BLOCKS)
        end_dw, end_db = tl.zeros([ENDS, 1], tl.float32), tl.zeros([ENDS, 1], tl.float32)
    else:
        num_cols, dy_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN)
        dsum_stride, total_stride = multiple_of(dsum_stride, ALIGN), multiple_of(total_stride, ALIGN)
        head, whole, shifted_ptr = 0, num_cols, weight_ptr
    dws = (tl.zeros([1, BLOCK_N], tl.float32),) * BLOCKS
    dbs = (tl.zeros([1, BLOCK_N], tl.float32),) * BLOCKS
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=1):
        at = tl.cast(row, tl.int64)
        dy_begin, dsum_begin, total_begin, begin = at * dy_stride, at * dsum_stride, at * total_stride, at * num_cols
        dy_body, dsum_body, total_body, body = dy_begin, dsum_begin, total_begin, begin
        if ENDS:
            dy_body, dsum_body, total_body, body = boundary(dy_begin), boundary(dsum_begin), boundary(total_begin), boundary(begin)
        mean, rstd = tl.load(mean_ptr + at), tl.load(rstd_ptr + at)
        gs, dots = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
        kept_totals, kept_gs = (), ()
        if KEEP:
            for i in tl.static_range(BLOCKS):
                lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                total = tl.load(total_ptr + total_body + lanes, mask=lanes < whole, other=0.0)
                g = tl.load(dy_ptr + dy_body + lanes, mask=lanes < whole, other=0.0)
                kept_totals = kept_totals + (total,)  # noqa: RUF005 (kernels have no starred expressions)
                kept_gs = kept_gs + (g,)  # noqa: RUF005
                g = _weighted(g.to(tl.float32), shifted_ptr, lanes, lanes < whole)
                gs += g
                dots += g * (total.to(tl.float32) - mean)
        else:
            for start in tl.range(0, whole, BLOCK_N, num_stages=1, loop_unroll_factor=AHEAD):
                lanes = start + tl.arange(0, BLOCK_N)[None, :]
                total = load_part(total_ptr + total_body, lanes, lanes < whole)
                g = load_part(dy_ptr + dy_body, lanes, lanes < whole)
                g = _weighted(g, shifted_ptr, lanes, lanes < whole)
                gs += g
                dots += g * (total - mean)
        dots *= rstd
        if ENDS:
            end_xhat = (load_part(total_ptr + total_begin, end_cols, in_ends) - mean) * rstd
            end_g = load_part(dy_ptr + dy_begin, end_cols, in_ends)
            end_dw += end_g * end_xhat
            end_db += end_g
            end_g = _weighted(end_g, weight_ptr, end_cols, in_ends)
            g_sum, dot_sum = sums_of_row(gs, end_g, dots, end_g * end_xhat)
            g_mean, dot_mean = g_sum[:, None] / num_cols, dot_sum[:, None] / num_cols
            store_gradient(
                dtotal_ptr, dx_ptr, dsum_ptr, begin + end_cols, dsum_begin + end_cols, in_ends,
                end_g, end_xhat, rstd, g_mean, dot_mean,
            )  # fmt: skip
        else:
            g_mean, dot_mean = tl.sum(gs, 1)[:, None] / num_cols, tl.sum(dots, 1)[:, None] / num_cols
        next_dws, next_dbs = (), ()
        for i in tl.static_range(BLOCKS):
            lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            if KEEP:
                total, g = kept_totals[i].to(tl.float32), kept_gs[i].to(tl.float32)
            else:
                total, g = load_part(total_ptr + total_body, lanes, lanes < whole), load_part(dy_ptr + dy_body, lanes, lanes < whole)
            xhat = (total - mean) * rstd
            next_dws = next_dws + (dws[i] + g * xhat,)  # noqa: RUF005 (kernels have no starred expressions)
            next_dbs = next_dbs + (dbs[i] + g,)  # noqa: RUF005
            g = _weighted(g, shifted_ptr, lanes, lanes < whole)
            store_gradient(dtotal_ptr, dx_ptr, dsum_ptr, body + lanes, dsum_body + lanes, lanes < whole, g, xhat, rstd, g_mean, dot_mean)
        dws, dbs = next_dws, next_dbs
    place = tl.program_id(0).to(tl.int64) * num_cols
    for i in tl.static_range(BLOCKS):
        lanes = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        if dw_ptr is not None:
            tl.store(dw_ptr + place + head + lanes, dws[i], mask=lanes < whole)
        if db_ptr is not None:
            tl.store(db_ptr + place + head + lanes, dbs[i], mask=lanes < whole)
    if ENDS:
        if dw_ptr is not None:
            tl.store(dw_ptr + place + end_cols, end_dw, mask=in_ends)
        if db_ptr is not None:
            tl.store(db_ptr + place + end_cols, end_db, mask=in_ends)


def launch_bwd(
    p: LayerNormProblem,
    config: Config,
    inputs: tuple[torch.Tensor | None, ...],
    dtotal: torch.Tensor | None,
    dx: torch.Tensor | None,
    partials: list[torch.Tensor | None],
    sizes: tuple[int, ...],
) -> None:
    """Gradients of rows and partial sums of those of parameters, from one pass over memory."""
    dy, _, dsum, total, weight, mean, rstd, _ = inputs
    room = None
    if config.ends and weight is not None:
        room = weight.new_empty((config.num_programs, config.blocks * config.block_n))
    launch(
        _bwd_kernel, (config.num_programs,), dy, dsum, total, weight, room, mean, rstd, dtotal, dx, *partials[:2],
        p.rows, *sizes, BLOCK_N=config.block_n, BLOCKS=config.blocks, ENDS=config.ends, ALIGN=alignment(*sizes), AHEAD=config.num_stages,
        KEEP=config.num_stages == config.blocks,
        num_warps=config.num_warps,
    )  # fmt: skip
