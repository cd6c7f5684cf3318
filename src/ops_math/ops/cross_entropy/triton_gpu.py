"""Triton kernels for NVIDIA and AMD GPUs.

Forward: rows that fit a tile are read once, several to a program; wider rows are streamed by one program each, the logits being read
once in either case. Backward: one element-wise pass from logits and factors. Nothing is added across programs, so there are no atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import as_rows
from ops_math.ops._tiles.class_target import read_target, reference_of, row_results, taken_in
from ops_math.ops._tiles.log_sum_exp import joined, lane_finish, soft_capped, tanh
from ops_math.ops.cross_entropy import triton_gpu_unaligned as unaligned
from ops_math.ops.cross_entropy.problem import CrossEntropyProblem
from ops_math.spec import ITEM_SIZE, Device

WIDEST = 4096  # columns of a row held in registers
SUM, MEAN, COUNTED = 0, 1, 2


class Config(NamedTuple):
    """Rows and columns a tile, warps, and (forward, wide rows) tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 1


def supports(p: CrossEntropyProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    if "fp64" in (p.logits, p.class_weight):
        return "has no fp64 kernel"
    return None


def configs(p: CrossEntropyProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Rows that fit a tile: several a warp, or few warps a row. Wider ones: streams (forward) or pieces (backward)."""
    block_n = min(triton.next_power_of_2(p.cols), WIDEST)
    if p.cols <= WIDEST:
        first = row_tile(p) if phase == "fwd" else _narrow(block_n) if 32 <= block_n <= 512 else _tile(block_n, 2048, 4)
        found = (first, *(_tile(block_n, n, w) for n, w in ((2048, 4), (4096, 8), (4096, 4))))
    elif phase == "fwd":
        tiles = ((2048, 4, 1), (8192, 8, 1), (4096, 8, 1), (4096, 4, 1), (4096, 8, 3), (16384, 16, 1))
        found = (row_tile(p), *(Config(1, n, w, s) for n, w, s in tiles))
    else:
        found = tuple(Config(1, n, w) for n, w in ((4096, 8), (4096, 4), (8192, 8), (2048, 4), (8192, 16)))
    widest_warps = 8 if device.kind == "hip" else 16
    return tuple(dict.fromkeys(c._replace(num_warps=min(c.num_warps, widest_warps)) for c in found))


def row_tile(p: CrossEntropyProblem) -> Config:
    """The forward's tile, by measurement (H200, bf16, 2026-11-29).

    All threads of a row repeat what is done once a row, so few of them share one: rows of 100 take 235 us a million with one warp for
    eight of them and 1,226 with four warps for sixteen, rows of 4,096 take 188 us for 65,536 with two warps and 254 with eight. With a
    soft cap, whose polynomial needs registers of its own, a thread holds half as many values.
    """
    block_n = triton.next_power_of_2(p.cols)
    if block_n < 32:
        return _tile(block_n, 2048, 4)
    if block_n <= 1024:
        return _narrow(block_n)
    if block_n <= WIDEST:
        return Config(1, block_n, block_n // (1024 if p.softcap else 2048))
    if p.softcap:
        return Config(1, 4096, 8)
    return Config(1, 2048, 4) if p.cols <= 2**16 or p.label_smoothing else Config(1, 8192, 8)


def _narrow(block_n: int) -> Config:
    """Whole rows in one warp, 32 values a thread."""
    return Config(min(1024 // block_n, 64), block_n, 1)


def _tile(block_n: int, values: int, num_warps: int) -> Config:
    return Config(min(max(1, values // block_n), 128), block_n, max(num_warps, block_n // 512))


def lanes(dtype: str) -> int:
    """Values of one 16-byte load."""
    return 16 // ITEM_SIZE[dtype]


@triton.jit
def _fwd_tile_kernel(
    logits_ptr, target_ptr, class_weight_ptr, weight_sum_ptr, loss_ptr, factors_ptr, divisor_ptr, num_rows, num_cols, logits_stride,
    ignore_index, smoothing, smooth, z_loss, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    here = rows < num_rows

    target = tl.load(target_ptr + rows, mask=here, other=ignore_index)
    kept, index, one = read_target(target, num_cols, ignore_index)
    weight = one
    if HAS_WEIGHT:
        weight = one * tl.load(class_weight_ptr + index).to(tl.float32)
    mask = kept[:, None] & (cols < num_cols)[None, :]  # an ignored row is not read
    z = tl.load(logits_ptr + rows[:, None] * logits_stride + cols[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    z_target = tl.load(logits_ptr + rows * logits_stride + index, mask=kept, other=0.0).to(tl.float32)

    if HAS_CAP:
        z = tl.where(mask, soft_capped(z, softcap), float("-inf"))
        z_target = soft_capped(z_target, softcap)
    smooth_sum, smooth_total = 0.0, smoothing
    if SMOOTHING:
        every = tl.where(mask, z - reference_of(z_target)[:, None], 0.0)
        if HAS_WEIGHT:
            every = every * tl.load(class_weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
            smooth_total = smooth * tl.load(weight_sum_ptr).to(tl.float32)
        smooth_sum = tl.sum(every, 1)
    z = tl.where(cols[None, :] == index.to(tl.int32)[:, None], float("-inf"), z)
    top, below = joined(tl.max(z, 1), z_target)
    others = tl.sum(tl.exp(z - top[:, None]), 1)
    loss, top, on_other, on_target = row_results(
        top, below, others, smooth_sum, smooth_total, kept, weight, one, smoothing, smooth, z_loss, SMOOTHING
    )

    tl.store(loss_ptr + rows, loss, mask=here)
    tl.store(factors_ptr + 3 * rows, top, mask=here)
    tl.store(factors_ptr + 3 * rows + 1, on_other, mask=here)
    tl.store(factors_ptr + 3 * rows + 2, on_target, mask=here)
    tl.store(divisor_ptr + rows, weight, mask=here)


@triton.jit
def visit(
    logits_ptr, class_weight_ptr, cols, stop, hidden, reference, softcap, top, total, smooth_lanes,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """The lanes of a row after its columns `cols` below `stop`, without the class `hidden`; None hides none, and costs nothing."""
    mask = cols < stop
    z = tl.load(logits_ptr + cols, mask=mask, other=float("-inf"), eviction_policy=EVICT).to(tl.float32)
    if HAS_CAP:
        z = tl.where(mask, soft_capped(z, softcap), float("-inf"))
    return taken_in(z, mask, cols, cols, hidden, class_weight_ptr, reference, top, total, smooth_lanes, HAS_WEIGHT, SMOOTHING)


@triton.jit
def _fwd_row_kernel(
    logits_ptr, target_ptr, class_weight_ptr, weight_sum_ptr, loss_ptr, factors_ptr, divisor_ptr, num_cols, logits_stride,
    ignore_index, smoothing, smooth, z_loss, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    LANES: tl.constexpr = BLOCK_N // GROUP
    offsets = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]

    kept, index, one = read_target(tl.load(target_ptr + row), num_cols, ignore_index)
    weight = one
    if HAS_WEIGHT:
        weight = one * tl.load(class_weight_ptr + index).to(tl.float32)
    z_target = tl.load(logits_ptr + index).to(tl.float32)
    if HAS_CAP:
        z_target = soft_capped(z_target, softcap)

    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    smooth_lanes = tl.zeros([LANES], tl.float32)
    reference = reference_of(z_target)
    stop = tl.where(kept, num_cols, 0)  # an ignored row is not read
    first = index.to(tl.int32) // BLOCK_N * BLOCK_N  # the target's tile goes first, so that no other one looks for it
    top, total, smooth_lanes = visit(
        logits_ptr, class_weight_ptr, first + offsets, stop, index.to(tl.int32), reference, softcap, top, total, smooth_lanes,
        HAS_WEIGHT, SMOOTHING, HAS_CAP, "",
    )  # fmt: skip
    for start in tl.range(0, stop - BLOCK_N, BLOCK_N, num_stages=STAGES):
        cols = tl.where(start < first, start, start + BLOCK_N) + offsets
        top, total, smooth_lanes = visit(
            logits_ptr, class_weight_ptr, cols, stop, None, reference, softcap, top, total, smooth_lanes,
            HAS_WEIGHT, SMOOTHING, HAS_CAP, "",
        )  # fmt: skip
    row_top, below, others = lane_finish(top, total, z_target)
    smooth_total, smooth_sum = smoothing, tl.sum(smooth_lanes, 0)
    if SMOOTHING:
        if HAS_WEIGHT:
            smooth_total = smooth * tl.load(weight_sum_ptr).to(tl.float32)
    loss, row_top, on_other, on_target = row_results(
        row_top, below, others, smooth_sum, smooth_total, kept, weight, one, smoothing, smooth, z_loss, SMOOTHING
    )

    tl.store(loss_ptr + row, loss)
    tl.store(factors_ptr + 3 * row, row_top)
    tl.store(factors_ptr + 3 * row + 1, on_other)
    tl.store(factors_ptr + 3 * row + 2, on_target)
    tl.store(divisor_ptr + row, weight)


@triton.jit
def _bwd_kernel(
    scale_ptr, logits_ptr, target_ptr, class_weight_ptr, factors_ptr, dlogits_ptr,
    num_rows, num_cols, first_col, last_col, num_tiles, scale_stride, logits_stride, dlogits_stride, ignore_index, smooth, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    rows = (pid // num_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    local = (pid % num_tiles).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = local + first_col
    here = rows < num_rows
    mask = here[:, None] & (cols < last_col)[None, :]

    target = tl.load(target_ptr + rows, mask=here, other=ignore_index)
    kept, index, one = read_target(target, num_cols, ignore_index)
    top = tl.load(factors_ptr + 3 * rows, mask=here, other=0.0)
    on_other = tl.load(factors_ptr + 3 * rows + 1, mask=here, other=0.0)
    on_target = tl.load(factors_ptr + 3 * rows + 2, mask=here, other=0.0)
    scale = tl.load(scale_ptr + rows * scale_stride, mask=here, other=0.0).to(tl.float32)
    z = tl.load(logits_ptr + rows[:, None] * logits_stride + local[None, :], mask=mask & kept[:, None], other=0.0).to(tl.float32)

    if HAS_CAP:
        t = tanh(z / softcap)
        z = softcap * t
    is_target = cols[None, :] == index.to(tl.int32)[:, None]
    dz = tl.where(is_target, (on_target * scale)[:, None], tl.exp(z - top[:, None]) * (on_other * scale)[:, None])
    if SMOOTHING:
        on_all = one * scale * smooth
        if HAS_WEIGHT:
            dz -= on_all[:, None] * tl.load(class_weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
        else:
            dz -= on_all[:, None]
    if HAS_CAP:
        dz *= 1.0 - t * t
    dz = tl.where(kept[:, None] & (cols < num_cols)[None, :], dz, 0.0)  # an ignored row is 0 whatever it holds, NaN too

    tl.store(dlogits_ptr + rows[:, None] * dlogits_stride + local[None, :], dz.to(dlogits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _reduce_kernel(
    loss_ptr,
    divisor_ptr,
    target_ptr,
    num_tokens_ptr,
    out_ptr,
    out_divisor_ptr,
    num_rows,
    ignore_index,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the sum of row losses, in one order, over the divisor that the reduction asks for."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, BLOCK):
        rows = start + offsets
        mask = rows < num_rows
        total += tl.load(loss_ptr + rows, mask=mask, other=0.0)
        if MODE == 1:
            count += tl.load(divisor_ptr + rows, mask=mask, other=0.0)
        if MODE == 2:
            count += (tl.load(target_ptr + rows, mask=mask, other=ignore_index).to(tl.int64) != ignore_index).to(tl.float32)

    loss, divisor = tl.sum(total, 0), tl.sum(count, 0)
    if MODE == 2:  # 1 where no rank has a token, so that the loss is 0
        given = tl.load(num_tokens_ptr).to(tl.float32)
        divisor = tl.where((given == 0) & (divisor == 0), 1.0, given)
    if MODE != 0:
        loss = loss / divisor
        tl.store(out_divisor_ptr, divisor)
    tl.store(out_ptr, loss)


class Operands(NamedTuple):
    """What every kernel gets besides logits: class weights and their sum (or stand-ins) and the scalars."""

    class_weight: torch.Tensor
    weight_sum: torch.Tensor
    scalars: tuple[float, ...]
    flags: dict[str, bool]

    @property
    def gradient_scalars(self) -> tuple[float, ...]:
        """Those that the factors of a row do not hold: the ignored class, smoothing a class, the soft cap."""
        ignore_index, _, smooth, _, softcap = self.scalars
        return ignore_index, smooth, softcap


def operands(p: CrossEntropyProblem, class_weight: torch.Tensor | None, stand_in: torch.Tensor, loss: bool = True) -> Operands:
    """Class weights are summed only for the loss with smoothing."""
    smoothing = p.label_smoothing > 0
    weight = stand_in if class_weight is None else class_weight.contiguous()
    weight_sum = stand_in if class_weight is None or not smoothing or not loss else weight.sum(dtype=torch.float32)
    flags = {"HAS_WEIGHT": class_weight is not None, "SMOOTHING": smoothing, "HAS_CAP": p.softcap > 0}
    return Operands(weight, weight_sum, (p.ignore_index, p.label_smoothing, p.label_smoothing / p.cols, p.z_loss, p.softcap), flags)


def launch_rows(
    p: CrossEntropyProblem, config: Config, logits: torch.Tensor, target: torch.Tensor, o: Operands, per_row: tuple[torch.Tensor, ...]
) -> None:
    """Row losses, factors and divisors of a matrix of logits; its rows may be wider than the vocabulary."""
    if p.cols <= WIDEST:
        launch(
            _fwd_tile_kernel, (triton.cdiv(logits.shape[0], config.block_m),), logits, target, o.class_weight, o.weight_sum, *per_row,
            logits.shape[0], p.cols, logits.stride(0), *o.scalars,
            **o.flags, BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
        )  # fmt: skip
    elif not unaligned.is_aligned(logits):
        tensors = o.class_weight, o.weight_sum, *per_row
        unaligned.launch_rows(p.cols, logits, target, tensors, o.scalars, o.flags, config.block_n, config.num_warps)
    else:
        launch(
            _fwd_row_kernel, (logits.shape[0],), logits, target, o.class_weight, o.weight_sum, *per_row,
            p.cols, logits.stride(0), *o.scalars,
            **o.flags, GROUP=lanes(p.logits), BLOCK_N=config.block_n, STAGES=config.num_stages, num_warps=config.num_warps,
        )  # fmt: skip


def _row_stride(scale: torch.Tensor) -> int:
    return scale.stride(0) if scale.dim() else 0


def launch_gradient(
    p: CrossEntropyProblem,
    config: Config,
    scale: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    factors: torch.Tensor,
    dlogits: torch.Tensor,
    o: Operands,
    first_col: int = 0,
) -> None:
    """dlogits of the columns from `first_col` that `logits` holds; `dlogits` may be `logits`."""
    num_rows, width = logits.shape
    tiles = triton.cdiv(width, config.block_n)
    launch(
        _bwd_kernel, (triton.cdiv(num_rows, config.block_m) * tiles,), scale, logits, target, o.class_weight, factors, dlogits,
        num_rows, p.cols, first_col, first_col + width, tiles, _row_stride(scale), logits.stride(0), dlogits.stride(0), *o.gradient_scalars,
        **o.flags, BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip


def launch_reduce(
    p: CrossEntropyProblem, target: torch.Tensor, num_tokens: torch.Tensor | None, loss: torch.Tensor, row_divisor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reduced loss [] and the divisor of the mean [] (empty without one)."""
    mode = SUM if p.reduction == "sum" else MEAN if num_tokens is None else COUNTED
    out = torch.empty((), dtype=torch.float32, device=loss.device)
    divisor = torch.empty(() if mode != SUM else (0,), dtype=torch.float32, device=loss.device)
    block = min(triton.next_power_of_2(max(loss.shape[0], 128)), 4096)
    launch(
        _reduce_kernel, (1,), loss, row_divisor, target, loss if num_tokens is None else num_tokens, out, divisor,
        loss.shape[0], p.ignore_index, MODE=mode, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return out, divisor


def launch_fwd(
    p: CrossEntropyProblem,
    config: Config,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, factors [rows, 3], and the divisor of the mean (empty without one)."""
    logits_MV, target_M = as_rows(logits), target.reshape(-1)
    loss, factors, row_divisor = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in (p.rows, (p.rows, 3), p.rows))
    launch_rows(p, config, logits_MV, target_M, operands(p, class_weight, loss), (loss, factors, row_divisor))
    if p.reduction == "none":
        return loss.view(target.shape), factors, loss.new_empty(0)
    reduced, divisor = launch_reduce(p, target_M, num_tokens, loss, row_divisor)
    return reduced, factors, divisor


def launch_bwd(
    p: CrossEntropyProblem,
    config: Config,
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    factors: torch.Tensor,
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """dlogits, of the dtype and shape of the logits."""
    logits_MV, target_M, o = as_rows(logits), target.reshape(-1), operands(p, class_weight, factors, loss=False)
    scale = dloss if divisor is None else dloss / divisor
    scale = scale.reshape(-1) if p.reduction == "none" else scale
    if config.block_n < p.cols and not unaligned.is_aligned(logits_MV) and unaligned.is_aligned_line(logits_MV):
        dlogits = unaligned.empty_line(logits_MV)
        tensors = scale, logits_MV, target_M, o.class_weight, factors, dlogits
        unaligned.launch_gradient(*tensors, o.gradient_scalars, o.flags, config.block_n, config.num_warps)
    else:
        dlogits = torch.empty(logits_MV.shape, dtype=logits.dtype, device=logits.device)
        launch_gradient(p, config, scale, logits_MV, target_M, factors, dlogits, o)
    return dlogits.view(logits.shape)
