"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

Scores never exist whole: blocks of batch, key heads and query rows of at most BLOCK_SCORES scores, over the keys that a block can see.
B batch, K key heads, G query heads a key head, S query and T key positions, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ops_math import rng as random
from ops_math.ops.attention.problem import AttentionProblem, cost, gradients
from ops_math.ops.attention.reference import MASKED_BELOW
from ops_math.schedule.levels import ALIGNMENT
from ops_math.spec import Device, compute_dtype

BLOCK_SCORES = 2**19  # 2 MiB of fp32 scores


class _Heads(NamedTuple):
    """A block of batch rows and key heads of one sequence: query rows [q0, q1) and keys [k0, k1) of the tensors, `rows` at a time."""

    batch: slice
    heads: slice
    q0: int
    q1: int
    k0: int
    k1: int
    rows: int


class _Rows(NamedTuple):
    """Query rows [start, stop) of a sequence and the keys [low, high) that they can see, counted within the sequence."""

    start: int
    stop: int
    low: int
    high: int
    shift: int


class _Masks(NamedTuple):
    """What hides or drops scores: a mask [B, K, G, S, T], keys to keep [B, T], the random state."""

    mask: torch.Tensor | None
    keep: torch.Tensor | None
    state: torch.Tensor | None


def invariant_configs(p: AttentionProblem, device: Device, phase: str) -> tuple[str, ...]:
    """`apart`: one head of one sequence at a time, so that no product has a shape that others have a share in."""
    return ("apart",)


