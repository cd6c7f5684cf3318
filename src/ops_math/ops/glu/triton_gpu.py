"""Triton kernels for NVIDIA and AMD GPUs: elementwise, at the speed of memory.

Tensors that are all contiguous are one long row, whose last values, where their number is no multiple of 16, are a tile of their own, so
that all others are read 16 bytes at a time; other tensors are walked by rows with a stride each, and read by as many values as divide
widths and strides. The activation costs nothing beside the memory, so the backward computes it again from the gate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import alignment, as_rows
from ops_math.ops._tiles.activation import activate, activate_with_slope
from ops_math.ops._tiles.walk import GROUP, multiple_of, num_tiles, tail, tail_of_pairs, whole_groups
from ops_math.ops.glu import triton_gpu_halves as halves
from ops_math.ops.glu.problem import GluProblem
from ops_math.ops.glu.triton_gpu_config import Config
from ops_math.ops.glu.triton_gpu_gelu import launch_activation
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Device, cdiv, few_warps, next_power_of_2

# Halves of 16-bit values that are walked by rows: warps and accesses a thread, by phase and values at once. Shares of a copy (H200, bf16,
# 2026-11-30) and those with (4, 1): forward 1,164 columns 0.97 and 0.80, 6,616 1.08 and 0.94; backward 3,446 columns 0.91 and 0.85.
FIRST_OF_HALVES = {("fwd", 4): (2, 2), ("fwd", 8): (2, 2), ("bwd", 2): (4, 2)}
# Columns up to which two warps walk a row by fours. Shares of a copy with two warps, with four, and value by value (H200, bf16,
# 2026-11-30): forward 0.92, 0.73 and 0.75 at 753 columns, 0.80, 0.72 and 0.64 at 1,163, 0.96, 0.99 and 0.73 at 3,447; backward 0.64, 0.73
# and 0.75, then 0.63, 0.74 and 0.71, then 0.59, 0.67 and 0.79. No other tile was before the best of these.
NARROW = 2048


def supports(p: GluProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    return "has no fp64 kernel" if "fp64" in (p.gate, p.up, p.out) else None


def configs(p: GluProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """One or two 16-byte accesses a thread and tensor; more threads or fewer, fewest where a call has too few values for all cores.

    Where halves can be handled by fours, a row a program, that is first forward, as long as there are rows for all cores.
    """
    wave = 64 if device.kind == "hip" else 32
    vector = 16 // max(ITEM_SIZE[p.gate], ITEM_SIZE[p.out])

    def of(wishes: Iterable[tuple[int, int]], by_fours: bool = False) -> tuple[Config, ...]:
        return tuple(Config(wave * warps * vector * each, warps, by_fours) for warps, each in dict.fromkeys(wishes))

    few = few_warps(p.rows * p.cols, wave * vector, device.num_cores), 1
    if not halves.suits(p):
        many = p.packing == "halves" and vector == 8 and few == (4, 1)
        first = FIRST_OF_HALVES.get((phase, alignment(p.cols)), few) if many else few
        return of((first, few, (4, 1), (8, 1), (4, 2), (2, 2), (8, 2)))
    one_by_one = of((few, (4, 1), (8, 1)))
    by_fours = of(((4, 1),) if phase == "bwd" else ((2, 2), (4, 1)) if p.cols <= NARROW else ((4, 1), (2, 2)), True)
    if phase == "fwd" and p.rows >= 4 * device.num_cores:
        return (*by_fours, *one_by_one)
    return (*one_by_one[:1], *by_fours, *one_by_one[1:])


@triton.jit
def _fwd_tile(gate_ptr, up_ptr, y_ptr, rows, cols, gate_stride, up_stride, y_stride, mask, ACTIVATION: tl.constexpr):
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=mask, other=0.0).to(tl.float32)

    y = activate(gate, ACTIVATION) * up

    tl.store(y_ptr + rows * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_kernel(
    gate_ptr, up_ptr, y_ptr, num_rows, num_cols, gate_stride, up_stride, y_stride,
    ACTIVATION: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, width = num_tiles(num_cols, BLOCK_N), whole_groups(num_cols) if TAIL else multiple_of(num_cols, ALIGN)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < width)
    gate_stride, up_stride, y_stride = multiple_of(gate_stride, ALIGN), multiple_of(up_stride, ALIGN), multiple_of(y_stride, ALIGN)

    _fwd_tile(gate_ptr, up_ptr, y_ptr, rows, cols, gate_stride, up_stride, y_stride, mask, ACTIVATION)
    if TAIL:
        if tl.program_id(0) == tiles - 1:
            last = tail(num_cols)
            _fwd_tile(gate_ptr, up_ptr, y_ptr, 0, last, 0, 0, 0, last < num_cols, ACTIVATION)


@triton.jit
def _fwd_pairs_tile(
    packed_ptr, y_ptr, rows, cols, both, packed_stride, y_stride, mask, both_mask,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    packed = tl.load(packed_ptr + rows * packed_stride + both, mask=both_mask, other=0.0)
    gate, up = tl.split(tl.reshape(packed, (BLOCK_M, BLOCK_N, 2)))

    y = activate(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)

    tl.store(y_ptr + rows * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fwd_pairs_kernel(
    packed_ptr, y_ptr, num_rows, num_cols, packed_stride, y_stride,
    ACTIVATION: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, width = num_tiles(num_cols, BLOCK_N), whole_groups(num_cols) if TAIL else multiple_of(num_cols, ALIGN)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < width)
    both = (tl.program_id(0) % tiles).to(tl.int64) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)[None, :]
    both_mask = (rows < num_rows) & (both < tl.cast(width, tl.int64) * 2)
    packed_stride, y_stride = multiple_of(packed_stride, ALIGN), multiple_of(y_stride, ALIGN)

    _fwd_pairs_tile(packed_ptr, y_ptr, rows, cols, both, packed_stride, y_stride, mask, both_mask, ACTIVATION, BLOCK_M, BLOCK_N)
    if TAIL:
        if tl.program_id(0) == tiles - 1:
            last, last_both = tail(num_cols)[None, :], tail_of_pairs(num_cols)[None, :]
            last_mask = last_both < tl.cast(num_cols, tl.int64) * 2
            _fwd_pairs_tile(packed_ptr, y_ptr, 0, last, last_both, 0, 0, last < num_cols, last_mask, ACTIVATION, 1, GROUP)


@triton.jit
def _bwd_tile(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, rows, cols,
    dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, y_stride, mask,
    ACTIVATION: tl.constexpr, NEED_DUP: tl.constexpr, NEED_Y: tl.constexpr,
):  # fmt: skip
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=mask, other=0.0).to(tl.float32)

    act, slope = activate_with_slope(gate, ACTIVATION)

    tl.store(dgate_ptr + rows * dgate_stride + cols, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        tl.store(dup_ptr + rows * dup_stride + cols, (dy * act).to(dup_ptr.dtype.element_ty), mask=mask)
    if NEED_Y:
        tl.store(y_ptr + rows * y_stride + cols, (act * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, num_rows, num_cols,
    dy_stride, gate_stride, up_stride, dgate_stride, dup_stride, y_stride,
    ACTIVATION: tl.constexpr, NEED_DUP: tl.constexpr, NEED_Y: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, width = num_tiles(num_cols, BLOCK_N), whole_groups(num_cols) if TAIL else multiple_of(num_cols, ALIGN)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < width)

    _bwd_tile(
        dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, rows, cols,
        multiple_of(dy_stride, ALIGN), multiple_of(gate_stride, ALIGN), multiple_of(up_stride, ALIGN),
        multiple_of(dgate_stride, ALIGN), multiple_of(dup_stride, ALIGN), multiple_of(y_stride, ALIGN), mask, ACTIVATION, NEED_DUP, NEED_Y,
    )  # fmt: skip
    if TAIL:
        if tl.program_id(0) == tiles - 1:
            last = tail(num_cols)
            _bwd_tile(
                dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, 0, last, 0, 0, 0, 0, 0, 0, last < num_cols,
                ACTIVATION, NEED_DUP, NEED_Y,
            )  # fmt: skip


@triton.jit
def _bwd_pairs_tile(
    dy_ptr, packed_ptr, dpacked_ptr, y_ptr, rows, cols, both, dy_stride, packed_stride, dpacked_stride, y_stride, mask, both_mask,
    ACTIVATION: tl.constexpr, NEED_Y: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    packed = tl.load(packed_ptr + rows * packed_stride + both, mask=both_mask, other=0.0)
    gate, up = tl.split(tl.reshape(packed, (BLOCK_M, BLOCK_N, 2)))

    up = up.to(tl.float32)
    act, slope = activate_with_slope(gate.to(tl.float32), ACTIVATION)
    dpacked = tl.reshape(tl.join(dy * up * slope, dy * act), (BLOCK_M, 2 * BLOCK_N))

    tl.store(dpacked_ptr + rows * dpacked_stride + both, dpacked.to(dpacked_ptr.dtype.element_ty), mask=both_mask)
    if NEED_Y:
        tl.store(y_ptr + rows * y_stride + cols, (act * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_pairs_kernel(
    dy_ptr, packed_ptr, dpacked_ptr, y_ptr, num_rows, num_cols, dy_stride, packed_stride, dpacked_stride, y_stride,
    ACTIVATION: tl.constexpr, NEED_Y: tl.constexpr, ALIGN: tl.constexpr, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles, width = num_tiles(num_cols, BLOCK_N), whole_groups(num_cols) if TAIL else multiple_of(num_cols, ALIGN)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < width)
    both = (tl.program_id(0) % tiles).to(tl.int64) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)[None, :]
    both_mask = (rows < num_rows) & (both < tl.cast(width, tl.int64) * 2)

    _bwd_pairs_tile(
        dy_ptr, packed_ptr, dpacked_ptr, y_ptr, rows, cols, both,
        multiple_of(dy_stride, ALIGN), multiple_of(packed_stride, ALIGN), multiple_of(dpacked_stride, ALIGN), multiple_of(y_stride, ALIGN),
        mask, both_mask, ACTIVATION, NEED_Y, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if TAIL:
        if tl.program_id(0) == tiles - 1:
            last, last_both = tail(num_cols)[None, :], tail_of_pairs(num_cols)[None, :]
            last_mask = last_both < tl.cast(num_cols, tl.int64) * 2
            _bwd_pairs_tile(
                dy_ptr, packed_ptr, dpacked_ptr, y_ptr, 0, last, last_both, 0, 0, 0, 0, last < num_cols, last_mask,
                ACTIVATION, NEED_Y, 1, GROUP,
            )  # fmt: skip


class _Walk(NamedTuple):
    """How tensors are walked: as `num_rows` rows of `num_cols` columns, one stride a tensor, in tiles; the kernels' ALIGN and TAIL."""

    num_rows: int
    num_cols: int
    strides: tuple[int, ...]
    block_m: int
    block_n: int
    align: int
    tail: bool

    @property
    def grid(self) -> tuple[int, ...]:
        """One program a tile."""
        return (cdiv(self.num_rows, self.block_m) * cdiv(self.num_cols, self.block_n),)

    @property
    def tile(self) -> dict[str, Any]:
        """The kernels' constants."""
        return {"ALIGN": self.align, "TAIL": self.tail, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n}


