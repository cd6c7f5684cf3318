"""Triton kernels for NVIDIA and AMD GPUs.

A row lies in registers when it fits; wider rows are walked twice. Programs of the backward are persistent: each owns tiles
p, p + P, ... and one fp32 row of partial weight gradients, which a second kernel adds in a fixed order, without atomics.
A pointer that is None stands for a tensor that is absent, and compiles to nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.dispatch import absent
from ops_math.layout import alignment, as_rows
from ops_math.ops._tiles.ends import held, held_blocks, off_grid, persistent, same_cut, widths
from ops_math.ops._tiles.partials import sum_rows, tile_of_sum
from ops_math.ops._tiles.rows import held_whole, limited, limits_known, rms_norm_gradient
from ops_math.ops._tiles.walk import multiple_of
from ops_math.ops.rms_norm import triton_gpu_ends as cut
from ops_math.ops.rms_norm import triton_gpu_held
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.ops.rms_norm.triton_gpu_config import Config
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Device, cdiv, next_power_of_2

WIDEST = {"fwd": 16384, "bwd": 8192}  # columns held in registers; the backward holds the sums of the weight's gradient too
# Registers a thread by columns and warps, forward: one program more lies on a core, and nothing spills (sm_90, sm_100, Triton 3.6).
# H200, bf16: of 5,120 columns 0.95 of a copy with and 0.89 without; of 4,096 and 8,192 less than 0.005 apart.
LIMITS = {(4096, 4): 48, (8192, 4): 96}
WIDE_BLOCK = 4096
COLUMNS_M, COLUMNS_N = 16, 256  # tile of the sums over rows of wide problems
TWICE_PASSES = 3.9  # of a wide backward whose sums nobody can hold (28,672 columns: 0.26 of a copy)
# H200, bf16, 28,672 columns: 0.77 and 0.60 of a copy, where PyTorch's own reach 0.59 and 0.37; up to 16,384 columns, where the row is kept
# too: 0.78 to 0.91.
WIDE_PASSES, KEPT_PASSES = {"fwd": 1.3, "bwd": 1.7}, 1.2


def supports(p: RmsNormProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    if "fp64" in (p.x, p.residual, p.weight, p.out):
        return "has no fp64 kernel"
    return None


def _is_wide(p: RmsNormProblem, phase: str) -> bool:
    """Whether a row that is not cut does not fit in registers; an address for each value takes half of them."""
    return p.cols > WIDEST[phase] // (1 if alignment(p.cols) > 1 else 2)


def _is_cut(p: RmsNormProblem, phase: str) -> bool:
    """Whether cutting rows at the 16-byte grid pays: where they can start anywhere, and forward where they are little wider than a power
    of two (H200, 1,164 columns: 0.94 of a copy forward where uncut rows reach 0.76, but 0.60 backward where they reach 0.85)."""
    return off_grid(p.cols, near=phase == "fwd") and p.cols <= WIDEST[phase]


def passes(p: RmsNormProblem, phase: str) -> float:
    """Memory traffic over the least possible."""
    if not _is_wide(p, phase) or _is_cut(p, phase):
        return 1.0
    if phase == "bwd" and not _holds_sums(p):
        return TWICE_PASSES
    return WIDE_PASSES[phase] if phase == "fwd" or held_blocks(p.cols) > _most_held(p)[1] else KEPT_PASSES


def configs(p: RmsNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """The legal configurations, best guess first."""
    first = _cut_configs(p, device, phase) if _is_cut(p, phase) else tuple(c for c in _held_configs(p, device, phase) if c.ends)
    return (*first, *invariant_configs(p, device, phase))


def _cut_configs(p: RmsNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Rows cut at the 16-byte grid."""
    block_n, _ = widths(p.cols)
    # Values a tile, values a thread, stages, warps a core (0: one program for each tile): as many as fit with the 55 registers that a
    # thread of 16 values takes forward, 66 with a residual, 96 and 109 with 32 values (sm_90, Triton 3.6).
    # Rows loaded ahead spill where few registers are left (sm_90: at 16,384 forward 24 bytes, at 8,192 backward 8).
    if phase == "fwd":
        some, few = (28, 16) if p.residual else (32, 20)
        wishes = ((2048, 16, 1, some), (2048, 32, 1, few), (2048, 16, 1, 0))
        if block_n == 4096:
            wishes = ((2048, 32, 1, few), *(w for w in wishes if w != (2048, 32, 1, few)))
        elif block_n >= 8192:
            wishes = ((2048, 32, 1, 16), (2048, 16, 1, 32))
        elif block_n <= 256:  # eight values a thread leave a row to one warp
            wishes = ((2048, 8, 1, 32), (2048, 8, 2, 32), (1024, 8, 1, 32), (4096, 16, 1, 32), (2048, 8, 1, 0))
    else:
        # Rows loaded ahead win beside a third tensor alone (H200, 2,163 columns: 0.84 of a copy and 0.68; without it 0.87 and 0.95).
        wishes = ((1024, 16, 1, 20), (1024, 16, 3, 16), (1024, 8, 3, 20), (1024, 8, 1, 28))
        if p.residual:
            wishes = ((1024, 16, 3, 16), (1024, 16, 1, 16), (1024, 8, 3, 20), (1024, 8, 1, 28))
        if block_n >= 8192:
            wishes = ((1024, 16, 1, 16), (1024, 32, 1, 16))
        elif block_n <= 256:
            wishes = ((1024, 8, 1, 16), (1024, 8, 2, 16), (2048, 8, 1, 16), (2048, 16, 1, 16), (1024, 16, 1, 16))
    return tuple(Config(*each) for each in persistent(p.rows, p.cols, wishes, device))


