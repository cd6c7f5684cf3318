"""Matrix products of a block, with only what the backward needs kept, once.

M rows, K input width, N output width. Products that share an input save it once and sum its gradient in the products themselves.
The activation of an MLP is not saved: the backward computes it again together with its gradient, in one pass over its inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ops_math import features
from ops_math.dispatch import apply, needs_grad, store_dtype
from ops_math.ops.dropout.op import OP as DROPOUT
from ops_math.ops.glu.op import OP as GLU
from ops_math.ops.glu.op_gelu import OP as GELU

FEW = 4  # tensors; fewer are cast sooner one by one: 10 us each on the host of an H200, against 29 us for a buffer and one launch
Affine = tuple[torch.Tensor, torch.Tensor | None]


def product_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype to which autocast would bring the operands, or None where it is off."""
    dtype = store_dtype(x)
    return dtype if torch.is_autocast_enabled(x.device.type) else None


def _as(t: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return t if dtype is None or t.dtype == dtype else t.to(dtype)


def _cast_together(tensors: list[Any], dtype: Any) -> list[torch.Tensor]:
    """The tensors in another dtype, one after the other in one buffer, by one launch."""
    sizes = [t.numel() for t in tensors]
    parts = tensors[0].new_empty(sum(sizes), dtype=dtype).split(sizes)
    views = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(views, tensors)
    return views


def _cast(affines: tuple[torch.Tensor | None, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Weights and biases in the products' dtype: under autocast one buffer and one launch for all of them, kept for the backward."""
    narrow = [t for t in affines if t is not None and dtype is not None and t.dtype != dtype]
    if len(narrow) < FEW or not features.copies_together(narrow[0].device):
        return tuple(None if t is None else _as(t, dtype) for t in affines)
    fresh = iter(_cast_together(narrow, dtype))
    return tuple(next(fresh) if t is not None and t.dtype != dtype else t for t in affines)


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1])


def _weight_grad(dy_MN: torch.Tensor, x_MK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dy^T x; an fp32 weight's gradient comes out of the product in fp32, unrounded, where the device can."""
    if dtype == torch.float32 != dy_MN.dtype and not torch.compiler.is_compiling() and features.widens("mm", dy_MN.device):
        return features.aten("mm", "dtype")(dy_MN.t(), x_MK, dtype)
    return (dy_MN.t() @ x_MK).to(dtype)


def _bias_grad(dy_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dy_MN.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def _dtypes(affines: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple(None if t is None else t.dtype for t in affines)


class _Products(torch.autograd.Function):
    """y_i = x w_i^T + b_i for several i; saves x and the weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None, *affines: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        wide, cast = _as(x, dtype), _cast(affines, dtype)
        ctx.save_for_backward(wide, *cast[::2])
        ctx.dtypes, ctx.x_dtype = _dtypes(affines), x.dtype
        return tuple(F.linear(wide, w, b) for w, b in zip(cast[::2], cast[1::2], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        x_MK = _rows(x)
        dx_MK = None
        grads: list[torch.Tensor | None] = []
        for i, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
            dy_MN = _rows(dy)
            grads.append(_weight_grad(dy_MN, x_MK, ctx.dtypes[2 * i]) if ctx.needs_input_grad[2 + 2 * i] else None)
            grads.append(_bias_grad(dy_MN, ctx.dtypes[2 * i + 1]) if ctx.needs_input_grad[3 + 2 * i] else None)
            if ctx.needs_input_grad[0]:
                dx_MK = dy_MN @ weight if dx_MK is None else dx_MK.addmm_(dy_MN, weight)
        dx = None if dx_MK is None else dx_MK.view(x.shape).to(ctx.x_dtype)
        return dx, None, *grads


def products(x: torch.Tensor, affines: tuple[Affine, ...]) -> tuple[torch.Tensor, ...]:
    """The products of `x` [..., K] with several weights [N_i, K], biases added: [..., N_i] each."""
    flat = [t for pair in affines for t in pair]
    if needs_grad(x, *flat):
        return apply(_Products, x, product_dtype(x), *flat)
    return tuple(F.linear(x, w, b) for w, b in affines)


class _PackedProduct(torch.autograd.Function):
    """y = x [w_1; w_2; ...]^T + [b_1; b_2; ...] where the weights are cast anyway, into one packed buffer; saves x and that buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, *affines: torch.Tensor | None) -> torch.Tensor:
        wide, weights, biases = _as(x, dtype), affines[::2], [b for b in affines[1::2] if b is not None]
        cast = _cast_together([*weights, *biases], dtype)
        rows = [w.shape[0] for w in cast[: len(weights)]]
        packed = cast[0].as_strided((sum(rows), x.shape[-1]), (x.shape[-1], 1))
        bias = cast[len(weights)].as_strided((sum(rows),), (1,)) if biases else None
        ctx.save_for_backward(wide, packed)
        ctx.dtypes, ctx.x_dtype, ctx.rows = _dtypes(affines), x.dtype, rows
        return F.linear(wide, packed, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, packed = ctx.saved_tensors
        need_x, _, *needed = ctx.needs_input_grad
        dy_MN = _rows(dy)
        dx = (dy_MN @ packed).view(x.shape).to(ctx.x_dtype) if need_x else None
        dws = _weight_grad(dy_MN, _rows(x), ctx.dtypes[0]).split(ctx.rows) if any(needed[::2]) else ()
        dbs = _bias_grad(dy_MN, ctx.dtypes[1]).split(ctx.rows) if any(needed[1::2]) else ()
        grads = [(dws, dbs)[i % 2][i // 2] if need else None for i, need in enumerate(needed)]
        return dx, None, *grads


def packs(x: torch.Tensor, affines: tuple[Affine, ...]) -> bool:
    """Whether these products can be one without a copy more: their fp32 weights are cast for autocast at this call anyway."""
    dtype = product_dtype(x)
    if dtype is None or not features.copies_together(x.device) or len({b is None for _, b in affines}) > 1:
        return False
    return all(t.dtype == torch.float32 and t.dtype != dtype and t.requires_grad for pair in affines for t in pair if t is not None)


def packed_product(x: torch.Tensor, affines: tuple[Affine, ...]) -> tuple[torch.Tensor, ...]:
    """As `products`, computed as one; the results are views of one tensor. Ask `packs` first."""
    flat = [t for pair in affines for t in pair]
    y = apply(_PackedProduct, x, product_dtype(x), *flat) if needs_grad(x, *flat) else None
    if y is None:
        return products(x, affines)
    return y.split([w.shape[0] for w, _ in affines], -1)


class _GatedMlp(torch.autograd.Function):
    """out = (act(x wg^T) * (x wu^T)) wd^T; saves x, gate and up.

    On a CPU also act(gate), as PyTorch does: a GPU computes it again in registers, a CPU in a pass of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None, activation: str, *affines: torch.Tensor | None) -> torch.Tensor:
        wide = _as(x, dtype)
        wg, bg, wu, bu, wd, bd = _cast(affines, dtype)
        gate, up = F.linear(wide, wg, bg), F.linear(wide, wu, bu)
        keep = x.device.type == "cpu"
        act, kept = GLU.fwd(gate, up, activation, "", keep, gate.dtype)
        ctx.save_for_backward(wide, gate, up, kept if keep else None, wg, wu, wd)
        ctx.dtypes, ctx.x_dtype, ctx.activation = _dtypes(affines), x.dtype, activation
        return F.linear(act, wd, bd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, gate, up, kept, wg, wu, wd = ctx.saved_tensors
        need_x, _, _, need_wg, need_bg, need_wu, need_bu, need_wd, need_bd = ctx.needs_input_grad
        dtypes = ctx.dtypes
        x_MK, dy_MN = _rows(x), _rows(dy)
        dact = (dy_MN @ wd).view(gate.shape)
        dgate, dup, act = GLU.bwd(dact, gate, up, kept, ctx.activation, "", True, True, need_wd)
        del dact
        dgate, dup = _rows(dgate), _rows(dup)
        dwd = _weight_grad(dy_MN, _rows(act), dtypes[4]) if need_wd else None
        dx = (dgate @ wg).addmm_(dup, wu).view(x.shape).to(ctx.x_dtype) if need_x else None
        dwg = _weight_grad(dgate, x_MK, dtypes[0]) if need_wg else None
        dwu = _weight_grad(dup, x_MK, dtypes[2]) if need_wu else None
        dbg = _bias_grad(dgate, dtypes[1]) if need_bg else None
        dbu = _bias_grad(dup, dtypes[3]) if need_bu else None
        return dx, None, None, dwg, dbg, dwu, dbu, dwd, _bias_grad(dy_MN, dtypes[5]) if need_bd else None


def gated_mlp(x: torch.Tensor, gate: Affine, up: Affine, down: Affine, activation: str) -> torch.Tensor:
    """`down(act(gate(x)) * up(x))` of `x` [..., K]; `activation` is silu, gelu or gelu_tanh."""
    flat = (*gate, *up, *down)
    if needs_grad(x, *flat):
        return apply(_GatedMlp, x, product_dtype(x), activation, *flat)
    g, u = F.linear(x, *gate), F.linear(x, *up)
    return F.linear(GLU.fwd(g, u, activation, "", False, g.dtype)[0], *down)


def _dropped(act: torch.Tensor, state: torch.Tensor | None, p: float) -> torch.Tensor:
    return act if state is None else DROPOUT.fwd(act, state, p)


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
        *affines: torch.Tensor | None,
    ) -> torch.Tensor:
        wide, b1 = _as(x, dtype), affines[1]  # gelu adds its bias in fp32, so that one stays as it is
        w1, w2, b2 = _cast((affines[0], *affines[2:]), dtype)
        h = F.linear(wide, w1)
        ctx.save_for_backward(wide, h, state, w1, b1, w2)
        ctx.dtypes, ctx.x_dtype, ctx.approximate, ctx.p = _dtypes(affines), x.dtype, approximate, p
        act = _dropped(GELU.fwd(h, b1, approximate, h.dtype), state, p)
        return F.linear(act, w2, b2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, h, state, w1, b1, w2 = ctx.saved_tensors
        need_x, _, _, _, _, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad
        x_MK, dy_MN = _rows(x), _rows(dy)
        dact = (dy_MN @ w2).view(h.shape)
        dact = dact if state is None else DROPOUT.bwd(dact, state, ctx.p)
        dh, db1, act = GELU.bwd(dact, h, b1, ctx.approximate, True, need_b1, need_w2)
        del dact
        dh = _rows(dh)
        dw2 = _weight_grad(dy_MN, _rows(_dropped(act, state, ctx.p)), ctx.dtypes[2]) if need_w2 else None
        dx = (dh @ w1).view(x.shape).to(ctx.x_dtype) if need_x else None
        dw1 = _weight_grad(dh, x_MK, ctx.dtypes[0]) if need_w1 else None
        return dx, None, None, None, None, dw1, db1 if need_b1 else None, dw2, _bias_grad(dy_MN, ctx.dtypes[3]) if need_b2 else None


def gelu_mlp(
    x: torch.Tensor, first: Affine, second: Affine, approximate: str, state: torch.Tensor | None = None, p: float = 0.0
) -> torch.Tensor:
    """`second(dropout(gelu(first(x))))` of `x` [..., K]; `state` is that of the dropout's random numbers, None for no dropout."""
    flat = (*first, *second)
    if needs_grad(x, *flat):
        return apply(_GeluMlp, x, product_dtype(x), approximate, state, p, *flat)
    h = F.linear(x, first[0])
    return F.linear(_dropped(GELU.fwd(h, first[1], approximate, h.dtype), state, p), *second)
