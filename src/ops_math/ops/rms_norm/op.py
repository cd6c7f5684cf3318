"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, recompute, settings
from ops_math.dispatch import absent, define, once_differentiable, store_dtype
from ops_math.ops.rms_norm import plain
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.spec import compute_dtype, product
from ops_math.spec import dtype_name as name_of
from ops_math.usual import Usual


def _problem_fwd(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, offset: float, out: torch.dtype
) -> RmsNormProblem:
    cols = x.shape[-1]
    return RmsNormProblem(
        product(x.shape[:-1]),
        cols,
        name_of(x.dtype),
        name_of(residual.dtype) if residual is not None else "",
        name_of(weight.dtype) if weight is not None else "",
        name_of(out),
        eps,
        offset,
    )


def _problem_bwd(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dw: bool,
) -> RmsNormProblem:
    residual = name_of(x.dtype) if dsum is not None else ""
    return RmsNormProblem(
        product(x.shape[:-1]),
        x.shape[-1],
        name_of(x.dtype),
        residual,
        name_of(weight.dtype) if weight is not None else "",
        name_of(dy.dtype),
        eps,
        offset,
        need_dx,
        need_dw,
    )


def _fake_fwd(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, offset: float, out: torch.dtype
) -> tuple[torch.Tensor, ...]:
    total = absent(x) if residual is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape, dtype=out), total, x.new_empty((product(x.shape[:-1]),), dtype=compute_dtype(x.dtype))


def _fake_bwd(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, ...]:
    dw = absent(x) if weight is None or not need_dw else weight.new_empty(weight.shape)
    return (x.new_empty(x.shape) if need_dx else absent(x)), dw


OP = define(
    "rms_norm",
    __package__,
    fwd="(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, ScalarType out) -> (Tensor, Tensor, Tensor)",
    bwd="(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, float eps, float weight_offset, bool need_dx, bool need_dw)"
    " -> (Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "vendor", "eager", "inductor"),
)


class _RmsNorm(torch.autograd.Function):
    """y = norm(x); saves x and rstd. `options`: eps, weight_offset, out, as one argument, since each costs autograd 0.15 us."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, options: tuple[float, float, torch.dtype]) -> torch.Tensor:
        y, _, rstd = OP.fwd(x, None, weight, *options)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        eps, offset, _ = ctx.options
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx, dw = OP.bwd(dy, None, x, weight, rstd, eps, offset, need_dx, need_dw)
        return dx if need_dx else None, dw if need_dw else None, None


class _AddRmsNorm(torch.autograd.Function):
    """s = x + residual, y = norm(s); saves s and rstd. `options` as above."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, options: tuple[float, float, torch.dtype]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total, rstd = OP.fwd(x, residual, weight, *options)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.options = *options, x.dtype, residual.dtype
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[Any, ...]:
        total, weight, rstd = ctx.saved_tensors
        eps, offset, out, x_dtype, residual_dtype = ctx.options
        wants_dx, wants_dresidual, need_dw, _ = ctx.needs_input_grad
        if dy is None:
            if dsum is None:
                return (None,) * 4
            dy = torch.zeros_like(total, dtype=out)
        dtotal, dw = OP.bwd(dy, dsum, total, weight, rstd, eps, offset, wants_dx or wants_dresidual, need_dw)
        dx = None if not wants_dx else dtotal if dtotal.dtype == x_dtype else dtotal.to(x_dtype)
        dresidual = None if not wants_dresidual else dtotal if dtotal.dtype == residual_dtype else dtotal.to(residual_dtype)
        return dx, dresidual, dw if need_dw else None, None


def offer(y: torch.Tensor, total: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> None:
    """Let y = norm(total) be made again in the backward. Ask `recompute.wanted` first."""
    out = y.dtype
    recompute.offer(y, lambda total, weight: OP.fwd(total, None, weight, eps, offset, out)[0], total, weight)


_RMS_NORM, _ADD_RMS_NORM = Usual(_RmsNorm), Usual(_AddRmsNorm)


def _check(operator: str, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    checks.floating(operator, "x", x)
    checks.at_least_1d(operator, "x", x)
    checks.small_number(operator, "eps", eps)
    if weight is not None:
        checks.floating(operator, "weight", weight)
        checks.shape(operator, "weight", weight, x.shape[-1:], "the last dimension of x")
        checks.same_device(operator, "x", x, weight=weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, weight_offset: float = 0.0) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension.

    y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)

    Args:
        x: [..., N], fp32, bf16, fp16 or fp64, any strides.
        weight: [N], of any floating dtype, or None for no scaling.
        eps: added to the mean square.
        weight_offset: added to the weight; 1.0 for Gemma's (1 + w).

    Returns:
        [..., N], contiguous, of the dtype of `x` (under autocast: autocast's dtype).

    Precision: arithmetic and sums in fp32 (fp64 for fp64); one rounding, at the store. The weight's gradient is summed in fp32.
    Determinism: level 3; up to level 1 the order of sums depends on the shape and the device only.
    Raises: ArgumentError for an integer input, a weight of another width or device.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; backward derived in DESIGN.md.
    """
    way = _RMS_NORM.way(x, weight, eps)
    if way is None:
        _check("rms_norm", x, weight, eps)
        if not settings.active():
            return plain.rms_norm(x, weight, eps=eps, weight_offset=weight_offset)
        way = _RMS_NORM.first((x, weight), (eps,), store_dtype(x))
    if way.record is None:
        return OP.fwd(x, None, weight, eps, weight_offset, way.out)[0]
    y: torch.Tensor = way.record(x, weight, (eps, weight_offset, way.out))
    if recompute.wanted():
        offer(y, x, weight, eps, weight_offset)
    return y


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual addition and root-mean-square normalisation in one pass.

    s = x + residual;  y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset)

    Args:
        x: [..., N].
        residual: [..., N], of the same shape; its dtype may be wider (an fp32 residual stream).
        weight: [N] or None.
        eps: added to the mean square.
        weight_offset: added to the weight.
        out_dtype: the dtype in which y is stored; by default that of `x` (under autocast: autocast's). A post-norm model, whose y is its
            residual stream, passes `residual.dtype`.

    Returns:
        (y, s): y as in `rms_norm`; s [..., N] of the wider dtype of `x` and `residual`, rounded once, and normalised as rounded.

    Precision: as `rms_norm`.
    Determinism: as `rms_norm`.
    Raises: ArgumentError for shapes that differ (nothing is broadcast), integer inputs, a weight of another width or device.
    Source: as `rms_norm`.
    """
    way = _ADD_RMS_NORM.way(x, residual, weight, eps)
    if way is None:
        _check("add_rms_norm", x, weight, eps)
        checks.floating("add_rms_norm", "residual", residual)
        checks.same_shape("add_rms_norm", "x", x, "residual", residual)
        checks.same_device("add_rms_norm", "x", x, residual=residual)
        if not settings.active():
            return plain.add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset, out_dtype=out_dtype)
        way = _ADD_RMS_NORM.first((x, residual, weight), (eps,), store_dtype(x))
    out = out_dtype or way.out
    if way.record is None:
        y, total, _ = OP.fwd(x, residual, weight, eps, weight_offset, out)
        return y, total
    y, total = way.record(x, residual, weight, (eps, weight_offset, out))
    if recompute.wanted():
        offer(y, total, weight, eps, weight_offset)
    return y, total


OP.public = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}
