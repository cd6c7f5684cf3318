"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import define, once_differentiable, store_dtype
from ops_math.ops.softmax import plain
from ops_math.ops.softmax.problem import SoftmaxProblem
from ops_math.spec import dtype_name as name_of
from ops_math.spec import product
from ops_math.usual import Usual, Way


def _problem_fwd(x: torch.Tensor, out: torch.dtype) -> SoftmaxProblem:
    return SoftmaxProblem(product(x.shape[:-1]), x.shape[-1], name_of(x.dtype), name_of(out))


def _problem_bwd(dy: torch.Tensor, y: torch.Tensor, x_dtype: torch.dtype) -> SoftmaxProblem:
    return SoftmaxProblem(product(y.shape[:-1]), y.shape[-1], name_of(x_dtype), name_of(y.dtype))


def _fake_fwd(x: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=out)


def _fake_bwd(dy: torch.Tensor, y: torch.Tensor, x_dtype: torch.dtype) -> torch.Tensor:
    return y.new_empty(y.shape, dtype=x_dtype)


OP = define(
    "softmax",
    __package__,
    fwd="(Tensor x, ScalarType out) -> Tensor",
    bwd="(Tensor dy, Tensor y, ScalarType x_dtype) -> Tensor",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "vendor", "eager"),
)


class _Softmax(torch.autograd.Function):
    """y = softmax(x); saves y."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, out: torch.dtype) -> torch.Tensor:
        y = OP.fwd(x, out)
        ctx.save_for_backward(y)
        ctx.x_dtype = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        return OP.bwd(dy, y, ctx.x_dtype), None


_SOFTMAX = Usual(_Softmax)


def _last(way: Way, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = (OP.fwd if way.record is None else way.record)(x, way.out)
    return y


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Softmax along one dimension.

    y = exp(x - max(x)) / sum(exp(x - max(x)))

    A row that holds only -inf has no softmax and gives NaN, as `torch.nn.functional.softmax` does; so does one with +inf or NaN.

    Args:
        x: [..., N, ...], fp32, bf16, fp16 or fp64, any strides.
        dim: the dimension of the sum. One that is not contiguous in memory costs a copy of `x`, and of the gradient.

    Returns:
        The shape of `x`, in its dtype (under autocast: autocast's dtype); contiguous when `dim` is the last dimension, else with `dim`
        innermost in memory.

    Precision: arithmetic and sums in fp32 (fp64 for fp64); one rounding, at the store. The backward starts from the stored y.
    Determinism: level 3; up to level 1 the order of sums depends on the shape and the device only.
    Raises: ArgumentError for an integer input or a dimension that `x` has not.
    Source: Bridle, Probabilistic Interpretation of Feedforward Classification Network Outputs, 1990; dx = y (dy - sum(y dy)).
    """
    way = _SOFTMAX.way(x, dim)
    if way is None:
        checks.floating("softmax", "x", x)
        checks.at_least_1d("softmax", "x", x)
        checks.one_of("softmax", "dim", dim, tuple(range(-x.dim(), x.dim())))
        if not settings.active():
            return plain.softmax(x, dim)
        way = _SOFTMAX.first((x,), (dim,), store_dtype(x))
    if dim in (-1, x.dim() - 1):
        return _last(way, x)
    return _last(way, x.movedim(dim, -1)).movedim(-1, dim)


OP.public = {"softmax": softmax}
