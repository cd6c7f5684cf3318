"""Matrix products of a block, with only what the backward needs kept, once.

M rows, K input width, N output width. Products that share an input save it once and sum its gradient in the products themselves.
The activation of an MLP is not saved: the backward computes it again together with its gradient, in one pass over its inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ops_math import features
from ops_math.blocks import casts
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


def as_dtype(t: Any, dtype: torch.dtype | None) -> Any:
    """The tensor in a dtype: itself where there is none, or nothing to do."""
    return t if t is None or dtype is None or t.dtype == dtype else t.to(dtype)


def _cast_together(tensors: list[Any], dtype: Any) -> list[torch.Tensor]:
    """The tensors in another dtype, one after the other in one buffer, by one launch."""
    sizes = [t.numel() for t in tensors]
    parts = tensors[0].new_empty(sum(sizes), dtype=dtype).split(sizes)
    views = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(views, tensors)
    return views


def _cast(affines: tuple[torch.Tensor | None, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Weights and biases in the products' dtype: under autocast one buffer and one launch for all of them, kept for the backward."""
    if dtype is not None and casts.held() is not None:
        return tuple(cast_weight(t, dtype) for t in affines)
    narrow = [t for t in affines if t is not None and dtype is not None and t.dtype != dtype]
    if len(narrow) < FEW or not features.copies_together(narrow[0].device):
        return tuple(as_dtype(t, dtype) for t in affines)
    fresh = iter(_cast_together(narrow, dtype))
    return tuple(next(fresh) if t is not None and t.dtype != dtype else t for t in affines)


def cast_weight(t: Any, dtype: torch.dtype | None) -> Any:
    """A weight or bias in a dtype: itself, the copy that is held for this forward, or a copy."""
    if t is None or dtype is None or t.dtype == dtype:
        return t
    found = casts.narrow(t, dtype)
    return t.to(dtype) if found is None else found


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1])


