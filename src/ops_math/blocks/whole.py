"""A pre-norm attention block as one autograd node: sum and norm, the three products, rotation, attention, last product, sum and norm.

Apart they are five nodes and as many views. A node costs 20 us of the host's time, forward and backward, and a model of many small layers
waits for its host. The operators that run are the same as apart, in the same order; what is saved is the same too.
B batch, S sequence, C stream's width, H heads, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math import features, recompute, settings
from ops_math.blocks import norms, pinned
from ops_math.blocks.attention import Heads, Options
from ops_math.blocks.products import bias_grad, dtypes_of, owners_of, rows, weight_grad
from ops_math.blocks.streams import Unsummed
from ops_math.dispatch import apply, needs_grad, once_differentiable
from ops_math.layout import adjoining, reshaped
from ops_math.ops.attention.op import OP as ATTENTION
from ops_math.ops.attention.op_drawn import default_scale
from ops_math.ops.rms_norm.op import OP as RMS_NORM
from ops_math.ops.rope.op import OP as ROPE
from ops_math.ops.rope.op import check_tables

Tensor = torch.Tensor
_NO_MASKS = (None,) * 5
NORM = "rms_norm"
# Elements of the stream. Above it the device is busy for longer than the host, and what a node saves goes all at once, when it is through.
MOST = 2**23


class _Rule(NamedTuple):
    """The plain values of a block: eps and offset of its norms, head width, rotary width (0 for none), and the attention's rule."""

    opening: tuple[float, float]
    closing: tuple[float, float]
    head_dim: int
    rotary_dim: int
    attention: tuple[Any, ...]