def predict_us(p: AttentionProblem, device: Device, phase: str) -> float:
    """A quarter of the products' rate, as seen on two CPU cores, and a price for each block's calls."""
    blocks = max(1, p.batch * p.heads * p.q_len * p.k_len // BLOCK_SCORES, p.documents)
    calls = (12 if phase == "fwd" else 25) * blocks
    return cost(p, phase).total_flops / (device.product_tflops * 0.25e6) + calls * device.launch_us


def launch_fwd(
    p: AttentionProblem, config: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    keep: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out, contiguous as q is shaped, and lse [B, H, S] or [H, S]."""
    wide, masks = compute_dtype(q.dtype), _Masks(_by_key_head(p, mask), keep, state)
    out, lse = q.new_empty(q.shape), q.new_empty((*q.shape[:-3], p.heads, q.shape[-3]), dtype=wide)
    q_BKGSD, out_BKGSD, k_BKTD, v_BKTD = _by_group(p, q), _by_group(p, out), _by_head(k), _by_head(v)
    lse_BKGS = _by_key_head(p, lse if lse.dim() == 3 else lse[None])
    for block in _blocks(p, cu_q, cu_k, config == "apart"):
        keys, values = _keys(block, k_BKTD, keep, wide), _keys(block, v_BKTD, keep, wide)
        for rows in _row_blocks(p, block):
            here = (block.batch, block.heads, slice(None), slice(block.q0 + rows.start, block.q0 + rows.stop))
            scores, _ = _scores(p, block, rows, _dense(q_BKGSD[here], wide), keys, masks)
            top = scores.amax(-1, keepdim=True) if rows.high > rows.low else scores.new_full((*scores.shape[:-1], 1), -math.inf)
            top.masked_fill_(top == -math.inf, 0.0)
            e = scores.sub_(top).exp_()
            total = e.sum(-1, keepdim=True)
            lse_BKGS[here] = (total.log() + top)[..., 0]
            total.masked_fill_(total == 0, 1.0).mul_(1 - random.honoured(p.dropout_p))
            kept = _dropped(p, block, rows, masks, e)
            out_BKGSD[here] = _product(_rounded(kept, q.dtype), values[:, :, rows.low : rows.high]).div_(total).to(q.dtype)
    return out, lse


def launch_bwd(
    p: AttentionProblem, config: str | None, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None, keep: torch.Tensor | None, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dS = P (dP - delta), dP = drop(dout v^T), delta = rowsum(dout out); dq = scale dS k, dk = scale dS^T q, dv = drop(P)^T dout."""
    wide, masks = compute_dtype(q.dtype), _Masks(_by_key_head(p, mask), keep, state)
    results, (dq, dk, dv) = gradients(p, q, k, v)
    q_BKGSD, out_BKGSD, dout_BKGSD = _by_group(p, q), _by_group(p, out), _by_group(p, dout)
    k_BKTD, v_BKTD = _by_head(k), _by_head(v)
    lse_BKGS = _by_key_head(p, lse if lse.dim() == 3 else lse[None])
    for block in _blocks(p, cu_q, cu_k, config == "apart"):
        keys, values = _keys(block, k_BKTD, keep, wide), _keys(block, v_BKTD, keep, wide)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in _row_blocks(p, block):
            here = (block.batch, block.heads, slice(None), slice(block.q0 + rows.start, block.q0 + rows.stop))
            query, grad, seen = _dense(q_BKGSD[here], wide), _dense(dout_BKGSD[here], wide), slice(rows.low, rows.high)
            scores, slope = _scores(p, block, rows, query, keys, masks)
            known = lse_BKGS[here][..., None]
            prob = scores.sub_(known.masked_fill(known == -math.inf, math.inf)).exp_()
            dprob = _product(grad, values[:, :, seen].transpose(-1, -2))
            delta = (grad * out_BKGSD[here]).sum(-1, keepdim=True)
            kept = _dropped(p, block, rows, masks, prob, dprob)
            if p.need_dv:
                dvalues[:, :, seen] += _transposed_product(_rounded(kept, q.dtype), grad)
            ds = dprob.sub_(delta).mul_(prob)
            ds = _rounded(ds if slope is None else ds.mul_(slope), q.dtype)
            if p.need_dq:
                _by_group(p, dq)[here] = _product(ds, keys[:, :, seen]).mul_(p.scale).to(q.dtype)
            if p.need_dk:
                dkeys[:, :, seen] += _transposed_product(ds, query)
        into = (block.batch, block.heads, slice(block.k0, block.k1))
        if p.need_dk:
            _by_head(dk)[into] = dkeys.mul_(p.scale).to(q.dtype)
        if p.need_dv:
            _by_head(dv)[into] = dvalues.div_(1 - random.honoured(p.dropout_p)).to(q.dtype)
    return results


def _by_group(p: AttentionProblem, x: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D] or [S, H, D] as a view [B, K, G, S, D]."""
    return (x if x.dim() == 4 else x[None]).unflatten(2, (p.kv_heads, p.group)).permute(0, 2, 3, 1, 4)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[B, T, K, D] or [T, K, D] as a view [B, K, T, D]."""
    return (x if x.dim() == 4 else x[None]).transpose(1, 2)


def _by_key_head(p: AttentionProblem, x: torch.Tensor | None) -> torch.Tensor | None:
    """[B, H, ...] as a view [B, K, G, ...]."""
    return None if x is None else x.unflatten(1, (p.kv_heads, p.group))


def _sequences(p: AttentionProblem, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> list[tuple[int, int, int, int]]:
    if cu_q is None or cu_k is None:
        return [(0, p.q_len, 0, p.k_len)]
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    return list(zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False))


def _blocks(p: AttentionProblem, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, apart: bool) -> Iterator[_Heads]:
    """Blocks of batch rows and key heads: whole batch rows where several fit, else heads of one, else rows of one head; `apart`: a head
    of a row each."""
    for q0, q1, k0, k1 in _sequences(p, cu_q, cu_k):
        a_row = max(1, p.group * (k1 - k0))
        rows = min(max(q1 - q0, 1), max(BLOCK_SCORES // a_row, 16))
        heads = 1 if apart else min(max(BLOCK_SCORES // (a_row * rows), 1), p.kv_heads)
        batch = max(BLOCK_SCORES // (a_row * rows * heads), 1) if heads == p.kv_heads and not apart else 1
        for b in range(0, p.batch, batch):
            for h in range(0, p.kv_heads, heads):
                yield _Heads(slice(b, b + batch), slice(h, h + heads), q0, q1, k0, k1, rows)


def _row_blocks(p: AttentionProblem, block: _Heads) -> Iterator[_Rows]:
    queries, keys = block.q1 - block.q0, block.k1 - block.k0
    shift = keys - queries if p.bottom_right else 0
    for start in range(0, queries, block.rows):
        stop = min(start + block.rows, queries)
        low = min(max(start + shift - p.left, 0), keys) if p.left >= 0 else 0
        high = max(min(stop + shift + p.right, keys), low) if p.right >= 0 else keys
        yield _Rows(start, stop, low, high, shift)


def _dense(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the dtype of arithmetic, contiguous and aligned: a product's order of sums may depend on strides and addresses."""
    made = x.to(dtype).contiguous()
    return made if made.data_ptr() % ALIGNMENT == 0 else made.clone()


def _keys(block: _Heads, x_BKTD: torch.Tensor, keep: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of a block, dense, in the dtype of arithmetic; padding as zeros, since it may hold anything, NaN too."""
    x = _dense(x_BKTD[block.batch, block.heads, block.k0 : block.k1], dtype)
    return x if keep is None else x.masked_fill(~keep[block.batch, None, :, None], 0.0)


def _scores(
    p: AttentionProblem, block: _Heads, rows: _Rows, query: torch.Tensor, keys: torch.Tensor, masks: _Masks
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [b, h, G, rows, keys], -inf where hidden, and the slope of the soft cap where there is one."""
    seen = slice(rows.low, rows.high)
    s = _product(query, keys[:, :, seen].transpose(-1, -2)).mul_(p.scale)
    slope = None
    if p.softcap:
        s.div_(p.softcap).tanh_()
        slope = 1.0 - s * s
        s.mul_(p.softcap)
    allowed = _visible(p, rows, s.device)
    if allowed is not None:
        s.masked_fill_(~allowed, -math.inf)
    if masks.keep is not None:
        s.masked_fill_(~masks.keep[block.batch, None, None, None, seen], -math.inf)
    if masks.mask is not None:
        mask = masks.mask[block.batch, block.heads, :, rows.start : rows.stop, seen]
        if mask.dtype == torch.bool:
            s.masked_fill_(~mask, -math.inf)
        else:
            s.add_(mask).masked_fill_(mask <= MASKED_BELOW, -math.inf)
    return s, slope


def _visible(p: AttentionProblem, rows: _Rows, device: torch.device) -> torch.Tensor | None:
    """bool [rows, keys] where causal or window hide some of the block, else None."""
    first, last = rows.start + rows.shift, rows.stop - 1 + rows.shift
    hides_left = p.left >= 0 and last - p.left > rows.low
    hides_right = p.right >= 0 and first + p.right < rows.high - 1
    if not (hides_left or hides_right):
        return None
    at, keys = torch.arange(first, last + 1, device=device)[:, None], torch.arange(rows.low, rows.high, device=device)
    right = keys <= at + p.right if hides_right else None
    left = keys >= at - p.left if hides_left else None
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _dropped(
    p: AttentionProblem, block: _Heads, rows: _Rows, masks: _Masks, prob: torch.Tensor, dprob: torch.Tensor | None = None
) -> torch.Tensor:
    """Probabilities with dropped ones zero, not scaled up (the caller does that after the sum); dprob is dropped and scaled in place."""
    if masks.state is None:
        return prob
    device = prob.device
    b = torch.arange(p.batch, device=device)[block.batch, None, None, None]
    h = torch.arange(p.heads, device=device).view(1, p.kv_heads, p.group, 1)[:, block.heads]
    row = b * p.q_len + block.q0 + torch.arange(rows.start, rows.stop, device=device)
    keep = random.keep_mask(masks.state, row, h, rows.high, p.dropout_p)[..., rows.low :]
    if dprob is not None:
        dprob.mul_(keep).div_(1 - random.honoured(p.dropout_p))
    return prob * keep


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An operand of a product, rounded to the storage dtype as a kernel must."""
    return x if x.dtype == dtype else x.to(dtype).to(x.dtype)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[b, h, G, rows, n] times [b, h, n, m]: the heads of a group share the right side."""
    return torch.matmul(a.flatten(2, 3), b).unflatten(2, a.shape[2:4])


def _transposed_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Summed over the group: [b, h, G, rows, n]^T times [b, h, G, rows, m]."""
    return torch.matmul(a.flatten(2, 3).transpose(-1, -2), b.flatten(2, 3))
