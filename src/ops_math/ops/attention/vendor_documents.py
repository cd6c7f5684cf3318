"""PyTorch's CPU kernel on packed documents, one document after the other: it knows no ends, and a document is a call of its own.

A causal document with more keys than queries, or fewer, is aligned to the other corner than the kernel's: it is left to `eager`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from ops_math import features
from ops_math.layout import dense
from ops_math.ops.attention import eager
from ops_math.ops.attention.problem import AttentionProblem, gradients

WHY = "an operand of attention", "its last dimension has a stride"
NO_MASKS: Any = (None,) * 5
NAME = "_scaled_dot_product_flash_attention_for_cpu"


def _documents(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[tuple[slice, slice]]:
    """Queries and keys of each document that has a query."""
    ends = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in ends if queries[1] > queries[0]]


def _one(p: AttentionProblem, queries: slice, keys: slice) -> AttentionProblem:
    """The problem of one document."""
    sizes = {"q_len": queries.stop - queries.start, "k_len": keys.stop - keys.start, "documents": -1, "packed_qkv": False}
    return p._replace(batch=1, **sizes)


def _other_corner(one: AttentionProblem) -> bool:
    return one.right == 0 and one.bottom_right and one.q_len != one.k_len


def _heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[S, H, D] as [1, H, S, D]; a copy where the last dimension has a stride, which the kernel does not look at."""
    return tuple((t if t.stride(-1) == 1 else dense(t, *WHY)).unsqueeze(0).transpose(1, 2) for t in tensors)


def launch_fwd(
    p: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, D] contiguous and lse [H, T]."""
    flash, causal = features.aten(NAME), p.right == 0
    out = q.new_empty(q.shape)
    lse = q.new_empty((p.heads, p.q_len), dtype=torch.promote_types(q.dtype, torch.float32))
    for queries, keys in _documents(cu_q, cu_k):
        one = _one(p, queries, keys)
        if not one.k_len:
            out[queries], lse[:, queries] = 0.0, -math.inf
        elif _other_corner(one):
            inputs = (t.unsqueeze(0) for t in (q[queries], k[keys], v[keys]))
            found, sums = eager.launch_fwd(one, None, *inputs, *NO_MASKS)
            out[queries], lse[:, queries] = found[0], sums[0]
        else:
            found, sums = flash(*_heads_first(q[queries], k[keys], v[keys]), 0.0, causal, scale=p.scale)
            out[queries], lse[:, queries] = found[0].transpose(0, 1), sums[0]
    return out, lse


def launch_bwd(
    p: AttentionProblem, widened: bool, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk, dv, or the gradient of one projection, worked out in fp32 where `widened`. Keys that no query sees get zeros."""
    flash, causal = features.aten(NAME + "_backward"), p.right == 0
    results, views = gradients(p, q, k, v)
    needed = (p.need_dq, p.need_dk, p.need_dv)
    for view, need in zip(views[1:], needed[1:], strict=True):
        if need:
            view.zero_()
    for queries, keys in _documents(cu_q, cu_k):
        one = _one(p, queries, keys)
        inputs = (dout[queries], q[queries], k[keys], v[keys], out[queries])
        if not one.k_len:
            found: Any = (torch.zeros_like(q[queries]), None, None)
        elif _other_corner(one):
            wide = (t.unsqueeze(0) for t in (*inputs, lse[:, queries]))
            found = [g[0] for g in eager.launch_bwd(one, None, *wide, *NO_MASKS)]
        else:
            heads = _heads_first(*(t.float() for t in inputs)) if widened else _heads_first(*inputs)
            grads = flash(*heads, lse[:, queries].unsqueeze(0), 0.0, causal, scale=p.scale)
            found = [g[0].transpose(0, 1) for g in grads]
        for view, need, grad, where in zip(views, needed, found, (queries, keys, keys), strict=True):
            if need and grad is not None:
                view[where] = grad
    return results