def invariant_configs(p: RmsNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Those whose order of sums does not follow a row's place among its neighbours, best guess first."""
    if _is_wide(p, phase):
        cuts = 4 * device.num_cores // max(p.cols // COLUMNS_N, 1)  # about four programs a core sum the weight's gradient
        num_programs = max(min(cuts, -(-p.rows // COLUMNS_M)), 1)
        # H200, bf16, backward, 16, 8 and 4 warps: 0.34, 0.30 and 0.30 of a copy at 12,288 columns; read value by value, at 15,993 columns,
        # 0.30, 0.32 and 0.32, with a third tensor 0.35, 0.35 and 0.37.
        warps = (16, 8, 4) if alignment(p.cols) > 1 else (4, 8, 16)
        found = tuple(Config(1, WIDE_BLOCK, num_warps, num_programs, 1) for num_warps in warps)
        return found if phase == "fwd" else _wide_bwd_configs(p, device, found)
    block_n = next_power_of_2(max(p.cols, 1))
    # Values a tile, values a thread, stages; the forward starts one program for each tile unless it loads ahead. The backward takes one
    # row where it can: four rows of 1,024 halve its speed (H200: 1,571 against 3,170 GB/s with two), since their sum crosses warps.
    if phase == "fwd":
        first = 16 if block_n <= (4096 if alignment(p.cols) == 16 else 2048) else 32
        wishes = tuple(sorted(((2048, 16, 1), (4096, 16, 1), (2048, 32, 1), (2048, 8, 1), (2048, 16, 2)), key=lambda w: w[1] != first))
    else:
        wishes = ((1024, 16, 3), (1024, 8, 3), (2048, 16, 3), (1024, 16, 2), (1024, 16, 1), (2048, 16, 2))
        if block_n < 2048:  # sixteen values a thread spill there (sm_90 at 1,024, sm_100 at 64: 8 bytes)
            wishes = ((1024, 8, 3), *(w for w in wishes if w != (1024, 8, 3)))
        if block_n == 1024 and not p.residual:  # two rows at a time: H200, bf16, 0.96 of a copy, one row 0.91 with 16 values, 0.86 with 8
            wishes = ((2048, 16, 3), *(w for w in wishes if w != (2048, 16, 3)))
    if 2 <= alignment(p.cols) < 16 and phase == "bwd" and block_n > 4096:  # rows loaded ahead spill there (sm_90, 8 bytes)
        wishes = ((1024, 16, 1), *(w for w in wishes if w != (1024, 16, 1)))
    limitable = phase == "fwd" and not p.residual and ITEM_SIZE[p.x] == 2 and limits_known(p.cols, device)
    if limitable and block_n == 8192:
        wishes = ((2048, 64, 1), *wishes)
    warps = ((*wish, 32 if phase == "fwd" else 16) for wish in wishes)  # as many as the registers hold
    found = tuple(Config(*fields) for fields in held_whole(p.rows, block_n, warps, device, phase))
    return tuple(limited(found, LIMITS)) if limitable else found


def _wide_bwd_configs(p: RmsNormProblem, device: Device, by_columns: tuple[Config, ...]) -> tuple[Config, ...]:
    """Backward of wide rows that are not cut: with the row kept before all in registers, and before what reads a row again (H200, bf16,
    12,288 columns: 0.87, 0.80 and 0.58 of a copy; at 16,384 0.91, 0.86 and 0.70)."""
    not_cut = tuple(c for c in _held_configs(p, device, "bwd") if not c.ends)
    kept = tuple(c for c in not_cut if c.num_stages == c.blocks)
    on_the_way = _persistent_configs(p, device) if alignment(p.cols) > 1 else ()  # value by value 0.25 of a copy, by columns 0.36
    return (*kept, *_whole_configs(p, device), *(c for c in not_cut if c not in kept), *on_the_way, *by_columns)


def _holds_sums(p: RmsNormProblem) -> bool:
    """Whether the backward of wide rows has sums of the weight's gradient to hold, and registers for them."""
    return p.need_dx and bool(p.weight) and p.need_dw and held_blocks(p.cols) <= _most_held(p)[0]


def _most_held(p: RmsNormProblem) -> tuple[int, int]:
    """Blocks whose sums are held in registers at most; and where the row is kept there too."""
    return 2 * triton_gpu_held.MOST_BLOCKS // ITEM_SIZE[p.x], 2 * triton_gpu_held.KEPT_BLOCKS // ITEM_SIZE[p.x]


def _held_configs(p: RmsNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """For wide rows: the sums of the weight's gradient in registers."""
    if phase == "fwd" or p.cols <= WIDEST["bwd"] or not (p.need_dx and p.weight and p.need_dw):
        return ()
    return tuple(Config(*fields, False, blocks) for *fields, blocks in held(p.rows, p.cols, *_most_held(p), device))


def _whole_configs(p: RmsNormProblem, device: Device) -> tuple[Config, ...]:
    """For rows of up to 16,384 columns: all in registers, of which 56 bytes spill (sm_90)."""
    if p.cols > 2 * WIDEST["bwd"] or alignment(p.cols) == 1 or ITEM_SIZE[p.x] > 2:
        return ()
    return (Config(1, 2 * WIDEST["bwd"], 16, min(max(p.rows, 1), device.num_cores), 1),)


def _persistent_configs(p: RmsNormProblem, device: Device) -> tuple[Config, ...]:
    """For wide rows: sums on the way, in partial rows that stay in the L2 cache (H200, 28,672 columns: 0.42 of a copy, and by columns
    afterwards 0.26)."""
    warps = (16, 8) if device.kind == "hip" else (16, 32)
    one, two = (min(max(p.rows, 1), n * device.num_cores) for n in (1, 2))
    return Config(1, 2 * WIDE_BLOCK, warps[1], one, 1, 0, True), Config(1, WIDE_BLOCK, warps[0], two, 1, 0, True)


@triton.jit
def _parameter(ptr, cols, num_cols, weight_offset):
    """Weight and offset [1, BLOCK_N] in fp32."""
    return tl.load(ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :] + weight_offset


@triton.jit
def _summed(x_ptr, residual_ptr, total_ptr, rows, cols, mask, x_stride, residual_stride):
    """What is normalised, zero where masked: x, or x + residual as it is rounded when stored."""
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, num_rows, num_cols, x_stride, residual_stride, eps, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride, residual_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN), multiple_of(residual_stride, ALIGN)
    cols = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        x = _summed(x_ptr, residual_ptr, total_ptr, rows, cols, mask, x_stride, residual_stride)

        rstd = tl.rsqrt(tl.sum(x * x, 1) / num_cols + eps)
        y = x * rstd[:, None]
        if weight_ptr is not None:  # loaded late: held over the sum, it would cost a fourth of the rows in flight
            y = y * _parameter(weight_ptr, cols, num_cols, weight_offset)

        if total_ptr is not None:
            tl.store(total_ptr + rows[:, None] * num_cols + cols[None, :], x.to(total_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def _fwd_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, num_rows, num_cols, x_stride, residual_stride, eps, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride, residual_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN), multiple_of(residual_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    squares = tl.zeros([1, BLOCK_N], tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        x = _summed(x_ptr, residual_ptr, total_ptr, rows, cols, mask, x_stride, residual_stride)
        if total_ptr is not None:
            tl.store(total_ptr + rows[:, None] * num_cols + cols[None, :], x.to(total_ptr.dtype.element_ty), mask=mask)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 1) / num_cols + eps)
    tl.store(rstd_ptr + rows, rstd)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        # Computed again rather than read back: a thread may not read what another one stored.
        x = _summed(x_ptr, residual_ptr, total_ptr, rows, cols, mask, x_stride, residual_stride)
        y = x * rstd[:, None]
        if weight_ptr is not None:
            y = y * _parameter(weight_ptr, cols, num_cols, weight_offset)
        tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN)
    dy_stride, dsum_stride = multiple_of(dy_stride, ALIGN), multiple_of(dsum_stride, ALIGN)
    cols = tl.arange(0, BLOCK_N)
    if weight_ptr is not None:
        weight = _parameter(weight_ptr, cols, num_cols, weight_offset)
    dw = tl.zeros([BLOCK_N], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if dsum_ptr is not None:
            dsum = tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)

        xhat = x * rstd[:, None]
        if dw_ptr is not None:
            dw += tl.sum(g * xhat, 0)
        if dx_ptr is not None:
            if weight_ptr is not None:
                g = g * weight
            dx = rms_norm_gradient(g, xhat, rstd, tl.sum(g * xhat, 1) / num_cols)
            if dsum_ptr is not None:
                dx += dsum
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * num_cols + cols, dw, mask=cols < num_cols)


@triton.jit
def _bwd_wide_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN)
    dy_stride, dsum_stride = multiple_of(dy_stride, ALIGN), multiple_of(dsum_stride, ALIGN)
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    rstd = tl.load(rstd_ptr + rows)
    dots = tl.zeros([1, BLOCK_N], tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g = g * _parameter(weight_ptr, cols, num_cols, weight_offset)
        dots += g * x * rstd[:, None]
    dot_mean = tl.sum(dots, 1) / num_cols
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g = g * _parameter(weight_ptr, cols, num_cols, weight_offset)
        dx = rms_norm_gradient(g, x * rstd[:, None], rstd, dot_mean)
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_wide_sums_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, dw_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride, weight_offset,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, x_stride = multiple_of(num_cols, ALIGN), multiple_of(x_stride, ALIGN)
    dy_stride, dsum_stride = multiple_of(dy_stride, ALIGN), multiple_of(dsum_stride, ALIGN)
    first = tl.program_id(0)
    partial_ptr = dw_ptr + first.to(tl.int64) * num_cols
    if first >= num_rows:  # a piece of a batch may have fewer rows than there are programs
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            tl.store(partial_ptr + cols, tl.zeros([BLOCK_N], tl.float32), mask=cols < num_cols)
    for row in tl.range(first, num_rows, tl.num_programs(0), num_stages=1):
        at = tl.cast(row, tl.int64)
        rstd = tl.load(rstd_ptr + at)
        dot_mean = 0.0
        if dx_ptr is not None:
            dots = tl.zeros([BLOCK_N], tl.float32)
            for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
                cols = start + tl.arange(0, BLOCK_N)
                x = tl.load(x_ptr + at * x_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
                g = tl.load(dy_ptr + at * dy_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
                if weight_ptr is not None:
                    g = g * (tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32) + weight_offset)
                dots += g * x * rstd
            dot_mean = tl.sum(dots, 0) / num_cols
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            cols = start + tl.arange(0, BLOCK_N)
            xhat = tl.load(x_ptr + at * x_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32) * rstd
            g = tl.load(dy_ptr + at * dy_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
            so_far = tl.load(partial_ptr + cols, mask=(cols < num_cols) & (at + tl.arange(0, 1) != first), other=0.0)
            tl.store(partial_ptr + cols, so_far + g * xhat, mask=cols < num_cols)
            if dx_ptr is not None:
                if weight_ptr is not None:
                    g = g * (tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32) + weight_offset)
                dx = (g - xhat * dot_mean) * rstd
                if dsum_ptr is not None:
                    dx += tl.load(dsum_ptr + at * dsum_stride + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
                tl.store(dx_ptr + at * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < num_cols)
        tl.debug_barrier()  # whichever thread reads the sums for the next row, they are there


@triton.jit
def _bwd_columns_kernel(
    dy_ptr, x_ptr, rstd_ptr, dw_ptr, num_rows, num_cols, dy_stride, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    num_cols, dy_stride, x_stride = multiple_of(num_cols, ALIGN), multiple_of(dy_stride, ALIGN), multiple_of(x_stride, ALIGN)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_N], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)

        dw += tl.sum(g * (x * rstd[:, None]), 0)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * num_cols + cols, dw, mask=cols < num_cols)


@triton.jit
def _sum_partials_kernel(partial_ptr, sum_ptr, num_partials, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    sum_rows(partial_ptr, sum_ptr, num_partials, num_cols, BLOCK_M, BLOCK_N)


def _uncut(p: RmsNormProblem, config: Config, phase: str) -> Config:
    """What does the work of a configuration for tensors whose rows do not start together, as of a view."""
    if not config.ends:
        return config
    block_n = WIDE_BLOCK if _is_wide(p, phase) else next_power_of_2(p.cols)
    block_m = max(1, min(config.block_m, 1024 // block_n))
    return Config(block_m, block_n, max(min(block_m * block_n // 512, 16), 1), config.num_programs, 1)


def launch_fwd(
    p: RmsNormProblem, config: Config, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, sum (empty without a residual) and rstd [rows]."""
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    rstd = torch.empty(p.rows, dtype=torch.float32, device=x.device)
    x_MN = as_rows(x)
    residual_MN = None if residual is None else as_rows(residual)
    tensors = x_MN, residual_MN, None if weight is None else weight.contiguous(), y, total, rstd
    sizes = p.cols, x_MN.stride(0), 0 if residual_MN is None else residual_MN.stride(0)
    if config.ends and same_cut(p.cols, x_MN, residual_MN):
        launch(
            cut._fwd_kernel, (config.num_programs,), *tensors, p.rows, *sizes, p.eps, p.weight_offset, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, ENDS=config.ends, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        config = _uncut(p, config, "fwd")
        wide = config.block_n < p.cols
        align = alignment(*sizes)
        launch(
            _fwd_wide_kernel if wide else _fwd_kernel, (p.rows if wide else config.num_programs,),
            *tensors, p.rows, *sizes, p.eps, p.weight_offset,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, ALIGN=align, num_warps=config.num_warps,
            registers=config.registers,
        )  # fmt: skip
    return y, absent(x) if total is None else total, rstd


def launch_bwd(
    p: RmsNormProblem,
    config: Config,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dweight (empty where not needed)."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if p.need_dx else None
    dw = torch.empty(p.cols, dtype=weight.dtype, device=x.device) if weight is not None and p.need_dw else None
    partial = None if dw is None else torch.empty((config.num_programs, p.cols), dtype=torch.float32, device=x.device)
    x_MN, dy_MN = as_rows(x), as_rows(dy)
    dsum_MN = None if dsum is None else as_rows(dsum)
    inputs = dy_MN, dsum_MN, x_MN, None if weight is None else weight.contiguous(), rstd
    sizes = p.cols, dy_MN.stride(0), 0 if dsum_MN is None else dsum_MN.stride(0), x_MN.stride(0)
    if config.blocks and (not config.ends or same_cut(p.cols, *inputs[:3])):
        triton_gpu_held.launch_bwd(p, config, inputs, dx, partial, sizes)
    elif config.ends and same_cut(p.cols, *inputs[:3]):
        launch(
            cut._bwd_kernel, (config.num_programs,), *inputs, dx, partial, p.rows, *sizes, p.weight_offset, BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, ENDS=config.ends, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip
    else:
        _launch_uncut_bwd(p, _uncut(p, config, "bwd"), inputs, dx, partial, sizes)
    if partial is not None:
        programs, tile = tile_of_sum(p.cols)
        launch(_sum_partials_kernel, (programs,), partial, dw, config.num_programs, p.cols, **tile)
    return absent(x) if dx is None else dx, absent(x) if dw is None else dw


def _launch_uncut_bwd(
    p: RmsNormProblem,
    config: Config,
    inputs: tuple[torch.Tensor | None, ...],
    dx: torch.Tensor | None,
    partial: torch.Tensor | None,
    sizes: tuple[int, ...],
) -> None:
    """dx and partial sums of the weight's gradient, one row for each program."""
    align = alignment(*sizes)
    cols, dy_stride, _, x_stride = sizes
    options = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.num_stages, "num_warps": config.num_warps}
    if config.sums_on_the_way and partial is not None:
        programs = (config.num_programs,)
        launch(_bwd_wide_sums_kernel, programs, *inputs, dx, partial, p.rows, *sizes, p.weight_offset, ALIGN=align, **options)
        return
    if config.block_n >= p.cols:
        launch(_bwd_kernel, (config.num_programs,), *inputs, dx, partial, p.rows, *sizes, p.weight_offset, ALIGN=align, **options)
        return
    if dx is not None:
        launch(_bwd_wide_kernel, (p.rows,), *inputs, dx, p.rows, *sizes, p.weight_offset, ALIGN=align, **options)
    if partial is not None:
        dy, _, x, _, rstd = inputs
        launch(
            _bwd_columns_kernel, (config.num_programs, cdiv(p.cols, COLUMNS_N)), dy, x, rstd, partial, p.rows, cols, dy_stride, x_stride,
            BLOCK_M=COLUMNS_M, BLOCK_N=COLUMNS_N, ALIGN=align, num_warps=4,
        )  # fmt: skip
