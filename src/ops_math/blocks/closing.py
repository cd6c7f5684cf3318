"""The end of a branch as one autograd node: its last product, dropout, the residual sum and the norm that follows.

Node by node, a layer spends more of the host's time on autograd, views and checks than on starting kernels; small models, and large
ones on fast devices, then wait for the host. The operators that run are the same as without this file, in the same order.
M rows, K width of the product's input, N width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math import recompute
from ops_math.blocks import mlp_products, norms, pinned, products
from ops_math.blocks.products import Affine
from ops_math.dispatch import apply, needs_grad, once_differentiable, store_dtype
from ops_math.layout import dense, reshaped
from ops_math.ops.layer_norm import op as layer_norm
from ops_math.ops.rms_norm import op as rms_norm
from ops_math.rng import Rng, draws, state_for

Tensor = torch.Tensor


class Ending(NamedTuple):
    """What follows a branch: s = residual + dropout(branch), y = norm(s).

    `stream` says that y is the residual stream (post-norm), and keeps its dtype; `narrow` that a copy in autocast's is wanted too.
    """

    norm: norms.Norm
    residual: Tensor
    dropout_p: float
    rng: Rng | None
    stream: bool
    narrow: bool = False


class Closed(NamedTuple):
    """y, s, and y in autocast's dtype where that was asked for and is another."""

    y: Tensor
    total: Tensor
    narrow: Tensor | None = None


class _Rule(NamedTuple):
    """The plain values of an ending."""

    kind: str
    eps: float
    offset: float
    dropout_p: float
    bias_in_norm: bool  # whether the norm's kernel adds the bias of the last product, and sums its gradient
    out: torch.dtype
    narrow: torch.dtype | None
    product: torch.dtype | None


def can_close(ending: Ending, width: int) -> bool:
    """Whether a branch whose last product is `width` wide can end so: only the layer norm's kernel drops elements, and only by key."""
    if pinned.pinned():
        return False
    keyed = ending.norm.kind == "layer_norm" and (ending.rng is not None or not draws(ending.residual))
    return width == ending.residual.shape[-1] and (keyed or not ending.dropout_p)


def _rule(ending: Ending, a: Tensor) -> _Rule:
    norm = ending.norm
    product = products.product_dtype(a)
    out = ending.residual.dtype if ending.stream else (product or store_dtype(a))
    copy = ending.narrow and norm.kind == "layer_norm" and product is not None and product != out
    in_norm = norms.adds_bias(norm.kind, a)
    return _Rule(norm.kind, norm.eps, norm.weight_offset, ending.dropout_p, in_norm, out, product if copy else None, product)


def _sum_and_norm(
    rule: _Rule, branch: Tensor, residual: Tensor, weight: Tensor | None, shift: Tensor | None, bias: Tensor | None, state: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], layer_norm.Sum]:
    """y, s and perhaps a narrow copy of y; what the backward needs."""
    shift_dtype, bias_dtype = (branch.dtype if t is None else t.dtype for t in (shift, bias))
    kept = layer_norm.Sum(branch.dtype, shift_dtype, bias_dtype, residual.dtype, rule.out, rule.dropout_p)
    if rule.kind == "rms_norm":
        y, total, rstd = rms_norm.OP.fwd(branch, residual, weight, rule.eps, rule.offset, rule.out)
        return (y, total), (total, weight, None, rstd, None), kept
    y, total, mean, rstd, copy = layer_norm.OP.fwd(
        branch, residual, weight, shift, bias, state, rule.eps, rule.dropout_p, rule.out, rule.narrow
    )
    return (y, total) if rule.narrow is None else (y, total, copy), (total, weight, mean, rstd, state), kept


