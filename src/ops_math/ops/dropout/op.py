"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import apply, define, needs_grad, once_differentiable
from ops_math.ops.dropout import plain
from ops_math.ops.dropout.problem import DropoutProblem
from ops_math.rng import Rng, drawn, draws, state_for
from ops_math.spec import dtype_name as name_of
from ops_math.spec import product


def _problem(x: torch.Tensor, state: torch.Tensor, p: float) -> DropoutProblem:
    return DropoutProblem(product(x.shape[:-1]), x.shape[-1], name_of(x.dtype), p)


def _fake(x: torch.Tensor, state: torch.Tensor, p: float) -> torch.Tensor:
    return x.new_empty(x.shape)


OP = define(
    "dropout",
    __package__,
    fwd="(Tensor x, Tensor state, float p) -> Tensor",
    bwd="(Tensor dy, Tensor state, float p) -> Tensor",
    fake_fwd=_fake,
    fake_bwd=_fake,
    problem_fwd=_problem,
    problem_bwd=_problem,
    implementations=("triton_gpu", "eager"),
)


class _Dropout(torch.autograd.Function):
    """y = dropout(x); saves the state of the mask, three numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: torch.Tensor, p: float) -> torch.Tensor:
        ctx.save_for_backward(state)
        ctx.p = p
        return OP.fwd(x, state, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (state,) = ctx.saved_tensors
        return OP.bwd(dy, state, ctx.p), None, None


def dropout(x: torch.Tensor, p: float, *, rng: Rng | None = None) -> torch.Tensor:
    """Dropout: each element becomes zero with probability p, and the others grow so that the mean stays.

    y = x / (1 - p) where the mask keeps, 0 elsewhere

    The mask of an element is a function of the key, of its row (all leading dimensions flattened, plus the Rng's first row) and of
    its column; it is drawn again in the backward and never stored.

    Args:
        x: [..., N], fp32, bf16, fp16 or fp64, any strides.
        p: chance of dropping, in [0, 1). With 0 the result is `x` itself, as from `torch.nn.functional.dropout`.
        rng: where the mask comes from; the same Rng gives the same mask. None draws from PyTorch's generator: a key, or on a CPU, where
            drawing by key twice is slower, the mask itself, which is then stored.

    Returns:
        [..., N], contiguous, of the dtype of `x`, under autocast too.

    Precision: one multiplication in fp32 (fp64 for fp64) and one rounding; a keyed mask meets p to within 2^-17
        and scales by the chance it has (`rng.honoured`), so that the mean stays.
    Determinism: level 3; the mask depends neither on how the batch is cut (give each piece its `first_row`) nor on the device.
    Raises: ArgumentError for an integer input, a p outside [0, 1), an Rng on another device.
    Source: Srivastava et al., Dropout, 2014; the mask: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    checks.floating("dropout", "x", x)
    checks.at_least_1d("dropout", "x", x)
    checks.probability("dropout", "p", p)
    if not settings.active():
        return plain.dropout(x, p, rng=rng)
    if p == 0.0:
        return x
    if rng is None and draws(x):
        return drawn("dropout", x, p)
    state = state_for("dropout", rng, x.device)
    if needs_grad(x):
        return apply(_Dropout, x, state, p)
    return OP.fwd(x, state, p)


OP.public = {"dropout": dropout}
