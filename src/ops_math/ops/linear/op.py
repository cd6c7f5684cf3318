"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, apply, define, needs_grad, once_differentiable, store_dtype
from ops_math.ops.linear import plain
from ops_math.ops.linear.problem import LinearProblem
from ops_math.spec import compute_dtype, product
from ops_math.spec import dtype_name as name_of

Maybe = torch.Tensor | None
PARTS = (1, 2, 4, 8)


def _products(store: str) -> str:
    return settings.fp32_products() if store == "fp32" else ""


def _problem_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, store: torch.dtype, out: torch.dtype, parts_k: int, parts_n: int
) -> LinearProblem:
    return LinearProblem(
        product(x.shape[:-1]), weight.shape[1], weight.shape[0], name_of(x.dtype), name_of(weight.dtype),
        "" if bias is None else name_of(bias.dtype), name_of(store), name_of(out), _products(name_of(store)), parts_k, parts_n,
    )  # fmt: skip


def _problem_bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.dtype | None, store: torch.dtype, parts_k: int, parts_n: int,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> LinearProblem:  # fmt: skip
    return LinearProblem(
        product(x.shape[:-1]), weight.shape[1], weight.shape[0], name_of(x.dtype), name_of(weight.dtype),
        "" if bias is None else name_of(bias), name_of(store), name_of(dy.dtype), _products(name_of(store)), parts_k, parts_n,
        need_dx, need_dw, need_db,
    )  # fmt: skip


def _fake_fwd(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, store: torch.dtype, out: torch.dtype, parts_k: int, parts_n: int
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out)


def _fake_bwd(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.dtype | None, store: torch.dtype, parts_k: int, parts_n: int,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return (
        x.new_empty(x.shape) if need_dx else absent(x),
        weight.new_empty(weight.shape) if need_dw else absent(weight),
        weight.new_empty((weight.shape[0],), dtype=bias) if need_db else absent(weight, bias),
    )


OP = define(
    "linear",
    __package__,
    fwd="(Tensor x, Tensor weight, Tensor? bias, ScalarType store, ScalarType out, int parts_k, int parts_n) -> Tensor",
    bwd="(Tensor dy, Tensor x, Tensor weight, ScalarType? bias, ScalarType store, int parts_k, int parts_n, bool need_dx, bool need_dw,"
    " bool need_db) -> (Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("vendor", "triton_gpu", "eager"),
)


class _Linear(torch.autograd.Function):
    """y = x weight^T + bias; saves x and the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, options: tuple[Any, ...]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.options = None if bias is None else bias.dtype, options
        return OP.fwd(x, weight, bias, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        store, _, parts_k, parts_n = ctx.options
        needs = ctx.needs_input_grad[:3]
        grads = OP.bwd(dy, x, weight, ctx.bias, store, parts_k, parts_n, *needs)
        return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, parts: tuple[int, int] = (1, 1), wide: bool = False
) -> torch.Tensor:
    """Linear layer whose order of sums can be pinned.

    y = x weight^T + bias

    Up to determinism level 1 the vendor's product runs. From level 2 on ours does: one tile for every size, sums along it in one order.

    Args:
        x: [..., K], fp32, bf16, fp16 or fp64, any strides.
        weight: [N, K], of any floating dtype; it is rounded to the dtype of the product.
        bias: [N], or None.
        parts: in how many equal parts the sums over K (forward) and over N (gradient of x) are taken at level 3, each 1, 2, 4 or 8; the
            parts are added in pairs. With 4 on one device, 2 on each of two ranks and 1 on each of four, the sum over ranks, added in
            pairs, has the bits of one device. K and N must be multiples of them.
        wide: whether y is in the dtype of arithmetic: what a rank whose inputs are a shard hands to the sum over ranks.

    Returns:
        [..., N], contiguous, in the dtype of `x` (under autocast: autocast's dtype), or in fp32 with `wide` (fp64 for fp64).

    Precision: operands are rounded to the dtype of `x` (autocast's), sums are in fp32 (fp64 for fp64), and y is rounded once, after the
        bias. The weight's gradient is added up in fp32 and rounded once to the weight's dtype, the bias's from y's gradient as it came.
    Determinism: level 3: at level 2 y and the gradient of x do not depend on the other rows, and the weight's gradient is added token
        block by token block; at level 3 nor do they depend on how the weight is cut, in steps of 64 outputs or inputs.
    Raises: ArgumentError for sizes, dtypes or devices that do not fit, and for parts that do not divide K and N.
    Source: dx = dy weight, dweight = dy^T x, dbias = the sum of dy over rows.
    """
    checks.floating("linear", "x", x)
    checks.floating("linear", "weight", weight)
    checks.at_least_1d("linear", "x", x)
    checks.rank("linear", "weight", weight, 2, "[N, K]")
    checks.shape("linear", "weight", weight, (weight.shape[0], x.shape[-1]), "one column for each input of x")
    checks.same_device("linear", "x", x, weight=weight, bias=bias)
    if bias is not None:
        checks.floating("linear", "bias", bias)
        checks.shape("linear", "bias", bias, (weight.shape[0],), "one number for each output")
    for name, part, size in zip(("parts[0]", "parts[1]"), parts, (weight.shape[1], weight.shape[0]), strict=True):
        checks.one_of("linear", name, part, PARTS)
        if size % part:
            checks.fail("linear", name, f"a divisor of {size}", str(part), "Pass 1, or pad the weight.")
    if not settings.active():
        return plain.linear(x, weight, bias, parts=parts, wide=wide)
    store = store_dtype(x)
    options = (store, compute_dtype(store) if wide else store, *parts)
    if needs_grad(x, weight, bias):
        return apply(_Linear, x, weight, bias, options)
    return OP.fwd(x, weight, bias, *options)


OP.public = {"linear": linear}