def _heads(t: Tensor, width: int) -> Tensor:
    """[B, S, H D] as [B, S, H, D]."""
    batch, length, columns = t.shape
    return t.view(batch, length, columns // width, width)


class _Block(torch.autograd.Function):
    """total = x + branch, h = norm(total), s = total + attention(h), y = norm(s); without a branch total is x."""

    @staticmethod
    def forward(
        ctx: Any, rule: _Rule, x: Tensor, branch: Tensor | None, w_open: Tensor | None, cos: Tensor | None, sin: Tensor | None,
        position_ids: Tensor | None, w_close: Tensor | None, wo: Tensor, bo: Tensor | None, *affines: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        width = rule.head_dim
        if branch is None:
            total = x
            h, _, rstd_open = RMS_NORM.fwd(x, None, w_open, *rule.opening, x.dtype)
        else:
            h, total, rstd_open = RMS_NORM.fwd(branch, x, w_open, *rule.opening, branch.dtype)
        q, k, v = (_heads(F.linear(h, affines[i], affines[i + 1]), width) for i in (0, 2, 4))  # type: ignore[arg-type]
        if rule.rotary_dim:
            q, k = ROPE.fwd(q, k, cos, sin, position_ids, rule.rotary_dim, q.shape[2], False, q.dtype)
        out, lse = ATTENTION.fwd(q, k, v, *_NO_MASKS, *rule.attention)
        last = F.linear(out.view(-1, wo.shape[1]), wo, bo).view(total.shape)
        y, s, rstd_close = RMS_NORM.fwd(last, total, w_close, *rule.closing, out.dtype)
        ctx.save_for_backward(
            total, w_open, rstd_open, h, q, k, v, out, lse, cos, sin, position_ids, wo, s, w_close, rstd_close, *affines[::2]
        )
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.owners = rule, owners_of((wo, bo, *affines))
        ctx.dtypes = x.dtype, None if branch is None else branch.dtype, last.dtype, out.dtype, dtypes_of((wo, bo, *affines))
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Any, ...]:
        total, w_open, rstd_open, h, q, k, v, out, lse, cos, sin, position_ids, wo, s, w_close, rstd_close, *weights = ctx.saved_tensors
        _, need_x, need_branch, need_open, _, _, _, need_close, need_wo, need_bo, *needed = ctx.needs_input_grad
        rule, (x_dtype, branch_dtype, last_dtype, out_dtype, dtypes) = ctx.rule, ctx.dtypes
        if dy is None and ds is None:
            return (None,) * len(ctx.needs_input_grad)
        dy = torch.zeros_like(s, dtype=out_dtype) if dy is None else dy
        ds, dw_close = RMS_NORM.bwd(dy, ds, s, w_close, rstd_close, *rule.closing, True, need_close)
        dlast_MN = rows(ds.to(last_dtype))
        dwo = weight_grad(dlast_MN, out.view(-1, wo.shape[1]), dtypes[0], ctx.owners[0]) if need_wo else None
        dbo = bias_grad(dlast_MN, dtypes[1]) if need_bo else None
        dout = (dlast_MN @ wo).view(out.shape)
        dq, dk, dv = ATTENTION.bwd(dout, q, k, v, out, lse, *_NO_MASKS, *rule.attention, False, True, True, True)
        del dout
        if rule.rotary_dim:
            dq, dk = ROPE.bwd(dq, dk, cos, sin, position_ids, rule.rotary_dim, dq.shape[2], False, q.dtype)
        upstream = need_x or need_branch or need_open
        dh_MK, grads = _products_backward(h, weights, (dq, dk, dv), dtypes[2:], ctx.owners[1:], needed, upstream)
        dx = dbranch = dw_open = None
        if dh_MK is not None:
            dsum = None if branch_dtype is None else ds.to(total.dtype)
            dtotal, dw_open = RMS_NORM.bwd(
                dh_MK.view(h.shape), dsum, total, w_open, rstd_open, *rule.opening, need_x or need_branch, need_open
            )
            if branch_dtype is None:
                dx = dtotal + ds.to(x_dtype) if need_x else None
            else:
                dx, dbranch = dtotal.to(x_dtype) if need_x else None, dtotal.to(branch_dtype) if need_branch else None
        first = None, dx, dbranch, dw_open if need_open else None, None, None, None, dw_close if need_close else None
        return *first, dwo, dbo, *grads


def _products_backward(
    h: Tensor,
    weights: list[Tensor],
    dys: tuple[Tensor, ...],
    dtypes: tuple[Any, ...],
    owners: tuple[Any, ...],
    needed: list[bool],
    upstream: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of h [M, K] and of each weight and bias in turn."""
    h_MK, dh_MK = rows(h), None
    grads: list[Tensor | None] = []
    for i, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
        dy_MN = reshaped(dy, (-1, weight.shape[0]), "gradient of a product", "its strides make no rows")
        grads.append(weight_grad(dy_MN, h_MK, dtypes[2 * i], owners[i]) if needed[2 * i] else None)
        grads.append(bias_grad(dy_MN, dtypes[2 * i + 1]) if needed[2 * i + 1] else None)
        if upstream:
            dh_MK = dy_MN @ weight if dh_MK is None else dh_MK.addmm_(dy_MN, weight)
    return dh_MK, grads


def _near(weight: Tensor | None, x: Tensor) -> bool:
    """A norm's weight is absent, or as wide as `x` and on its device."""
    return weight is None or (weight.shape == x.shape[-1:] and weight.device == x.device)


def stream(x: Any) -> Tensor:
    """The residual stream of a block's input."""
    return x.x if isinstance(x, Unsummed) else x


def takes(x: Any, options: Any) -> bool:
    """Whether a call may be one node: pre-norm with a norm after it, no dropout, plain tensors of no great size, and nothing that traces,
    casts, looks at single operators, asks for our own products or keeps less. `options` are the keywords that both blocks have."""
    if not options.norm_first or options.next_norm is None or options.dropout_p or options.defer or options.narrow:
        return False
    if torch.compiler.is_compiling() or features.any_autocast() or settings.STATE.debug is not None:
        return False
    if pinned.pinned() or recompute.wanted():
        return False
    if isinstance(x, Unsummed):
        return x.x.dim() == 3 and x.branch.shape == x.x.shape and x.x.numel() <= MOST
    return isinstance(x, Tensor) and x.dim() == 3 and x.numel() <= MOST


def attend(x: Any, norm: Any, next_norm: Any, found: tuple[Heads, Options] | str) -> tuple[Tensor, Tensor] | None:
    """(s, next_norm(s)) of the block, or None where it is none of those that can be one node, or what was `found` of the attention says
    why its module must run as it is. Ask `takes` first. Nothing is noted: who goes the other way notes why."""
    first, branch = stream(x), x.branch if isinstance(x, Unsummed) else None
    opening, closing = norms.read(norm, first), norms.read(next_norm, first)
    if isinstance(found, str) or isinstance(opening, str) or isinstance(closing, str):
        return None
    heads, options = found
    pairs = [t for pair in heads.projections for t in pair]
    (wo, bo), weights = heads.output, pairs[::2]
    if opening.kind != NORM or closing.kind != NORM or not _plain(heads, options, first.shape[-1]) or adjoining(weights) is not None:  # type: ignore[arg-type]
        return None
    if not (_near(opening.weight, first) and _near(closing.weight, first)):
        return None
    if not needs_grad(first, branch, opening.weight) and not (torch.is_grad_enabled() and all(w.requires_grad for w in weights)):  # type: ignore[union-attr]
        return None  # q, k and v are not all to be differentiated
    cos, sin = (None, None) if options.tables is None else options.tables
    rotary, position_ids = 0, None
    if cos is not None and sin is not None:
        position_ids = options.position_ids
        rotary = check_tables("rope", tuple(first.shape[:2]), heads.head_dim, first, cos, sin, position_ids, None)
    right = 0 if (heads.causal if options.causal is None else options.causal) else -1
    attention = default_scale(heads.head_dim, heads.scale), True, -1, right, 0.0, 0, 0, 0.0
    rule = _Rule((opening.eps, opening.weight_offset), (closing.eps, closing.weight_offset), heads.head_dim, rotary, attention)
    y, s = apply(_Block, rule, first, branch, opening.weight, cos, sin, position_ids, closing.weight, wo, bo, *pairs)
    return s, y


def _plain(heads: Heads, options: Options, width: int) -> bool:
    """Three products, causal or not, and nothing else that hides, drops or scales."""
    if len(heads.projections) != 3 or not heads.batch_first or heads.dropout_p or heads.branch_dropout_p or heads.norm is not None:
        return False
    if heads.softcap or heads.window is not None or any(t is not None for t in options[3:]):
        return False
    causal = heads.causal if options.causal is None else options.causal
    q, k, v = (w.shape[0] for w, _ in heads.projections)
    grouped = q > 0 and k == v and k % heads.head_dim == 0 and k > 0 and q % k == 0
    return (causal is True or causal is False) and grouped and heads.output[0].shape == (width, q)
