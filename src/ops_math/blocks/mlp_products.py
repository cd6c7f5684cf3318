"""The products of an MLP with what stands between them.

M rows, K input width, N inner width. What the last product multiplies is not saved: the backward computes it again together with the
gradients, in one pass over its inputs. A CPU saves that of a gated unit, which stands in memory anyway: there the pass is what costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math.blocks import pinned
from ops_math.blocks.packed import packed_backward, packed_forward, packs
from ops_math.blocks.products import Affine, as_dtype, bias_grad, cast, cast_weight, dtypes_of, owners_of, product_dtype, rows, weight_grad
from ops_math.dispatch import apply, needs_grad, once_differentiable
from ops_math.ops.dropout.op import OP as DROPOUT
from ops_math.ops.glu.op import OP as GLU
from ops_math.ops.glu.op_gelu import OP as GELU


class _GatedMlp(torch.autograd.Function):
    """out = (act(x wg^T) * (x wu^T)) wd^T; saves x, gate and up, on a CPU also their product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None, activation: str, *affines: torch.Tensor | None) -> torch.Tensor:
        wide = as_dtype(x, dtype)
        wg, bg, wu, bu, wd, bd = cast(affines, dtype)
        gate, up = F.linear(wide, wg, bg), F.linear(wide, wu, bu)
        act, _ = GLU.fwd(gate, up, activation, "", False, gate.dtype)
        ctx.save_for_backward(wide, gate, up, act if x.device.type == "cpu" else None, wg, wu, wd)
        ctx.dtypes, ctx.x_dtype, ctx.activation, ctx.owners = dtypes_of(affines), x.dtype, activation, owners_of(affines)
        return F.linear(act, wd, bd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, gate, up, kept, wg, wu, wd = ctx.saved_tensors
        need_x, _, _, need_wg, need_bg, need_wu, need_bu, need_wd, need_bd = ctx.needs_input_grad
        dtypes = ctx.dtypes
        x_MK, dy_MN = rows(x), rows(dy)
        dact = (dy_MN @ wd).view(gate.shape)
        dgate, dup, act = GLU.bwd(dact, gate, up, None, ctx.activation, "", True, True, need_wd and kept is None)
        act = act if kept is None else kept
        del dact, kept
        dgate, dup = rows(dgate), rows(dup)
        dwd = weight_grad(dy_MN, rows(act), dtypes[4], ctx.owners[2]) if need_wd else None
        dx = (dgate @ wg).addmm_(dup, wu).view(x.shape).to(ctx.x_dtype) if need_x else None
        dwg = weight_grad(dgate, x_MK, dtypes[0], ctx.owners[0]) if need_wg else None
        dwu = weight_grad(dup, x_MK, dtypes[2], ctx.owners[1]) if need_wu else None
        dbg = bias_grad(dgate, dtypes[1]) if need_bg else None
        dbu = bias_grad(dup, dtypes[3]) if need_bu else None
        return dx, None, None, dwg, dbg, dwu, dbu, dwd, bias_grad(dy_MN, dtypes[5]) if need_bd else None


class _PackedGatedMlp(torch.autograd.Function):
    """As `_GatedMlp` with gate and up as one product, whose gradient is one tensor too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None, activation: str, *affines: torch.Tensor | None) -> torch.Tensor:
        gate_up, saved, ctx.options = packed_forward(x, dtype, affines[:4])
        wd, bd = (cast_weight(t, dtype) for t in affines[4:])
        act, _ = GLU.fwd(gate_up, None, activation, "halves", False, gate_up.dtype)
        ctx.save_for_backward(gate_up, act if x.device.type == "cpu" else None, wd, *saved)
        ctx.down, ctx.activation, ctx.owners = dtypes_of(affines[4:]), activation, owners_of(affines[4:])
        return F.linear(act, wd, bd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        gate_up, kept, wd, *saved = ctx.saved_tensors
        need_x, _, _, need_wg, need_bg, need_wu, need_bu, need_wd, need_bd = ctx.needs_input_grad
        dy_MN = rows(dy)
        dact = (dy_MN @ wd).view(*gate_up.shape[:-1], wd.shape[1])
        dgate_up, _, act = GLU.bwd(dact, gate_up, None, None, ctx.activation, "halves", True, False, need_wd and kept is None)
        act = act if kept is None else kept
        del dact, kept
        dwd = weight_grad(dy_MN, rows(act), ctx.down[0], ctx.owners[0]) if need_wd else None
        dx, *grads = packed_backward(ctx.options, saved, rows(dgate_up), (need_x, need_wg, need_bg, need_wu, need_bu))
        return dx, None, None, *grads, dwd, bias_grad(dy_MN, ctx.down[1]) if need_bd else None


def gated_mlp(x: torch.Tensor, gate: Affine, up: Affine, down: Affine, activation: str) -> torch.Tensor:
    """`down(act(gate(x)) * up(x))` of `x` [..., K]; `activation` is silu, gelu or gelu_tanh."""
    if pinned.pinned():
        return pinned.gated_mlp(x, gate, up, down, activation)
    flat = (*gate, *up, *down)
    if needs_grad(x, *flat):
        return apply(_PackedGatedMlp if packs(x, (gate, up)) else _GatedMlp, x, product_dtype(x), activation, *flat)
    g, u = F.linear(x, *gate), F.linear(x, *up)
    return F.linear(GLU.fwd(g, u, activation, "", False, g.dtype)[0], *down)


def _dropped(act: torch.Tensor, state: torch.Tensor | None, p: float) -> torch.Tensor:
    return act if state is None else DROPOUT.fwd(act, state, p)


class GeluMlp(NamedTuple):
    """What the backward of `gelu_mlp` needs besides tensors: dtypes of x, of the weights and of the last bias, the call's options, and the
    weights themselves."""

    x_dtype: torch.dtype
    w1_dtype: torch.dtype
    w2_dtype: torch.dtype
    b2_dtype: torch.dtype | None
    approximate: str
    p: float
    owners: tuple[Any, ...] = (None, None)


def gelu_mlp_forward(
    x: torch.Tensor, dtype: torch.dtype | None, approximate: str, state: torch.Tensor | None, p: float, first: Affine, last: Affine
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The branch, and what its backward needs: x, the first product without its bias, the mask's state, w1, b1, w2."""
    wide, b1 = as_dtype(x, dtype), first[1]  # gelu adds its bias in fp32, so that one stays as it is
    w1, w2, b2 = cast((first[0], *last), dtype)
    h = F.linear(wide, w1)
    act = _dropped(GELU.fwd(h, b1, approximate, h.dtype), state, p)
    return F.linear(act, w2, b2), (wide, h, state, w1, b1, w2)


def gelu_mlp_backward(
    options: GeluMlp, saved: tuple[Any, ...], dy: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w1, b1, w2 and b2."""
    x, h, state, w1, b1, w2 = saved
    need_x, need_w1, need_b1, need_w2, need_b2 = needed
    x_MK, dy_MN = rows(x), rows(dy)
    dact = (dy_MN @ w2).view(h.shape)
    dact = dact if state is None else DROPOUT.bwd(dact, state, options.p)
    dh, db1, act = GELU.bwd(dact, h, b1, options.approximate, True, need_b1, need_w2)
    del dact
    dh = rows(dh)
    dw2 = weight_grad(dy_MN, rows(_dropped(act, state, options.p)), options.w2_dtype, options.owners[1]) if need_w2 else None
    dx = as_dtype((dh @ w1).view(x.shape), options.x_dtype) if need_x else None
    dw1 = weight_grad(dh, x_MK, options.w1_dtype, options.owners[0]) if need_w1 else None
    db2 = bias_grad(dy_MN, options.b2_dtype) if need_b2 and options.b2_dtype is not None else None
    return dx, dw1, db1 if need_b1 else None, dw2, db2


class _GeluMlp(torch.autograd.Function):
    """out = dropout(gelu(x w1^T + b1)) w2^T + b2; saves x and the first product, without its bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dtype: torch.dtype | None,
        approximate: str,
        state: torch.Tensor | None,
        p: float,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
    ) -> torch.Tensor:
        out, saved = gelu_mlp_forward(x, dtype, approximate, state, p, (w1, b1), (w2, b2))
        ctx.save_for_backward(*saved)
        owners = owners_of((w1, b1, w2))
        ctx.options = GeluMlp(x.dtype, w1.dtype, w2.dtype, None if b2 is None else b2.dtype, approximate, p, owners)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        need_x, _, _, _, _, *affines = ctx.needs_input_grad
        dx, *grads = gelu_mlp_backward(ctx.options, ctx.saved_tensors, dy, (need_x, *affines))
        return dx, None, None, None, None, *grads


def gelu_mlp(
    x: torch.Tensor, first: Affine, second: Affine, approximate: str, state: torch.Tensor | None = None, p: float = 0.0
) -> torch.Tensor:
    """`second(dropout(gelu(first(x))))` of `x` [..., K]; `state` is that of the dropout's random numbers, None for no dropout."""
    if pinned.pinned():
        return pinned.gelu_mlp(x, first, second, approximate, state, p)
    flat = (*first, *second)
    if needs_grad(x, *flat):
        return apply(_GeluMlp, x, product_dtype(x), approximate, state, p, *flat)
    h = F.linear(x, first[0])
    return F.linear(_dropped(GELU.fwd(h, first[1], approximate, h.dtype), state, p), *second)
