"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, apply, define, needs_grad, once_differentiable
from ops_math.ops.cross_entropy import plain
from ops_math.ops.cross_entropy.problem import CrossEntropyProblem
from ops_math.spec import compute_dtype, product
from ops_math.spec import dtype_name as name_of

REDUCTIONS = ("none", "mean", "sum")


Maybe = torch.Tensor | None


def _problem_fwd(logits: torch.Tensor, target: torch.Tensor, class_weight: Maybe, num_tokens: Maybe, *options: Any) -> CrossEntropyProblem:
    weight = "" if class_weight is None else name_of(class_weight.dtype)
    sizes = product(logits.shape[:-1]), logits.shape[-1]
    return CrossEntropyProblem._make((*sizes, name_of(logits.dtype), weight, *options, num_tokens is not None))


def _problem_bwd(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: Maybe,
    factors: torch.Tensor,
    divisor: Maybe,
    *options: Any,
) -> CrossEntropyProblem:
    return _problem_fwd(logits, target, class_weight, None, *options)


def _fake_fwd(
    logits: torch.Tensor, target: torch.Tensor, class_weight: Maybe, num_tokens: Maybe, *options: Any
) -> tuple[torch.Tensor, ...]:
    dtype, reduction = compute_dtype(logits.dtype), options[-1]
    loss = logits.new_empty(target.shape if reduction == "none" else (), dtype=dtype)
    divisor = logits.new_empty((), dtype=dtype) if reduction == "mean" else absent(logits, dtype)
    return loss, logits.new_empty((product(logits.shape[:-1]), 3), dtype=dtype), divisor


def _fake_bwd(dloss: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction"
OP = define(
    "cross_entropy",
    __package__,
    fwd=f"(Tensor logits, Tensor target, Tensor? class_weight, Tensor? num_tokens, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    bwd=f"(Tensor dloss, Tensor logits, Tensor target, Tensor? class_weight, Tensor factors, Tensor? divisor, {_OPTIONS}) -> Tensor",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "eager", "vendor"),
)


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits and, row by row, `factors` [rows, 3]: the top logit, and a and b of dz = a exp(z - top), b at the target.

    One logsumexp would lose the digits of a large logit, and 1 - p those of a probability near 1.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, class_weight: Maybe, num_tokens: Maybe, options: tuple[Any, ...]
    ) -> torch.Tensor:
        loss, factors, divisor = OP.fwd(logits, target, class_weight, num_tokens, *options)
        ctx.save_for_backward(logits, target, class_weight, factors, divisor if options[-1] == "mean" else None)
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        return OP.bwd(dloss, *ctx.saved_tensors, *ctx.options), None, None, None, None


def check_options(
    operator: str,
    first: str,
    x: torch.Tensor,
    num_classes: int,
    target: torch.Tensor,
    class_weight: Maybe,
    num_tokens: Maybe,
    softcap: float | None,
    options: tuple[Any, ...],
) -> None:
    """What both operators ask of their arguments; `first` names x."""
    ignore_index, label_smoothing, z_loss, _, reduction = options
    checks.integer(operator, "target", target)
    checks.shape(operator, "target", target, x.shape[:-1], f"{first} without its last dimension", "Give one class number to each row.")
    checks.same_device(operator, first, x, target=target, class_weight=class_weight)
    if class_weight is not None:
        checks.floating(operator, "class_weight", class_weight)
        checks.shape(operator, "class_weight", class_weight, (num_classes,), "one weight a class")
        checks.no_gradient(operator, "class_weight", class_weight)
    checks.within(operator, "label_smoothing", label_smoothing, 0.0, 1.0)
    checks.within(operator, "z_loss", z_loss, 0.0, float("inf"))
    if softcap is not None:
        checks.positive(operator, "softcap", softcap)
    checks.one_of(operator, "reduction", reduction, REDUCTIONS)
    if num_tokens is not None:
        checks.token_count(operator, num_tokens, reduction)
        checks.same_device(operator, first, x, num_tokens=num_tokens)
    settings.policy()  # the environment is read at the first use
    if settings.STATE.checked:
        checks.targets(operator, target, num_classes, ignore_index)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of logits with class targets.

    With z = logits, or softcap * tanh(logits / softcap), lse = logsumexp(z), class weights w (1 without any) and smoothing s,
    a row's loss is (1 - s) w_y (lse - z_y) + s / V * sum_v w_v (lse - z_v) + z_loss * lse^2, and 0 where target = ignore_index.

    Args:
        logits: [..., V], fp32, bf16, fp16 or fp64, any strides.
        target: [...], int64 or int32: classes in [0, V), or `ignore_index`.
        class_weight: [V], of any floating dtype, or None. It is a constant: it gets no gradient.
        ignore_index: rows with this target have loss 0 and gradient 0; it may be a class.
        label_smoothing: in [0, 1].
        z_loss: factor of lse^2, added for each kept row whatever its class weight.
        softcap: bound of the logits, or None.
        reduction: `none`; `mean`, divided by the sum of the kept rows' class weights (their number without class weights); `sum`.
        num_tokens: with `mean`, a tensor [] on the same device, of any dtype: the divisor instead, e.g. the tokens of all ranks.

    Returns:
        [] or, for `none`, [...]; fp32 (fp64 for fp64), as `F.cross_entropy(logits.float(), ...)`. Nothing is kept: as in PyTorch, a
        plain mean is NaN and its gradient 0. With `num_tokens` it is 0, so that a rank without tokens harms no other.
        A target outside the vocabulary is never used as an index: its row's loss and gradient are NaN, which no training
        overlooks; under `ops_math.checked()` it is an error that names the position, at the price of a synchronisation.

    Precision: arithmetic and sums in fp32 (fp64 for fp64); the gradient is rounded once, at the store, after the multiplication
        with the loss's gradient. It keeps its digits at logits of any size and at a probability near 1: no 1 is subtracted from one.
    Determinism: level 3 where the divisor does not follow the batch (`num_tokens`, `sum`, `none`), else level 1.
    Raises: ArgumentError for wrong shapes, dtypes, devices and options out of their range.
    Source: Szegedy et al., Rethinking the Inception Architecture, 2015 (smoothing); Chowdhery et al., PaLM, 2022 (z-loss);
        Gemma team, Gemma 2, 2024 (soft cap); backward derived in DESIGN.md.
    """
    checks.floating("cross_entropy", "logits", logits)
    checks.at_least_1d("cross_entropy", "logits", logits)
    checks.not_empty("cross_entropy", "logits", logits, -1)
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), reduction)
    check_options("cross_entropy", "logits", logits, logits.shape[-1], target, class_weight, num_tokens, softcap, options)
    if not settings.active():
        return plain.cross_entropy(
            logits, target, class_weight=class_weight, ignore_index=ignore_index, label_smoothing=label_smoothing,
            z_loss=z_loss, softcap=softcap, reduction=reduction, num_tokens=num_tokens,
        )  # fmt: skip
    if needs_grad(logits):
        return apply(_CrossEntropy, logits, target, class_weight, num_tokens, options)
    return OP.fwd(logits, target, class_weight, num_tokens, *options)[0]


OP.public = {"cross_entropy": cross_entropy}