def _sum_and_norm_backward(
    rule: _Rule, kept: layer_norm.Sum, saved: Sequence[Any], dys: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of branch, residual, the norm's weight and bias, and the product's bias where the norm adds it."""
    dy, dsum, dcopy = (*dys, None)[:3]
    if rule.kind == "layer_norm":
        return layer_norm.sum_backward(kept, saved, dy, dcopy, dsum, needed)
    total, weight, _, rstd, _ = saved
    need_branch, need_residual, need_dw, _, _ = needed
    dy = torch.zeros_like(total, dtype=rule.out) if dy is None else dy
    dtotal, dw = rms_norm.OP.bwd(dy, dsum, total, weight, rstd, rule.eps, rule.offset, need_branch or need_residual, need_dw)
    dbranch = dtotal.to(kept.x) if need_branch else None
    return dbranch, dtotal.to(kept.residual) if need_residual else None, dw if need_dw else None, None, None


class _Product(torch.autograd.Function):
    """s = residual + dropout(a w^T + b), y = norm(s); saves a, w, s and the norm's statistics."""

    @staticmethod
    def forward(
        ctx: Any, rule: _Rule, heads_first: bool, a: Tensor, residual: Tensor, w: Tensor, b: Tensor | None, weight: Tensor | None,
        shift: Tensor | None, state: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.form = a.shape if heads_first else None
        if heads_first:
            a = dense(a.transpose(1, 2), "attention's output", "PyTorch's kernel wrote it heads first")
        flat = reshaped(a, (-1, w.shape[1]), "attention's output", "its heads do not lie side by side")
        narrow, w_cast = products.as_dtype(flat, rule.product), products.cast_weight(w, rule.product)
        b_cast = None if rule.bias_in_norm else products.cast_weight(b, rule.product)
        branch = F.linear(narrow, w_cast, b_cast).view(residual.shape)
        results, saved, ctx.kept = _sum_and_norm(rule, branch, residual, weight, shift, b if rule.bias_in_norm else None, state)
        ctx.save_for_backward(narrow, w_cast, *saved)
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        ctx.dtypes = a.dtype, a.shape, w.dtype, None if b is None else b.dtype
        (ctx.owner,) = products.owners_of((w,))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        a, w, *saved = ctx.saved_tensors
        _, _, need_a, need_residual, need_w, need_b, need_weight, need_shift, _ = ctx.needs_input_grad
        a_dtype, a_shape, w_dtype, b_dtype = ctx.dtypes
        in_norm, needs_branch = ctx.rule.bias_in_norm, need_a or need_w or need_b
        needed = needs_branch, need_residual, need_weight, need_shift, need_b and in_norm
        dbranch, dresidual, dweight, dshift, db = _sum_and_norm_backward(ctx.rule, ctx.kept, saved, dys, needed)
        da = dw = None
        if dbranch is not None:
            dy_MN = dbranch.view(-1, w.shape[0])
            dw = products.weight_grad(dy_MN, a, w_dtype, ctx.owner) if need_w else None
            db = products.bias_grad(dy_MN, b_dtype) if need_b and not in_norm else db
            da = products.as_dtype(dy_MN @ w, a_dtype) if need_a else None
        if da is not None and ctx.form is not None:
            batch, heads, length, width = ctx.form
            da = da.view(batch, length, heads, width).transpose(1, 2)
        elif da is not None:
            da = da.view(a_shape)
        return None, None, da, dresidual, dw, db, dweight, dshift, None


def _closed(norm: norms.Norm, results: Sequence[Tensor]) -> Closed:
    """The results by name; a norm's output may be made again in the backward where that is wanted."""
    closed = Closed(*results)
    if recompute.wanted():
        if norm.kind == "rms_norm":
            rms_norm.offer(closed.y, closed.total, norm.weight, norm.eps, norm.weight_offset)
        else:
            layer_norm.offer((closed.y, *results[2:]), closed.total, norm.weight, norm.bias, norm.eps)
    return closed


def close_product(a: Tensor, last: Affine, ending: Ending, heads_first: bool = False) -> Closed:
    """The end of a branch whose last product is `last` of `a` [..., K], or of `a` [B, H, S, D] where `heads_first`."""
    rule, norm = _rule(ending, a), ending.norm
    state = state_for("residual", ending.rng, a.device) if ending.dropout_p else None
    return _closed(norm, apply(_Product, rule, heads_first, a, ending.residual, *last, norm.weight, norm.bias, state))


class _GeluMlp(torch.autograd.Function):
    """s = residual + dropout(dropout(gelu(x w1^T + b1)) w2^T + b2), y = norm(s); saves x, the first product, s and statistics."""

    @staticmethod
    def forward(
        ctx: Any, rule: _Rule, approximate: str, inner_p: float, inner_state: Tensor | None, x: Tensor, residual: Tensor, w1: Tensor,
        b1: Tensor | None, w2: Tensor, b2: Tensor | None, weight: Tensor | None, shift: Tensor | None, state: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        last = (w2, None if rule.bias_in_norm else b2)
        branch, kept = mlp_products.gelu_mlp_forward(x, rule.product, approximate, inner_state, inner_p, (w1, b1), last)
        results, saved, ctx.kept = _sum_and_norm(rule, branch, residual, weight, shift, b2 if rule.bias_in_norm else None, state)
        ctx.save_for_backward(*kept, *saved)
        ctx.set_materialize_grads(False)
        ctx.rule = rule
        owners = products.owners_of((w1, b1, w2))
        ctx.options = mlp_products.GeluMlp(x.dtype, w1.dtype, w2.dtype, None if b2 is None else b2.dtype, approximate, inner_p, owners)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Any, ...]:
        _, _, _, _, need_x, need_residual, need_w1, need_b1, need_w2, need_b2, need_weight, need_shift, _ = ctx.needs_input_grad
        inside = need_x, need_w1, need_b1, need_w2, need_b2 and not ctx.rule.bias_in_norm
        needed = any(inside) or need_b2, need_residual, need_weight, need_shift, need_b2 and ctx.rule.bias_in_norm
        saved = ctx.saved_tensors
        dbranch, dresidual, dweight, dshift, db2 = _sum_and_norm_backward(ctx.rule, ctx.kept, saved[6:], dys, needed)
        dx = dw1 = db1 = dw2 = None
        if dbranch is not None:
            dx, dw1, db1, dw2, own = mlp_products.gelu_mlp_backward(ctx.options, saved[:6], dbranch, inside)
            db2 = db2 if own is None else own
        return None, None, None, None, dx, dresidual, dw1, db1, dw2, db2, dweight, dshift, None


def close_gelu_mlp(
    x: Tensor, first: Affine, last: Affine, approximate: str, inner_state: Tensor | None, inner_p: float, ending: Ending
) -> Closed:
    """The end of the branch `last(dropout(gelu(first(x))))` of `x` [..., K]."""
    rule, norm = _rule(ending, x), ending.norm
    state = state_for("residual", ending.rng, x.device) if ending.dropout_p else None
    values = *first, *last, norm.weight, norm.bias, state
    return _closed(norm, apply(_GeluMlp, rule, approximate, inner_p, inner_state, x, ending.residual, *values))


def records(ending: Ending, *tensors: Tensor | None) -> bool:
    """Whether autograd records this end of a branch; without it the operators are called one by one."""
    return needs_grad(ending.residual, ending.norm.weight, ending.norm.bias, *tensors)
