"""Triton kernel for NVIDIA and AMD GPUs: one tile of rows and columns a program, the same kernel forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import as_rows
from ops_math.ops._tiles.philox import keep_tile
from ops_math.ops.dropout.problem import DropoutProblem
from ops_math.rng import honoured, threshold
from ops_math.spec import Device, cdiv, next_power_of_2

WIDEST = 4096  # columns of a tile


class Config(NamedTuple):
    """Rows a tile, columns a tile, warps."""

    block_m: int
    block_n: int
    num_warps: int


def supports(p: DropoutProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    return "has no fp64 kernel" if p.x == "fp64" else None


def configs(p: DropoutProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Tiles of 1,024 to 8,192 values, 16 or 8 a thread."""
    found = []
    sizes = ((4096, 8), (2048, 4)) if p.cols > 2048 else ((2048, 4), (4096, 8))
    for values, num_warps in (*sizes, (1024, 4), (8192, 16)):
        block_n = min(max(next_power_of_2(max(p.cols, 1)), 8), min(values, WIDEST))
        found.append(Config(max(values // block_n, 1), block_n, num_warps))
    return tuple(found)


@triton.jit
def _kernel(
    x_ptr, state_ptr, y_ptr, num_rows, num_cols, x_stride, threshold, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = tl.program_id(1) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]

    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    seed, offset, first_row = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)

    keep = keep_tile(seed, offset, rows + first_row, 0, first_col, threshold, BLOCK_N)
    y = tl.where(keep, x * scale, 0.0)

    tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def launch_fwd(p: DropoutProblem, config: Config, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x / (1 - p) where the mask keeps, 0 elsewhere."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_MN = as_rows(x)
    launch(
        _kernel, (cdiv(p.rows, config.block_m), cdiv(p.cols, config.block_n)), x_MN, state, y,
        p.rows, p.cols, x_MN.stride(0), threshold(p.p), 1.0 / (1.0 - honoured(p.p)),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return y


def launch_bwd(p: DropoutProblem, config: Config, dy: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The same function of the gradient, with the mask drawn again."""
    return launch_fwd(p, config, dy, state)