def _walk(p: GluProblem, config: Config, *tensors: torch.Tensor) -> _Walk:
    """`tensors` are matrices of p.rows; all contiguous ones are one row. In pairs kernels widths differ and all are contiguous or none."""
    if all(t.is_contiguous() for t in tensors):
        values = p.rows * p.cols
        return _Walk(min(p.rows, 1), values, (0,) * len(tensors), 1, config.block, 16, values % 16 != 0)
    block_n, strides = min(next_power_of_2(p.cols), config.block), tuple(t.stride(0) for t in tensors)
    return _Walk(p.rows, p.cols, strides, config.block // block_n, block_n, alignment(p.cols, *strides), False)


def _halves(p: GluProblem, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as matrices."""
    if up is not None:
        return as_rows(gate), as_rows(up)
    packed = as_rows(gate)
    return packed[:, : p.cols], packed[:, p.cols :]


def launch_fwd(p: GluProblem, config: Config, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """y [..., N] and, where it is to be kept, activation(gate) [..., N]."""
    shape = (*gate.shape[:-1], p.cols)
    y = torch.empty(shape, dtype=DTYPE_OF[p.out], device=gate.device)
    act = torch.empty(shape if p.keep else (0,), dtype=y.dtype, device=gate.device)
    if p.packing == "interleaved":
        packed, y_rows = as_rows(gate), y.view(p.rows, p.cols)
        walk = _walk(p, config, packed, y_rows)
        launch(
            _fwd_pairs_kernel, walk.grid, packed, y, walk.num_rows, walk.num_cols, *walk.strides,
            ACTIVATION=p.activation, **walk.tile, num_warps=config.num_warps,
        )  # fmt: skip
    elif config.by_fours and halves.lies_right(gate):
        halves.launch_fwd(p, config, gate, y)
    else:
        _launch_fwd(p, config, *_halves(p, gate, up), y.view(p.rows, p.cols))
    if p.keep:
        launch_activation(p.activation, gate[..., 0::2] if p.packing == "interleaved" else gate[..., : p.cols], act)
    return y, act


def _launch_fwd(p: GluProblem, config: Config, gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor) -> None:
    """y = activation(gate) up for matrices."""
    walk = _walk(p, config, gate, up, y)
    launch(
        _fwd_kernel, walk.grid, gate, up, y, walk.num_rows, walk.num_cols, *walk.strides,
        ACTIVATION=p.activation, **walk.tile, num_warps=config.num_warps,
    )  # fmt: skip


def launch_bwd(
    p: GluProblem, config: Config, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for. A kept activation is not looked at."""
    dgate = torch.empty(gate.shape if p.need_dgate else (0,), dtype=gate.dtype, device=gate.device)
    dup = torch.empty(dy.shape if up is not None and p.need_dup else (0,), dtype=gate.dtype if up is None else up.dtype, device=gate.device)
    y = torch.empty(dy.shape if p.need_y else (0,), dtype=dy.dtype, device=gate.device)
    dy_rows = as_rows(dy)
    y_rows = y.view(p.rows, p.cols) if p.need_y else dy_rows
    if p.packing == "interleaved":
        _launch_bwd_pairs(p, config, dy_rows, as_rows(gate), dgate, y_rows)
        return dgate, dup, y
    if config.by_fours and halves.lies_right(dy, gate):
        halves.launch_bwd(p, config, dy, gate, dgate)
        return dgate, dup, y
    gate_rows, up_rows = _halves(p, gate, up)
    if not p.need_dgate:  # dup = activation(gate) dy has the form of the forward
        if p.need_dup:
            _launch_fwd(p, config, gate_rows, dy_rows, dup.view(p.rows, p.cols))
        if p.need_y:
            _launch_fwd(p, config, gate_rows, up_rows, y_rows)
        return dgate, dup, y
    dgate_rows = dgate.view(p.rows, dgate.shape[-1])
    dup_rows = dgate_rows[:, p.cols :] if up is None else dup.view(p.rows, p.cols) if p.need_dup else dgate_rows
    dgate_rows = dgate_rows[:, : p.cols]
    walk = _walk(p, config, dy_rows, gate_rows, up_rows, dgate_rows, dup_rows, y_rows)
    launch(
        _bwd_kernel, walk.grid, dy_rows, gate_rows, up_rows, dgate_rows, dup_rows, y_rows, walk.num_rows, walk.num_cols, *walk.strides,
        ACTIVATION=p.activation, NEED_DUP=p.need_dup, NEED_Y=p.need_y, **walk.tile, num_warps=config.num_warps,
    )  # fmt: skip
    return dgate, dup, y


def _launch_bwd_pairs(
    p: GluProblem, config: Config, dy: torch.Tensor, packed: torch.Tensor, dpacked: torch.Tensor, y: torch.Tensor
) -> None:
    walk = _walk(p, config, dy, packed, dpacked.view(packed.shape), y)
    launch(
        _bwd_pairs_kernel, walk.grid, dy, packed, dpacked, y, walk.num_rows, walk.num_cols, *walk.strides,
        ACTIVATION=p.activation, NEED_Y=p.need_y, **walk.tile, num_warps=config.num_warps,
    )  # fmt: skip
