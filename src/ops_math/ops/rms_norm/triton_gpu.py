"""Triton kernels for NVIDIA and AMD GPUs.

A row lies in registers when it fits (16,384 columns); wider rows are walked twice. The backward is persistent: each program owns
rows p, p + P, ... and one fp32 row of partial weight gradients, so that the sum has one order and needs no atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import as_rows
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.spec import DTYPE_OF, Device

WIDEST = 16384  # columns held in registers: 32 warps x 32 lanes x 16 values


class Config(NamedTuple):
    """Rows a tile, columns a tile, warps, programs of the backward."""

    block_m: int
    block_n: int
    num_warps: int
    num_programs: int


def supports(p: RmsNormProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    if "fp64" in (p.x, p.residual, p.weight, p.out):
        return "has no fp64 kernel"
    return None


def configs(p: RmsNormProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Tiles of about 4,096 values (forward) in at most 32 warps."""
    block_n = min(triton.next_power_of_2(max(p.cols, 1)), WIDEST if p.cols <= WIDEST else 4096)
    block_m = max(1, min(2048 // block_n, 16))
    num_warps = min(max(block_m * block_n // 512, 1), 16 if device.kind == "hip" else 32)
    rows = -(-p.rows // block_m)
    per_core = max(1, 32 // num_warps) if phase == "bwd" else 1
    return (Config(block_m, block_n, num_warps, max(1, min(rows, device.num_cores * per_core))),)


@triton.jit
def _fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, num_rows, num_cols, x_stride, residual_stride, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows[:, None] * num_cols + cols[None, :], total, mask=mask)
        x = total.to(tl.float32)  # the backward sees the rounded sum, so the forward normalises it too

    rstd = tl.rsqrt(tl.sum(x * x, 1) / num_cols + eps)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32) + weight_offset
        y = y * weight[None, :]

    tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)


@triton.jit
def _fwd_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, num_rows, num_cols, x_stride, residual_stride, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
            total = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * num_cols + cols, total, mask=mask)
            x = total.to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / num_cols + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:  # computed again rather than read back: a thread may not read what another one stored
            x += tl.load(residual_ptr + row * residual_stride + cols, mask=mask, other=0.0).to(tl.float32)
            x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
        y = x * rstd
        if HAS_WEIGHT:
            y *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset
        tl.store(y_ptr + row * num_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride, weight_offset,
    HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32) + weight_offset
    dw = tl.zeros([BLOCK_N], tl.float32)
    for tile in range(pid, tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]

        xhat = x * rstd
        if NEED_DW:
            dw += tl.sum(g * xhat, 0)
        if NEED_DX:
            if HAS_WEIGHT:
                g = g * weight[None, :]
            dx = (g - xhat * (tl.sum(g * xhat, 1) / num_cols)[:, None]) * rstd
            if HAS_DSUM:
                dx += tl.load(dsum_ptr + rows[:, None] * dsum_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        tl.store(partial_ptr + pid.to(tl.int64) * num_cols + cols, dw, mask=cols < num_cols)


@triton.jit
def _bwd_wide_kernel(
    dy_ptr, dsum_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, num_cols, dy_stride, dsum_stride, x_stride, weight_offset,
    HAS_DSUM: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    for row32 in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row32, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        dots = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            mask = cols < num_cols
            xhat = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * rstd
            g = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
            if NEED_DW:  # the program's own partial row, each column always by the same thread
                partial = tl.load(partial_ptr + pid * num_cols + cols, mask=mask, other=0.0)
                tl.store(partial_ptr + pid * num_cols + cols, partial + g * xhat, mask=mask)
            if HAS_WEIGHT:
                g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset
            dots += g * xhat
        mean = tl.sum(dots, 0) / num_cols
        if NEED_DX:
            for start in range(0, num_cols, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = cols < num_cols
                xhat = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * rstd
                g = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
                if HAS_WEIGHT:
                    g *= tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32) + weight_offset
                dx = (g - xhat * mean) * rstd
                if HAS_DSUM:
                    dx += tl.load(dsum_ptr + row * dsum_stride + cols, mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_ptr + row * num_cols + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def launch_fwd(
    p: RmsNormProblem, config: Config, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, sum (empty without a residual) and rstd [rows]."""
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    total = x.new_empty(0) if residual is None else torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    rstd = torch.empty(p.rows, dtype=torch.float32, device=x.device)
    x_MN = as_rows(x)
    residual_MN = x_MN if residual is None else as_rows(residual)
    kernel = _fwd_kernel if p.cols <= WIDEST else _fwd_wide_kernel
    launch(
        kernel, (triton.cdiv(p.rows, config.block_m),), x_MN, residual_MN, x_MN if weight is None else weight.contiguous(), y, total, rstd,
        p.rows, p.cols, x_MN.stride(0), residual_MN.stride(0), p.eps, p.weight_offset,
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y, total, rstd


def launch_bwd(
    p: RmsNormProblem, config: Config, dy: torch.Tensor, dsum: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dweight (empty where not needed)."""
    need_dw = weight is not None and p.need_dw
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if p.need_dx else x.new_empty(0)
    make = torch.zeros if p.cols > WIDEST else torch.empty
    partial = make((config.num_programs, p.cols), dtype=torch.float32, device=x.device) if need_dw else x.new_empty(0)
    x_MN, dy_MN = as_rows(x), as_rows(dy)
    dsum_MN = dy_MN if dsum is None else as_rows(dsum)
    kernel = _bwd_kernel if p.cols <= WIDEST else _bwd_wide_kernel
    launch(
        kernel, (config.num_programs if p.cols else 0,), dy_MN, dsum_MN, x_MN, x_MN if weight is None else weight.contiguous(), rstd, dx, partial,
        p.rows, p.cols, dy_MN.stride(0), dsum_MN.stride(0), x_MN.stride(0), p.weight_offset,
        HAS_DSUM=dsum is not None, HAS_WEIGHT=weight is not None, NEED_DX=p.need_dx, NEED_DW=need_dw,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype) if need_dw and weight is not None else x.new_empty(0)
