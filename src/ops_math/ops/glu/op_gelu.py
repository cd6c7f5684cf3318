"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, define, needs_grad, once_differentiable, store_dtype
from ops_math.ops.glu import levels_gelu, plain_gelu
from ops_math.ops.glu.problem_gelu import GeluProblem
from ops_math.spec import dtype_name as name_of
from ops_math.spec import product
from ops_math.usual import Usual


def _problem_fwd(x: torch.Tensor, bias: torch.Tensor | None, approximate: str, out: torch.dtype) -> GeluProblem:
    return GeluProblem(
        product(x.shape[:-1]), x.shape[-1], name_of(x.dtype), name_of(bias.dtype) if bias is not None else "", name_of(out), approximate
    )


def _problem_bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, approximate: str, need_dx: bool, need_dbias: bool, need_y: bool
) -> GeluProblem:
    return _problem_fwd(x, bias, approximate, dy.dtype)._replace(need_dx=need_dx, need_dbias=need_dbias and bias is not None, need_y=need_y)


def _fake_fwd(x: torch.Tensor, bias: torch.Tensor | None, approximate: str, out: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=out)


def _fake_bwd(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, approximate: str, need_dx: bool, need_dbias: bool, need_y: bool
) -> tuple[torch.Tensor, ...]:
    dbias = bias.new_empty(bias.shape) if bias is not None and need_dbias else absent(x)
    return (x.new_empty(x.shape) if need_dx else absent(x)), dbias, (dy.new_empty(dy.shape) if need_y else absent(dy))


OP = define(
    "gelu",
    __package__,
    fwd="(Tensor x, Tensor? bias, str approximate, ScalarType out) -> Tensor",
    bwd="(Tensor dy, Tensor x, Tensor? bias, str approximate, bool need_dx, bool need_dbias, bool need_y) -> (Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "vendor", "eager"),
    variant="_gelu",
)


class _Gelu(torch.autograd.Function):
    """y = gelu(x + bias); saves x and bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, approximate: str, out: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return OP.fwd(x, bias, approximate, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, bias = ctx.saved_tensors
        need_dx, need_dbias = ctx.needs_input_grad[:2]
        dx, dbias, _ = OP.bwd(dy, x, bias, ctx.approximate, need_dx, need_dbias, False)
        return dx if need_dx else None, dbias if need_dbias else None, None, None


_GELU = Usual(_Gelu)


def gelu(x: torch.Tensor, bias: torch.Tensor | None = None, *, approximate: str = "none") -> torch.Tensor:
    """Gaussian error linear unit, with an optional bias added first.

    y = gelu(x + bias),  gelu(z) = z Phi(z), Phi the normal distribution function

    Args:
        x: [..., N], fp32, bf16, fp16 or fp64, any strides.
        bias: [N] of any floating dtype, or None. A linear layer's bias, kept out of the matrix product and added here in fp32.
        approximate: "none" for the error function, "tanh" for z / 2 (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))).

    Returns:
        [..., N], contiguous, of the dtype of `x` (under autocast: autocast's dtype).

    Precision: arithmetic in fp32 (fp64 for fp64); one rounding, at the store. The bias's gradient is the sum over rows of unrounded
        values, in fp32. An input of -inf gives NaN, as in PyTorch.
    Determinism: level 3 on a GPU, 2 on a CPU and for a bias that learns, whose sum is taken token block by token block from level 2 on.
    Raises: ArgumentError for an integer input, a bias of another width or device, an unknown `approximate`; UnsupportedError for a bias
        that learns at level 3.
    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016. dx = dy (Phi(z) + z phi(z)), dbias its sum over rows.
    """
    way = _GELU.way(x, bias, approximate)
    if way is None:
        checks.floating("gelu", "x", x)
        checks.at_least_1d("gelu", "x", x)
        checks.one_of("gelu", "approximate", approximate, ("none", "tanh"))
        if bias is not None:
            checks.floating("gelu", "bias", bias)
            checks.shape("gelu", "bias", bias, x.shape[-1:], "the last dimension of x")
            checks.same_device("gelu", "x", x, bias=bias)
        if not settings.active():
            return plain_gelu.gelu(x, bias, approximate=approximate)
        if bias is not None and bias.requires_grad and settings.determinism_level() >= 3 and needs_grad(x, bias):
            # In words here, not in the backward.
            checks.refuse("gelu at determinism level 3", levels_gelu.BIAS, "Add it before, om.gelu(x + bias), or ask for level 2.")
        way = _GELU.first((x, bias), (approximate,), store_dtype(x))
    y: torch.Tensor = (OP.fwd if way.record is None else way.record)(x, bias, approximate, way.out)
    return y


OP.public = {"gelu": gelu}
