"""Several products of one input as one: of weights that lie together, or that are cast into one buffer at this call anyway.

M rows, K input width, N_i output widths. One product fills the device where a key projection of 512 columns does not, the input is read
once, and its gradient needs no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math import features
from ops_math.blocks import accumulate, casts, pinned
from ops_math.blocks.products import (
    Affine,
    as_dtype,
    bias_grad,
    cast_together,
    dtypes_of,
    owners_of,
    product_dtype,
    products,
    rows,
    weight_grad,
)
from ops_math.dispatch import apply, needs_grad, once_differentiable
from ops_math.layout import adjoining, copied, dense
from ops_math.ops.rope.op import Heads, check_packed
from ops_math.ops.rope.op_inplace import turn_packed_

Tensor = torch.Tensor


class Packed(NamedTuple):
    """What the backward of a packed product needs besides tensors: dtypes of weights and biases in turn, of x, the N_i, and the weights."""

    dtypes: tuple[Any, ...]
    x_dtype: torch.dtype
    rows: list[int]
    owners: tuple[Any, ...]


def packs(x: Tensor, affines: tuple[Affine, ...]) -> bool:
    """Whether these products can be one without a copy more: their weights lie together, or are cast for autocast at this call anyway."""
    if pinned.pinned():
        return False
    dtype, weights = product_dtype(x), [w for w, _ in affines]
    if len({b is None for _, b in affines}) > 1 or len({w.dtype for w in weights}) > 1:
        return False
    if dtype is None or weights[0].dtype == dtype:
        return weights[0].dtype == (dtype or x.dtype) and adjoining(weights) is not None
    if not features.copies_together(x.device):
        return False
    return all(t.dtype == torch.float32 and t.requires_grad for pair in affines for t in pair if t is not None)


def joined(dtype: torch.dtype | None, affines: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """The weights as one, the biases as one, and the weights that the first shares memory with. Ask `packs` first.

    Saved for the backward, the latter let autograd notice a weight that was written to in between.
    """
    weights, biases = [w for w in affines[::2] if w is not None], [b for b in affines[1::2] if b is not None]
    if dtype is None or weights[0].dtype == dtype:
        one = adjoining(weights)
        assert one is not None
        bias = (adjoining(biases) if biases[0].dtype == one.dtype else None) if biases else None
        return one, torch.cat(biases).to(one.dtype) if biases and bias is None else bias, tuple(weights)
    one, bias = casts.packed(weights, dtype), casts.packed(biases, dtype) if biases else None
    if one is None or (biases and bias is None):
        cast = cast_together([*weights, *biases], dtype)
        num_rows, width = sum(w.shape[0] for w in weights), weights[0].shape[1]
        one = cast[0].as_strided((num_rows, width), (width, 1))
        bias = cast[len(weights)].as_strided((num_rows,), (1,)) if biases else None
    return one, bias, ()


def packed_forward(x: Tensor, dtype: torch.dtype | None, affines: Sequence[Tensor | None]) -> tuple[Tensor, tuple[Tensor, ...], Packed]:
    """y, what the backward needs (x as multiplied, the packed weight, and perhaps the weights themselves), and the rest."""
    wide = as_dtype(x, dtype)
    one, bias, shared = joined(dtype, affines)
    sizes = [w.shape[0] for w in affines[::2] if w is not None]
    return F.linear(wide, one, bias), (wide, one, *shared), Packed(dtypes_of(tuple(affines)), x.dtype, sizes, owners_of(affines))


def packed_backward(options: Packed, saved: Sequence[Tensor], dy_MN: Tensor, needs: Sequence[bool]) -> list[Any]:
    """Gradients of x and of each weight and bias."""
    x, one, *_ = saved
    need_x, *needed = needs
    dx = as_dtype((dy_MN @ one).view(x.shape), options.x_dtype) if need_x else None
    dws: Sequence[Any] = ()
    if all(needed[::2]) and accumulate.added_together(options.owners, dy_MN, rows(x), options.rows):
        dws = (None,) * len(options.rows)
    elif any(needed[::2]):
        dws = weight_grad(dy_MN, rows(x), options.dtypes[0]).split(options.rows)
    dbs = bias_grad(dy_MN, options.dtypes[1]).split(options.rows) if any(needed[1::2]) else ()
    return [dx, *((dws, dbs)[i % 2][i // 2] if need else None for i, need in enumerate(needed))]


class _PackedProduct(torch.autograd.Function):
    """y = x [w_1; w_2; ...]^T + [b_1; b_2; ...], and perhaps the first heads of it turned; saves x and the packed weight.

    The gradient is turned back where it is: it comes from the attention that is called with y and nothing else, which made it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype | None, turned: Heads | None, cos: Tensor | None, sin: Tensor | None,
        position_ids: Tensor | None, *affines: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y, saved, ctx.options = packed_forward(x, dtype, affines)
        if turned is not None:
            turned = check_packed("residual_attention", y, cos, sin, position_ids, turned.num_heads, turned.num_kv_heads, None, False)  # type: ignore[arg-type]
            turn_packed_(y, cos, sin, position_ids, turned)  # type: ignore[arg-type]
        ctx.turned = turned
        ctx.save_for_backward(cos, sin, position_ids, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        cos, sin, position_ids, *saved = ctx.saved_tensors
        need_x, _, _, _, _, _, *needed = ctx.needs_input_grad
        if ctx.turned is not None:
            dy = dense(dy, "gradient of q, k and v", "attention gave it in other strides")
            turn_packed_(dy, cos, sin, position_ids, ctx.turned, inverse=True)
        dx, *grads = packed_backward(ctx.options, saved, rows(dy), (need_x, *needed))
        return dx, None, None, None, None, None, *grads


def packed_product(
    x: Tensor, affines: tuple[Affine, ...], turned: Heads | None = None, tables: tuple[Tensor, Tensor] | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `products`, computed as one: [..., N_1 + N_2 + ...]. Ask `packs` first; autograd must be recording.

    Args:
        x: [..., K].
        affines: weights [N_i, K] and biases [N_i].
        turned: numbers of query and key heads, which are turned by the tables; None to turn nothing. The only user of the result must
            then be an operator whose gradient is a tensor of its own.
        tables, position_ids: as `rope_qkv` takes them.
    """
    cos, sin = (None, None) if tables is None else tables
    return apply(_PackedProduct, x, product_dtype(x), turned, cos, sin, position_ids, *(t for pair in affines for t in pair))


class _PackedHeads(torch.autograd.Function):
    """As `_PackedProduct`, with the result as heads [B, H, S, D] of each product: views of one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype | None, width: int, *affines: Tensor | None) -> tuple[Tensor, ...]:
        y, saved, ctx.options = packed_forward(x, dtype, affines)
        ctx.save_for_backward(*saved)
        heads = y.view(*x.shape[:-1], sum(ctx.options.rows) // width, width).transpose(1, 2)
        return heads.split([size // width for size in ctx.options.rows], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        need_x, _, _, *needed = ctx.needs_input_grad
        dy = copied(torch.cat([dy.transpose(1, 2) for dy in dys], 2), "gradients of q, k and v", "PyTorch's attention writes them apart")
        dx, *grads = packed_backward(ctx.options, ctx.saved_tensors, dy.view(-1, ctx.saved_tensors[1].shape[0]), (need_x, *needed))
        return dx, None, None, *grads


def packed_heads(x: Tensor, affines: tuple[Affine, ...], width: int) -> tuple[Tensor, ...]:
    """The products of `x` [B, S, K] as heads [B, H_i, S, width], computed as one. Ask `packs` first; autograd must be recording."""
    return apply(_PackedHeads, x, product_dtype(x), width, *(t for pair in affines for t in pair))


def packed_or_apart(x: Tensor, affines: tuple[Affine, ...]) -> tuple[Tensor, ...]:
    """As `products`, as one where that can be: the results are then views of one tensor."""
    if len(affines) < 2 or not packs(x, affines) or not needs_grad(x, *(t for pair in affines for t in pair)):
        return products(x, affines)
    return packed_product(x, affines).split([w.shape[0] for w, _ in affines], -1)
