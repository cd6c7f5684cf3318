"""Triton kernels for NVIDIA and AMD GPUs.

A program takes the heads of one token (or of a few, where heads are few and narrow; or a share of the heads, where they are many):
its table row is read once for all of them. Queries and keys go through one launch; in a packed tensor the values are heads of the
second group that are not turned. The backward is the forward with the sines negated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import dense
from ops_math.ops._tiles.rotary import turn
from ops_math.ops.rope.problem import RopeProblem
from ops_math.spec import DTYPE_OF, Device, cdiv, next_power_of_2


class Config(NamedTuple):
    """Tokens a program, programs that share a token's heads, warps."""

    tokens: int
    shares: int
    num_warps: int


def supports(p: RopeProblem, device: Device, phase: str) -> str | None:
    """Not fp64, and no more tokens than 32 bits count."""
    if "fp64" in (p.x, p.out, p.table):
        return "has no fp64 kernel"
    return "counts tokens in 32 bits" if p.batch * p.seq >= 2**31 - 16 else None


def configs(p: RopeProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """About 40 values a thread; 32 of 64 bytes in flight hide the memory's latency. Then half and twice the threads, and shares."""
    values = max((p.heads + p.kv_heads) * next_power_of_2(p.head_dim), 1)
    wave = 64 if device.kind == "hip" else 32
    tokens = max(1, min(16, next_power_of_2(1024 // values))) if values < 1024 else 1
    shares = next_power_of_2(-(-values // 8192))
    warps = max(1, min(8, next_power_of_2(tokens * values // shares // (wave * 48))))
    found = [Config(tokens, shares, warps), Config(tokens, shares, max(1, warps // 2)), Config(tokens, shares, min(8, 2 * warps))]
    found += [Config(tokens, min(2 * shares, max(p.heads, 1)), max(1, warps // 2)), Config(2 * tokens, shares, min(8, 2 * warps))]
    return tuple(dict.fromkeys(found))


@triton.jit
def _place(num_tokens, seq, shares, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr):
    """The program's tokens [T, 1, 1] as sequence, place in it and whether they exist, and its heads [1, H, 1] and [1, K, 1]."""
    share = (tl.program_id(0) % shares).to(tl.int64)
    token = (tl.program_id(0) // shares) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]  # in 32 bits, where division is cheap
    q_head = share * BLOCK_H + tl.arange(0, BLOCK_H)[None, :, None]
    k_head = share * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
    return (token // seq).to(tl.int64), (token % seq).to(tl.int64), token < num_tokens, q_head, k_head


@triton.jit
def _load_tables(
    cos_ptr, sin_ptr, position_ptr, batch, place, live, num_rows,
    table_stride_b, table_stride_s, position_stride_b, position_stride_s, sign,
    HAS_POSITIONS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """cos and sin [T, 1, R/2] of the tokens; a position outside the tables reads NaN."""
    row = place
    if HAS_POSITIONS:
        row = tl.load(position_ptr + batch * position_stride_b + place * position_stride_s, mask=live, other=0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, None, :]
    offsets = batch * table_stride_b + row * table_stride_s + cols
    mask = live & (row >= 0) & (row < num_rows) & (cols < HALF)
    cos = tl.load(cos_ptr + offsets, mask=mask, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + offsets, mask=mask, other=float("nan")).to(tl.float32) * sign
    return cos, sin


@triton.jit
def _load_halves(rows_ptr, mask, HALF: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)[None, None, :]
    mask = mask & (cols < HALF)
    return tl.load(rows_ptr + cols, mask=mask, other=0.0).to(tl.float32), tl.load(rows_ptr + HALF + cols, mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _store_halves(rows_ptr, a, b, mask, HALF: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)[None, None, :]
    mask = mask & (cols < HALF)
    tl.store(rows_ptr + cols, a.to(rows_ptr.dtype.element_ty), mask=mask)
    tl.store(rows_ptr + HALF + cols, b.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_pairs(rows_ptr, mask, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, 2 * BLOCK)[None, None, :]
    x = tl.load(rows_ptr + cols, mask=mask & (cols < 2 * HALF), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (BLOCK_T, BLOCK_H, BLOCK, 2)))


@triton.jit
def _store_pairs(rows_ptr, a, b, mask, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, 2 * BLOCK)[None, None, :]
    x = tl.reshape(tl.join(a, b), (BLOCK_T, BLOCK_H, 2 * BLOCK))
    tl.store(rows_ptr + cols, x.to(rows_ptr.dtype.element_ty), mask=mask & (cols < 2 * HALF))


@triton.jit
def _copy_rest(rows_ptr, out_ptr, mask, BEGIN: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr):
    """Columns from BEGIN on, which are not turned."""
    cols = tl.arange(0, BLOCK)[None, None, :]
    mask = mask & (cols < REST)
    x = tl.load(rows_ptr + BEGIN + cols, mask=mask, other=0.0)
    tl.store(out_ptr + BEGIN + cols, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _halves_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr, k_out_ptr,
    num_tokens, seq, num_heads, num_kv_heads, num_kv_turned, num_rows, shares,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    q_out_stride_b, q_out_stride_s, q_out_stride_h, k_out_stride_b, k_out_stride_s, k_out_stride_h,
    table_stride_b, table_stride_s, position_stride_b, position_stride_s, sign,
    HAS_POSITIONS: tl.constexpr, REST: tl.constexpr, IN_PLACE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    batch, place, live, q_head, k_head = _place(num_tokens, seq, shares, BLOCK_T, BLOCK_H, BLOCK_K)
    q_mask, k_mask = live & (q_head < num_heads), live & (k_head < num_kv_heads)
    q_rows = q_ptr + batch * q_stride_b + place * q_stride_s + q_head * q_stride_h
    k_rows = k_ptr + batch * k_stride_b + place * k_stride_s + k_head * k_stride_h
    q_out = q_out_ptr + batch * q_out_stride_b + place * q_out_stride_s + q_head * q_out_stride_h
    k_out = k_out_ptr + batch * k_out_stride_b + place * k_out_stride_s + k_head * k_out_stride_h

    qa, qb = _load_halves(q_rows, q_mask, HALF, BLOCK)
    ka, kb = _load_halves(k_rows, k_mask, HALF, BLOCK)
    cos, sin = _load_tables(
        cos_ptr, sin_ptr, position_ptr, batch, place, live, num_rows,
    table_stride_b, table_stride_s, position_stride_b, position_stride_s, sign,
        HAS_POSITIONS, HALF, BLOCK,
    )  # fmt: skip

    qa, qb = turn(qa, qb, cos, sin)
    turned_a, turned_b = turn(ka, kb, cos, sin)
    turned = k_head < num_kv_turned
    ka, kb = tl.where(turned, turned_a, ka), tl.where(turned, turned_b, kb)

    if IN_PLACE:  # threads may hold copies of each other's values: all must have read before one writes
        tl.debug_barrier()
    _store_halves(q_out, qa, qb, q_mask, HALF, BLOCK)
    _store_halves(k_out, ka, kb, k_mask, HALF, BLOCK)
    if REST:
        _copy_rest(q_rows, q_out, q_mask, 2 * HALF, REST, BLOCK_REST)
        _copy_rest(k_rows, k_out, k_mask, 2 * HALF, REST, BLOCK_REST)


@triton.jit
def _pairs_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr, k_out_ptr,
    num_tokens, seq, num_heads, num_kv_heads, num_kv_turned, num_rows, shares,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    q_out_stride_b, q_out_stride_s, q_out_stride_h, k_out_stride_b, k_out_stride_s, k_out_stride_h,
    table_stride_b, table_stride_s, position_stride_b, position_stride_s, sign,
    HAS_POSITIONS: tl.constexpr, REST: tl.constexpr, IN_PLACE: tl.constexpr,
    HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    batch, place, live, q_head, k_head = _place(num_tokens, seq, shares, BLOCK_T, BLOCK_H, BLOCK_K)
    q_mask, k_mask = live & (q_head < num_heads), live & (k_head < num_kv_heads)
    q_rows = q_ptr + batch * q_stride_b + place * q_stride_s + q_head * q_stride_h
    k_rows = k_ptr + batch * k_stride_b + place * k_stride_s + k_head * k_stride_h
    q_out = q_out_ptr + batch * q_out_stride_b + place * q_out_stride_s + q_head * q_out_stride_h
    k_out = k_out_ptr + batch * k_out_stride_b + place * k_out_stride_s + k_head * k_out_stride_h

    qa, qb = _load_pairs(q_rows, q_mask, HALF, BLOCK_T, BLOCK_H, BLOCK)
    ka, kb = _load_pairs(k_rows, k_mask, HALF, BLOCK_T, BLOCK_K, BLOCK)
    cos, sin = _load_tables(
        cos_ptr, sin_ptr, position_ptr, batch, place, live, num_rows,
    table_stride_b, table_stride_s, position_stride_b, position_stride_s, sign,
        HAS_POSITIONS, HALF, BLOCK,
    )  # fmt: skip

    qa, qb = turn(qa, qb, cos, sin)
    turned_a, turned_b = turn(ka, kb, cos, sin)
    turned = k_head < num_kv_turned
    ka, kb = tl.where(turned, turned_a, ka), tl.where(turned, turned_b, kb)

    if IN_PLACE:  # threads may hold copies of each other's values: all must have read before one writes
        tl.debug_barrier()
    _store_pairs(q_out, qa, qb, q_mask, HALF, BLOCK_T, BLOCK_H, BLOCK)
    _store_pairs(k_out, ka, kb, k_mask, HALF, BLOCK_T, BLOCK_K, BLOCK)
    if REST:
        _copy_rest(q_rows, q_out, q_mask, 2 * HALF, REST, BLOCK_REST)
        _copy_rest(k_rows, k_out, k_mask, 2 * HALF, REST, BLOCK_REST)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """`x` with its last dimension dense."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else dense(x, "an input of rope", "its last dimension has a stride")


def _tables(p: RopeProblem, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Both tables with the same strides, and those of a sequence and a row."""
    cos, sin = _unit(cos), _unit(sin)
    if cos.stride() != sin.stride():
        cos, sin = (dense(t, "tables of rope", "cosines and sines have different strides") for t in (cos, sin))
    return cos, sin, cos.stride(0) if p.table_batch > 1 else 0, cos.stride(-2)


def _launch(
    p: RopeProblem, config: Config, q: torch.Tensor, k: torch.Tensor, outs: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, kv_turned: int, sign: float, in_place: bool,
) -> None:  # fmt: skip
    """Turn q [B, S, H, D] and the first `kv_turned` heads of k [B, S, K, D] into outs. `k` may have no heads."""
    tables = _tables(p, cos, sin)
    half, rest = p.rotary_dim // 2, 0 if in_place else p.head_dim - p.rotary_dim
    num_heads, kv_heads = q.shape[2], k.shape[2]
    position_stride_b = 0 if position_ids is None or position_ids.dim() == 1 or position_ids.shape[0] == 1 else position_ids.stride(0)
    programs = cdiv(p.batch * p.seq, config.tokens) * config.shares if num_heads + kv_heads else 0
    launch(
        _pairs_kernel if p.interleaved else _halves_kernel, (programs,),
        q, k, *tables[:2], q if position_ids is None else position_ids, *outs,
        p.batch * p.seq, p.seq, num_heads, kv_heads, kv_turned, cos.shape[-2], config.shares,
        *q.stride()[:3], *k.stride()[:3], *outs[0].stride()[:3], *outs[1].stride()[:3],
        *tables[2:], position_stride_b, 0 if position_ids is None else position_ids.stride(-1), sign,
        HAS_POSITIONS=position_ids is not None, REST=rest, IN_PLACE=in_place, HALF=half, BLOCK_T=config.tokens,
        BLOCK_H=next_power_of_2(max(cdiv(num_heads, config.shares), 1)),
        BLOCK_K=next_power_of_2(max(cdiv(kv_heads, config.shares), 1)),
        BLOCK=next_power_of_2(half), BLOCK_REST=next_power_of_2(max(rest, 1)), num_warps=config.num_warps,
    )  # fmt: skip


def _turned(
    p: RopeProblem,
    config: Config,
    x: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    sign: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    if k is not None:
        k_out = torch.empty(k.shape, dtype=DTYPE_OF[p.out], device=x.device)
        _launch(p, config, _unit(x), _unit(k), (out, k_out), cos, sin, position_ids, p.kv_heads, sign, False)
        return out, k_out
    # A packed tensor: its queries, as many as a group is wide, and its keys and values as the second group.
    x = _unit(x)
    first = _first_group(p)
    _launch(
        p,
        config,
        x[:, :, :first],
        x[:, :, first:],
        (out[:, :, :first], out[:, :, first:]),
        cos,
        sin,
        position_ids,
        p.num_rotated - first,
        sign,
        False,
    )
    return out, x.new_empty(0)


def _first_group(p: RopeProblem) -> int:
    """How many turned heads of a packed tensor make the first group: the queries, which are those that are neither copied nor followed
    by as many copied heads."""
    return max(0, 2 * p.num_rotated - p.heads)


def launch_fwd(
    p: RopeProblem,
    config: Config,
    x: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and k turned; an empty tensor where there is no k."""
    return _turned(p, config, x, k, cos, sin, position_ids, 1.0)


def launch_bwd(
    p: RopeProblem,
    config: Config,
    dx: torch.Tensor,
    dk: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients turned back."""
    return _turned(p, config, dx, dk, cos, sin, position_ids, -1.0)


def launch_inplace(
    p: RopeProblem, config: Config, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
) -> None:
    """The first heads of x turned where they are, or turned back; the others are not touched."""
    first = _first_group(p)
    groups = x[:, :, :first], x[:, :, first : p.num_rotated]
    _launch(p, config, *groups, groups, cos, sin, position_ids, p.num_rotated - first, -1.0 if p.inverse else 1.0, True)
