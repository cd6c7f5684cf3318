"""Triton kernel for NVIDIA and AMD GPUs: one tile for every size, sums along it in one order.

The same kernel makes y, dx and dweight. An element of the result is the sum over K tiles in turn, in one accumulator, whatever M and N
are: it depends on its row and its column alone. Parts of the sum over K are programs of their own and are added in pairs afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import as_rows, copied
from ops_math.ops.linear.problem import LinearProblem
from ops_math.spec import DTYPE_OF, Device, cdiv, compute_dtype

MOST = 2**24  # elements of a stride: a tile's places are counted in 32 bits
GROUP = 8  # tiles of rows that are walked together, so that they find each other's columns in the L2 cache
TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


class Config(NamedTuple):
    """Rows, columns and depth a tile, warps, stages; rows whose gradients are added before those of the next ones (0: all)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    token_block: int = 0


SINGLE = Config(64, 64, 16, 4, 1)  # for fp32; a second stage spills on sm_90


def supports(p: LinearProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel, and a tile's places are counted in 32 bits."""
    if "fp64" in (p.x, p.weight, p.bias, p.store, p.out):
        return "has no fp64 kernel"
    return "takes fewer than 2^24 inputs and outputs" if max(p.inputs, p.outputs) >= MOST else None


def configs(p: LinearProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """One: it must not follow the sizes."""
    if device.kind == "interpreter":
        return (Config(32, 32, 32, 4, 1),)
    if p.store == "fp32":
        return (SINGLE,)
    return (Config(128, 128, 32, 8, 1 if device.kind == "hip" else 3),)  # twice as deep it spills where strides are odd


def invariant_configs(p: LinearProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """The same tile, with the token block of the policy, which is the number of rows of the problem that is asked."""
    return tuple(c._replace(token_block=p.rows) for c in configs(p, device, phase))


def predict_us(p: LinearProblem, device: Device, phase: str) -> float:
    """Twice the vendor's time: what it is not made for."""
    one = 2 * p.rows * p.inputs * p.outputs
    count = 1 if phase == "fwd" else p.need_dx + p.need_dw
    return 2 * count * one / (device.product_tflops * 1e6) + 2 * device.launch_us


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, num_m, num_n, num_k, part_k, a_stride_m, a_stride_k, b_stride_k, b_stride_n,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(num_m, BLOCK_M), tl.cdiv(num_n, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * tiles_n)
    first_m, first_n = (group * GROUP_M + inside % height) * BLOCK_M, (inside // height) * BLOCK_N
    rows, cols, depth = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * part_k
    last = tl.minimum(first + part_k, num_k)
    # Within a tile places are counted in 32 bits: an address for each element would take the registers of the sums.
    a_ptr += first_m.to(tl.int64) * a_stride_m
    b_ptr += first_n.to(tl.int64) * b_stride_n
    a_places = rows[:, None] * a_stride_m + depth[None, :] * a_stride_k
    b_places = depth[:, None] * b_stride_k + cols[None, :] * b_stride_n
    a_rows, b_cols = (rows < num_m - first_m)[:, None], (cols < num_n - first_n)[None, :]

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        here = tl.cast(start, tl.int64)
        a = tl.load(a_ptr + here * a_stride_k + a_places, mask=a_rows & (depth < last - start)[None, :], other=0.0).to(DTYPE)
        b = tl.load(b_ptr + here * b_stride_k + b_places, mask=(depth < last - start)[:, None] & b_cols, other=0.0).to(DTYPE)
        total = tl.dot(a, b, total, input_precision=PRECISION)

    if bias_ptr is not None:
        total += tl.load(bias_ptr + first_n + cols, mask=cols < num_n - first_n, other=0.0).to(tl.float32)[None, :]
    c_ptr += (tl.program_id(1).to(tl.int64) * num_m + first_m) * num_n + first_n
    c_places, mask = rows[:, None] * num_n + cols[None, :], a_rows & b_cols
    if ADD:
        total += tl.load(c_ptr + c_places, mask=mask, other=0.0)
    tl.store(c_ptr + c_places, total.to(c_ptr.dtype.element_ty), mask=mask)


def _counted(t: torch.Tensor) -> torch.Tensor:
    """The operand, whose places within a tile 32 bits count: up to 127 steps of one stride and 31 of the other."""
    return t if sum(t.stride()) <= MOST else copied(t.contiguous(), "an operand of linear", "its strides together are beyond 2^24")


def _multiply(
    p: LinearProblem, config: Config, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor, parts: int = 1,
    add: bool = False,
) -> None:  # fmt: skip
    """c = a b + bias, or the parts of it; with `add` it is added to c. Any strides but for c, which is dense."""
    (num_m, num_k), num_n = a.shape, b.shape[1]
    a, b = (_counted(t) for t in (a, b))
    grid = (cdiv(num_m, config.block_m) * cdiv(num_n, config.block_n), parts)
    launch(
        _product_kernel, grid if num_m and num_n else (0,), a, b, bias, c, num_m, num_n, num_k, num_k // parts, *a.stride(), *b.stride(),
        DTYPE=TYPES[p.store], PRECISION=p.products or "tf32", ADD=add, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, GROUP_M=GROUP, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _in_parts(
    p: LinearProblem, config: Config, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.dtype, parts: int
) -> torch.Tensor:
    """a b + bias in `out`; parts of the sum are added in pairs, in fp32."""
    shape = (a.shape[0], b.shape[1])
    if parts == 1:
        made = torch.empty(shape, dtype=out, device=a.device)
        _multiply(p, config, a, b, bias, made)
        return made
    partial = torch.empty((parts, *shape), dtype=torch.float32, device=a.device)
    _multiply(p, config, a, b, None, partial, parts)
    while partial.shape[0] > 1:
        partial = partial[0::2] + partial[1::2]
    return (partial[0] if bias is None else partial[0] + bias.float()).to(out)


def launch_fwd(p: LinearProblem, config: Config, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    bias = None if bias is None else bias.contiguous()
    made = _in_parts(p, config, as_rows(x), weight.t(), bias, DTYPE_OF[p.out], p.parts_k)
    return made.view(*x.shape[:-1], p.outputs)


def launch_bwd(
    p: LinearProblem, config: Config, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight and dbias, the latter two token block by token block; empty where not needed."""
    dy_MN = as_rows(dy, p.outputs)
    dx = x.new_empty(0)
    if p.need_dx:
        dx = _in_parts(p, config, dy_MN, weight, None, x.dtype, p.parts_n).view(x.shape)
    dw = _summed(p, config, dy_MN.t(), as_rows(x), weight.dtype) if p.need_dw else weight.new_empty(0)
    bias = DTYPE_OF[p.bias or p.weight]
    db = x.new_empty(0, dtype=bias)
    if p.need_db:
        db = _column_sums(p, config, dy_MN, bias)
    return dx, dw, db


def _column_sums(p: LinearProblem, config: Config, dy_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of dy over rows, as a product with ones: of a wide dy in fp32, since only operands of the layer's products are rounded."""
    if dy_MN.dtype == torch.float32 != DTYPE_OF[p.store]:
        p, config = p._replace(store="fp32", products="ieee"), SINGLE._replace(token_block=config.token_block)
    ones = torch.ones(1, dtype=DTYPE_OF[p.store], device=dy_MN.device).expand(1, p.rows)
    return _summed(p, config, ones, dy_MN, dtype).view(p.outputs)


def _summed(p: LinearProblem, config: Config, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a b with the rows of the call as its depth: blocks of them are added in fp32, in order."""
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=compute_dtype(dtype), device=b.device)
    block = config.token_block or max(p.rows, 1)
    for first in range(0, p.rows, block):
        _multiply(p, config, a[:, first : first + block], b[first : first + block], None, total, add=first > 0)
    return total.to(dtype)