def weight_grad(dy_MN: torch.Tensor, x_MK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """dy^T x; an fp32 weight's gradient comes out of the product in fp32, unrounded, where the device can."""
    if dtype == torch.float32 != dy_MN.dtype and not torch.compiler.is_compiling() and features.widens("mm", dy_MN.device):
        return features.aten("mm", "dtype")(dy_MN.t(), x_MK, dtype)
    return as_dtype(dy_MN.t() @ x_MK, dtype)


def bias_grad(dy_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over rows, in at least fp32."""
    return dy_MN.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def _dtypes(affines: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple(None if t is None else t.dtype for t in affines)


class _Products(torch.autograd.Function):
    """y_i = x w_i^T + b_i for several i; saves x and the weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None, *affines: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        wide, cast = as_dtype(x, dtype), _cast(affines, dtype)
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
            grads.append(weight_grad(dy_MN, x_MK, ctx.dtypes[2 * i]) if ctx.needs_input_grad[2 + 2 * i] else None)
            grads.append(bias_grad(dy_MN, ctx.dtypes[2 * i + 1]) if ctx.needs_input_grad[3 + 2 * i] else None)
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


class _Packed(NamedTuple):
    """What the backward of a packed product needs besides tensors."""

    dtypes: tuple[Any, ...]
    x_dtype: torch.dtype
    rows: list[int]


def _packed_forward(
    x: torch.Tensor, dtype: torch.dtype, affines: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, _Packed]:
    """y, x as multiplied, the packed weight, and the rest."""
    wide, weights, biases = as_dtype(x, dtype), affines[::2], [b for b in affines[1::2] if b is not None]
    rows = [w.shape[0] for w in weights]  # type: ignore[union-attr]
    packed, bias = casts.packed(weights, dtype), casts.packed(biases, dtype) if biases else None  # type: ignore[arg-type]
    if packed is None or (biases and bias is None):
        cast = _cast_together([*weights, *biases], dtype)
        packed = cast[0].as_strided((sum(rows), x.shape[-1]), (x.shape[-1], 1))
        bias = cast[len(weights)].as_strided((sum(rows),), (1,)) if biases else None
    return F.linear(wide, packed, bias), wide, packed, _Packed(_dtypes(affines), x.dtype, rows)


def _packed_backward(options: _Packed, x: torch.Tensor, packed: torch.Tensor, dy_MN: torch.Tensor, needs: tuple[bool, ...]) -> list[Any]:
    """Gradients of x and of each weight and bias."""
    need_x, *needed = needs
    dx = as_dtype((dy_MN @ packed).view(x.shape), options.x_dtype) if need_x else None
    dws = weight_grad(dy_MN, _rows(x), options.dtypes[0]).split(options.rows) if any(needed[::2]) else ()
    dbs = bias_grad(dy_MN, options.dtypes[1]).split(options.rows) if any(needed[1::2]) else ()
    return [dx, *((dws, dbs)[i % 2][i // 2] if need else None for i, need in enumerate(needed))]


class _PackedProduct(torch.autograd.Function):
    """y = x [w_1; w_2; ...]^T + [b_1; b_2; ...] where the weights are cast anyway, into one packed buffer; saves x and that buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, *affines: torch.Tensor | None) -> torch.Tensor:
        y, wide, packed, ctx.options = _packed_forward(x, dtype, affines)
        ctx.save_for_backward(wide, packed)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, packed = ctx.saved_tensors
        need_x, _, *needed = ctx.needs_input_grad
        dx, *grads = _packed_backward(ctx.options, x, packed, _rows(dy), (need_x, *needed))
        return dx, None, *grads


class _PackedHeads(torch.autograd.Function):
    """As `_PackedProduct`, with the result as heads [B, H, S, D] of each product: views of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, width: int, *affines: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        y, wide, packed, ctx.options = _packed_forward(x, dtype, affines)
        ctx.save_for_backward(wide, packed)
        heads = y.view(*x.shape[:-1], -1, width).transpose(1, 2)
        return heads.split([rows // width for rows in ctx.options.rows], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, packed = ctx.saved_tensors
        need_x, _, _, *needed = ctx.needs_input_grad
        dy_MN = torch.cat([dy.transpose(1, 2) for dy in dys], 2).view(-1, packed.shape[0])
        dx, *grads = _packed_backward(ctx.options, x, packed, dy_MN, (need_x, *needed))
        return dx, None, None, *grads


def packed_heads(x: torch.Tensor, affines: tuple[Affine, ...], width: int) -> tuple[torch.Tensor, ...]:
    """The products of `x` [B, S, K] as heads [B, H_i, S, width], computed as one. Ask `packs` first; autograd must be recording."""
    return apply(_PackedHeads, x, product_dtype(x), width, *(t for pair in affines for t in pair))


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
        wide = as_dtype(x, dtype)
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
        dwd = weight_grad(dy_MN, _rows(act), dtypes[4]) if need_wd else None
        dx = (dgate @ wg).addmm_(dup, wu).view(x.shape).to(ctx.x_dtype) if need_x else None
        dwg = weight_grad(dgate, x_MK, dtypes[0]) if need_wg else None
        dwu = weight_grad(dup, x_MK, dtypes[2]) if need_wu else None
        dbg = bias_grad(dgate, dtypes[1]) if need_bg else None
        dbu = bias_grad(dup, dtypes[3]) if need_bu else None
        return dx, None, None, dwg, dbg, dwu, dbu, dwd, bias_grad(dy_MN, dtypes[5]) if need_bd else None


def gated_mlp(x: torch.Tensor, gate: Affine, up: Affine, down: Affine, activation: str) -> torch.Tensor:
    """`down(act(gate(x)) * up(x))` of `x` [..., K]; `activation` is silu, gelu or gelu_tanh."""
    flat = (*gate, *up, *down)
    if needs_grad(x, *flat):
        return apply(_GatedMlp, x, product_dtype(x), activation, *flat)
    g, u = F.linear(x, *gate), F.linear(x, *up)
    return F.linear(GLU.fwd(g, u, activation, "", False, g.dtype)[0], *down)


def _dropped(act: torch.Tensor, state: torch.Tensor | None, p: float) -> torch.Tensor:
    return act if state is None else DROPOUT.fwd(act, state, p)


class GeluMlp(NamedTuple):
    """What the backward of `gelu_mlp` needs besides tensors: dtypes of x, of the weights and of the last bias, and the call's options."""

    x_dtype: torch.dtype
    w1_dtype: torch.dtype
    w2_dtype: torch.dtype
    b2_dtype: torch.dtype | None
    approximate: str
    p: float


def gelu_mlp_forward(
    x: torch.Tensor, dtype: torch.dtype | None, approximate: str, state: torch.Tensor | None, p: float, first: Affine, last: Affine
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """The branch, and what its backward needs: x, the first product without its bias, the mask's state, w1, b1, w2."""
    wide, b1 = as_dtype(x, dtype), first[1]  # gelu adds its bias in fp32, so that one stays as it is
    w1, w2, b2 = _cast((first[0], *last), dtype)
    h = F.linear(wide, w1)
    act = _dropped(GELU.fwd(h, b1, approximate, h.dtype), state, p)
    return F.linear(act, w2, b2), (wide, h, state, w1, b1, w2)


def gelu_mlp_backward(
    options: GeluMlp, saved: tuple[Any, ...], dy: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, w1, b1, w2 and b2."""
    x, h, state, w1, b1, w2 = saved
    need_x, need_w1, need_b1, need_w2, need_b2 = needed
    x_MK, dy_MN = _rows(x), _rows(dy)
    dact = (dy_MN @ w2).view(h.shape)
    dact = dact if state is None else DROPOUT.bwd(dact, state, options.p)
    dh, db1, act = GELU.bwd(dact, h, b1, options.approximate, True, need_b1, need_w2)
    del dact
    dh = _rows(dh)
    dw2 = weight_grad(dy_MN, _rows(_dropped(act, state, options.p)), options.w2_dtype) if need_w2 else None
    dx = as_dtype((dh @ w1).view(x.shape), options.x_dtype) if need_x else None
    dw1 = weight_grad(dh, x_MK, options.w1_dtype) if need_w1 else None
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
        ctx.options = GeluMlp(x.dtype, w1.dtype, w2.dtype, None if b2 is None else b2.dtype, approximate, p)
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
    flat = (*first, *second)
    if needs_grad(x, *flat):
        return apply(_GeluMlp, x, product_dtype(x), approximate, state, p, *flat)
    h = F.linear(x, first[0])
    return F.linear(_dropped(GELU.fwd(h, first[1], approximate, h.dtype), state, p), *second)
