"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, apply, define, needs_grad, once_differentiable, store_dtype
from ops_math.ops.cross_entropy import plain_linear
from ops_math.ops.cross_entropy.op import check_options
from ops_math.ops.cross_entropy.problem_linear import LinearCrossEntropyProblem
from ops_math.spec import compute_dtype, product
from ops_math.spec import dtype_name as name_of


def _name(t: torch.Tensor | None) -> str:
    return "" if t is None else name_of(t.dtype)


Maybe = torch.Tensor | None


def _problem_fwd(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Maybe, class_weight: Maybe, num_tokens: Maybe, *options: Any
) -> LinearCrossEntropyProblem:
    *loss, store, need_dx, need_dw, need_db = options
    when = "forward" if need_dx or need_dw or need_db else "never"
    names = name_of(x.dtype), name_of(weight.dtype), _name(bias), _name(class_weight), name_of(store)
    sizes = product(x.shape[:-1]), x.shape[-1], weight.shape[0]
    return LinearCrossEntropyProblem._make((*sizes, *names, *loss, num_tokens is not None, when, need_dx, need_dw, need_db))


def _problem_bwd(
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: Maybe,
    class_weight: Maybe,
    factors: torch.Tensor,
    divisor: Maybe,
    dx: Maybe,
    dweight: Maybe,
    dbias: Maybe,
    *options: Any,
) -> LinearCrossEntropyProblem:
    problem = _problem_fwd(x, weight, target, bias, class_weight, None, *options)
    return problem._replace(when="backward" if dx is None else "forward")


def _fake_fwd(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Maybe, class_weight: Maybe, num_tokens: Maybe, *options: Any
) -> tuple[torch.Tensor, ...]:
    reduction, store, need_dx, need_dw, need_db = options[-5:]
    rows, wide = product(x.shape[:-1]), compute_dtype(store)
    return (
        x.new_empty(target.shape if reduction == "none" else (), dtype=wide),
        x.new_empty((rows, 3), dtype=wide),
        x.new_empty((), dtype=wide) if reduction == "mean" else absent(x, wide),
        x.new_empty((rows, x.shape[-1]), dtype=wide) if need_dx else absent(x, wide),
        x.new_empty(weight.shape, dtype=wide) if need_dw else absent(x, wide),
        x.new_empty(weight.shape[:1], dtype=wide) if need_db else absent(x, wide),
    )


def _fake_bwd(
    dloss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Maybe, *rest: Any
) -> tuple[torch.Tensor, ...]:
    need_dx, need_dw, need_db = rest[-3:]
    db_dtype = weight.dtype if bias is None else bias.dtype
    return (
        x.new_empty(x.shape) if need_dx else absent(x),
        weight.new_empty(weight.shape) if need_dw else absent(weight),
        x.new_empty(weight.shape[:1], dtype=db_dtype) if need_db else absent(x, db_dtype),
    )


_TENSORS = "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight"
_OPTIONS = (
    "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, "
    "ScalarType store, bool need_dx, bool need_dw, bool need_db"
)
_SAVED = "Tensor factors, Tensor? divisor, Tensor? dx, Tensor? dweight, Tensor? dbias"
OP = define(
    "linear_cross_entropy",
    __package__,
    fwd=f"({_TENSORS}, Tensor? num_tokens, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    bwd=f"(Tensor dloss, {_TENSORS}, {_SAVED}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "eager"),
    variant="_linear",
)


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients of a sum or mean are computed beside the loss, while the logits are there, and scaled in the backward; otherwise
    the logits are computed a second time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: Maybe,
        class_weight: Maybe,
        num_tokens: Maybe,
        options: tuple[Any, ...],
        store: torch.dtype,
        recompute: bool,
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        later = recompute or options[-1] == "none"
        loss, factors, divisor, *grads = OP.fwd(
            x, weight, target, bias, class_weight, num_tokens, *options, store, *((False,) * 3 if later else needs)
        )
        kept = [None] * 3 if later else grads
        ctx.save_for_backward(x, weight, target, bias, class_weight, factors, divisor if options[-1] == "mean" else None, *kept)
        ctx.options = (*options, store, *needs)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        dx, dw, db = OP.bwd(dloss, *ctx.saved_tensors, *ctx.options)
        need_dx, need_dw, need_db = ctx.options[-3:]
        return dx if need_dx else None, dw if need_dw else None, None, db if need_db else None, None, None, None, None, None


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_tokens: torch.Tensor | None = None,
    recompute: bool = False,
) -> torch.Tensor:
    """Cross entropy of the logits x weight^T + bias, which never exist whole.

    Args:
        x: [..., H], fp32, bf16, fp16 or fp64, any strides.
        weight: [V, H], of any floating dtype; multiplied in the dtype of `x` (under autocast: autocast's).
        target: [...], int64 or int32: classes in [0, V), or `ignore_index`.
        bias: [V], of any floating dtype, or None.
        class_weight, ignore_index, label_smoothing, z_loss, softcap, reduction, num_tokens: as in `cross_entropy`.
        recompute: False computes the gradients of a mean or sum in the forward, while a chunk of logits is there, and keeps them
            until the backward scales them: the least arithmetic, and the weight's gradient once more in fp32. True computes the
            logits again in the backward: a third more arithmetic, least memory. `reduction="none"` always recomputes.

    Returns:
        [] or, for `none`, [...]; fp32 (fp64 for fp64). What `cross_entropy` says about batches of which nothing is kept, and about
        targets outside the vocabulary, holds here too; with such a target, all of the weight's gradient is NaN.

    Precision: products in the dtype of `x`, summed in fp32 (fp64 for fp64) over all rows. Logits, and dlogits of the sum of losses,
        are rounded to it; division by the token count and multiplication with the loss's gradient come after the sums, in fp32,
        so fp16 does not underflow; with `none`, rows whose own gradients lie further apart than the dtype reaches do (fp16: 1e4).
        Each gradient is rounded once, to the dtype of its input.
    Determinism: level 1; its products are the vendor's. From level 2 on call `linear` and `cross_entropy`.
    Raises: ArgumentError for wrong shapes, dtypes, devices and options out of their range.
    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (the problem); derived in DESIGN.md.
    """
    operator = "linear_cross_entropy"
    checks.floating(operator, "x", x)
    checks.at_least_1d(operator, "x", x)
    checks.not_empty(operator, "x", x, -1)
    checks.floating(operator, "weight", weight)
    checks.rank(operator, "weight", weight, 2, "[V, H]")
    checks.not_empty(operator, "weight", weight, 0)
    checks.shape(operator, "weight", weight, (weight.shape[0], x.shape[-1]), "[V, H], H the last dimension of x")
    if bias is not None:
        checks.floating(operator, "bias", bias)
        checks.shape(operator, "bias", bias, weight.shape[:1], "one value a row of weight")
    checks.same_device(operator, "x", x, weight=weight, bias=bias)
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), reduction)
    check_options(operator, "x", x, weight.shape[0], target, class_weight, num_tokens, softcap, options)
    if not settings.active():
        return plain_linear.linear_cross_entropy(
            x, weight, target, bias=bias, class_weight=class_weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
            z_loss=z_loss, softcap=softcap, reduction=reduction, num_tokens=num_tokens,
        )  # fmt: skip
    store = store_dtype(x)
    if needs_grad(x, weight, bias):
        return apply(_LinearCrossEntropy, x, weight, target, bias, class_weight, num_tokens, options, store, recompute)
    return OP.fwd(x, weight, target, bias, class_weight, num_tokens, *options, store, False, False, False)[0]


OP.public = {"linear_cross_entropy": linear_cross_entropy}
