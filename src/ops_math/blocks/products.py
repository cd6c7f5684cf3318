"""Matrix products of a block, with only what the backward needs kept, once.

M rows, K input width, N output width. Products that share an input save it once and sum its gradient in the products themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops_math import features
from ops_math.blocks import accumulate, casts, pinned
from ops_math.dispatch import apply, needs_grad, once_differentiable, store_dtype
from ops_math.layout import copied, reshaped
from ops_math.spec import dtype_name

FEW = 4  # tensors; fewer are cast sooner one by one: 10 us each on the host of an H200, against 29 us for a buffer and one launch
Affine = tuple[torch.Tensor, torch.Tensor | None]


def product_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype to which autocast would bring the operands, or None where it is off."""
    dtype = store_dtype(x)
    return dtype if features.autocasts(x.device.type) else None


def as_dtype(t: Any, dtype: torch.dtype | None) -> Any:
    """The tensor in a dtype: itself where there is none, or nothing to do."""
    if t is None or dtype is None or t.dtype == dtype:
        return t
    return copied(t.to(dtype), "an operand or gradient of a product", f"{dtype_name(t.dtype)} to {dtype_name(dtype)}")


def cast_together(tensors: list[Any], dtype: Any) -> list[torch.Tensor]:
    """The tensors in another dtype, one after the other in one buffer, by one launch."""
    sizes = [t.numel() for t in tensors]
    buffer = tensors[0].new_empty(sum(sizes), dtype=dtype)
    views = [part.view(t.shape) for part, t in zip(buffer.split(sizes), tensors, strict=True)]
    torch._foreach_copy_(views, tensors)
    copied(buffer, "weights of one block", f"{dtype_name(tensors[0].dtype)} to {dtype_name(dtype)}")
    return views


def cast(affines: tuple[torch.Tensor | None, ...], dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Weights and biases in the products' dtype: under autocast one buffer and one launch for all of them, kept for the backward."""
    if dtype is not None and casts.held() is not None:
        return tuple(cast_weight(t, dtype) for t in affines)
    narrow = [t for t in affines if t is not None and dtype is not None and t.dtype != dtype]
    if len(narrow) < FEW or not features.copies_together(narrow[0].device):
        return tuple(as_dtype(t, dtype) for t in affines)
    fresh = iter(cast_together(narrow, dtype))
    return tuple(next(fresh) if t is not None and t.dtype != dtype else t for t in affines)


def cast_weight(t: Any, dtype: torch.dtype | None) -> Any:
    """A weight or bias in a dtype: itself, the copy that is held for this forward, or a copy."""
    if t is None or dtype is None or t.dtype == dtype:
        return t
    found = casts.narrow(t, dtype)
    return copied(t.to(dtype), "one weight", f"{dtype_name(t.dtype)} to {dtype_name(dtype)}") if found is None else found


def rows(t: torch.Tensor) -> torch.Tensor:
    """[..., N] as [M, N]."""
    return reshaped(t, (-1, t.shape[-1]), "rows of a block", "its strides make no rows")


def weight_grad(dy_MN: torch.Tensor, x_MK: torch.Tensor, dtype: torch.dtype, owner: Any = None) -> Any:
    """dy^T x; an fp32 weight's gradient comes out of the product in fp32, unrounded, where the device can. None where it was added to the
    gradient of `owner`, the weight, at once."""
    if owner is not None and accumulate.added(owner, dy_MN, x_MK):
        return None
    if dtype == torch.float32 != dy_MN.dtype and not torch.compiler.is_compiling() and features.widens("mm", dy_MN.device):
        return features.aten("mm", "dtype")(dy_MN.t(), x_MK, dtype)
    return as_dtype(dy_MN.t() @ x_MK, dtype)


def bias_grad(dy_MN: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over rows, in at least fp32."""
    return dy_MN.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)


def dtypes_of(affines: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    """The dtype of each, None where there is none."""
    return tuple(None if t is None else t.dtype for t in affines)


def owners_of(affines: Any) -> tuple[Any, ...]:
    """The weights themselves, for `accumulate_into_grad`; none while tracing, where gradients are values."""
    weights = tuple(affines)[::2]
    return (None,) * len(weights) if torch.compiler.is_compiling() else weights


class _Products(torch.autograd.Function):
    """y_i = x w_i^T + b_i for several i; saves x and the weights."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None, *affines: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        wide, narrow = as_dtype(x, dtype), cast(affines, dtype)
        ctx.save_for_backward(wide, *narrow[::2])
        ctx.dtypes, ctx.x_dtype, ctx.owners = dtypes_of(affines), x.dtype, owners_of(affines)
        return tuple(F.linear(wide, w, b) for w, b in zip(narrow[::2], narrow[1::2], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        x_MK = rows(x)
        dx_MK = None
        grads: list[torch.Tensor | None] = []
        for i, (dy, weight) in enumerate(zip(dys, weights, strict=True)):
            dy_MN = rows(dy)
            grads.append(weight_grad(dy_MN, x_MK, ctx.dtypes[2 * i], ctx.owners[i]) if ctx.needs_input_grad[2 + 2 * i] else None)
            grads.append(bias_grad(dy_MN, ctx.dtypes[2 * i + 1]) if ctx.needs_input_grad[3 + 2 * i] else None)
            if ctx.needs_input_grad[0]:
                dx_MK = dy_MN @ weight if dx_MK is None else dx_MK.addmm_(dy_MN, weight)
        dx = None if dx_MK is None else dx_MK.view(x.shape).to(ctx.x_dtype)
        return dx, None, *grads


def products(x: torch.Tensor, affines: tuple[Affine, ...]) -> tuple[torch.Tensor, ...]:
    """The products of `x` [..., K] with several weights [N_i, K], biases added: [..., N_i] each."""
    if pinned.pinned():
        return pinned.products(x, affines)
    flat = [t for pair in affines for t in pair]
    if needs_grad(x, *flat):
        return apply(_Products, x, product_dtype(x), *flat)
    return tuple(F.linear(x, w, b) for w, b in affines)
