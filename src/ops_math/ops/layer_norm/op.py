"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ops_math import checks, recompute, settings
from ops_math.dispatch import absent, define, once_differentiable, store_dtype
from ops_math.ops.layer_norm import plain
from ops_math.ops.layer_norm.problem import LayerNormProblem
from ops_math.rng import Rng, drawn, draws, state_for
from ops_math.spec import compute_dtype, product
from ops_math.spec import dtype_name as name_of
from ops_math.usual import Usual


def _named(t: torch.Tensor | None) -> str:
    return "" if t is None else name_of(t.dtype)


def _problem_fwd(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    x_bias: torch.Tensor | None, state: torch.Tensor | None, eps: float, dropout_p: float, out: torch.dtype, narrow: torch.dtype | None,
) -> LayerNormProblem:  # fmt: skip
    names = name_of(x.dtype), _named(residual), _named(weight), _named(bias), _named(x_bias), name_of(out)
    return LayerNormProblem(product(x.shape[:-1]), x.shape[-1], *names, eps, dropout_p, narrow="" if narrow is None else name_of(narrow))


def _problem_bwd(
    dy: torch.Tensor, dy_narrow: torch.Tensor | None, dsum: torch.Tensor | None, total: torch.Tensor, weight: torch.Tensor | None,
    mean: torch.Tensor, rstd: torch.Tensor, state: torch.Tensor | None, x_dtype: torch.dtype, bias_dtype: torch.dtype,
    x_bias_dtype: torch.dtype, dropout_p: float, need_dtotal: bool, need_dx: bool, need_dw: bool, need_db: bool, need_dx_bias: bool,
) -> LayerNormProblem:  # fmt: skip
    residual = "" if x_dtype == total.dtype else name_of(total.dtype)
    bias, x_bias = name_of(bias_dtype) if need_db else "", name_of(x_bias_dtype) if need_dx_bias else ""
    names = name_of(x_dtype), residual, _named(weight), bias, x_bias, name_of(dy.dtype)
    need = need_dtotal, need_dx, need_dw, need_db, need_dx_bias
    return LayerNormProblem(product(total.shape[:-1]), total.shape[-1], *names, 0.0, dropout_p, _named(dsum), *need, _named(dy_narrow))


def _fake_fwd(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None,
    x_bias: torch.Tensor | None, state: torch.Tensor | None, eps: float, dropout_p: float, out: torch.dtype, narrow: torch.dtype | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    total = absent(x) if residual is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    mean, rstd = (x.new_empty((product(x.shape[:-1]),), dtype=compute_dtype(total.dtype)) for _ in range(2))
    return x.new_empty(x.shape, dtype=out), total, mean, rstd, absent(x) if narrow is None else x.new_empty(x.shape, dtype=narrow)


def _fake_bwd(
    dy: torch.Tensor, dy_narrow: torch.Tensor | None, dsum: torch.Tensor | None, total: torch.Tensor, weight: torch.Tensor | None,
    mean: torch.Tensor, rstd: torch.Tensor, state: torch.Tensor | None, x_dtype: torch.dtype, bias_dtype: torch.dtype,
    x_bias_dtype: torch.dtype, dropout_p: float, need_dtotal: bool, need_dx: bool, need_dw: bool, need_db: bool, need_dx_bias: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dtotal = total.new_empty(total.shape) if need_dtotal else absent(total)
    dx = total.new_empty(total.shape, dtype=x_dtype) if need_dx else absent(total)
    dw = weight.new_empty(weight.shape) if need_dw and weight is not None else absent(total)
    db = total.new_empty(total.shape[-1:], dtype=bias_dtype) if need_db else absent(total)
    return dtotal, dx, dw, db, total.new_empty(total.shape[-1:], dtype=x_bias_dtype) if need_dx_bias else absent(total)


OP = define(
    "layer_norm",
    __package__,
    fwd="(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? x_bias, Tensor? state, float eps, float dropout_p,"
    " ScalarType out, ScalarType? narrow) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    bwd="(Tensor dy, Tensor? dy_narrow, Tensor? dsum, Tensor total, Tensor? weight, Tensor mean, Tensor rstd, Tensor? state,"
    " ScalarType x_dtype, ScalarType bias_dtype, ScalarType x_bias_dtype, float dropout_p, bool need_dtotal, bool need_dx, bool need_dw,"
    " bool need_db, bool need_dx_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "vendor", "eager"),
)


class _LayerNorm(torch.autograd.Function):
    """y = norm(x); saves x, mean and rstd."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, out: torch.dtype
    ) -> torch.Tensor:
        y, _, mean, rstd, _ = OP.fwd(x, None, weight, bias, None, None, eps, 0.0, out, None)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = x.dtype if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dtypes = x.dtype, ctx.bias_dtype, x.dtype
        dx, _, dw, db, _ = OP.bwd(dy, None, None, x, weight, mean, rstd, None, *dtypes, 0.0, need_dx, False, need_dw, need_db, False)
        return dx if need_dx else None, dw if need_dw else None, db if need_db else None, None, None


class _AddLayerNorm(torch.autograd.Function):
    """s = dropout(x + x_bias) + residual, y = norm(s), and perhaps a narrow copy of y; saves s, mean, rstd and the state of the mask."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
        x_bias: torch.Tensor | None, state: torch.Tensor | None, eps: float, dropout_p: float, out: torch.dtype, narrow: torch.dtype | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        y, total, mean, rstd, copy = OP.fwd(x, residual, weight, bias, x_bias, state, eps, dropout_p, out, narrow)
        ctx.save_for_backward(total, weight, mean, rstd, state)
        ctx.set_materialize_grads(False)
        bias_dtype, x_bias_dtype = (x.dtype if t is None else t.dtype for t in (bias, x_bias))
        ctx.sum = Sum(x.dtype, bias_dtype, x_bias_dtype, residual.dtype, out, dropout_p)
        return (y, total) if narrow is None else (y, total, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None, dcopy: torch.Tensor | None = None) -> tuple[Any, ...]:
        grads = sum_backward(ctx.sum, ctx.saved_tensors, dy, dcopy, dsum, ctx.needs_input_grad[:5])
        return *grads, None, None, None, None, None


class Sum(NamedTuple):
    """Plain values that the backward of sum and norm needs: dtypes of x, the norm's bias, x_bias, the residual and y."""

    x: torch.dtype
    bias: torch.dtype
    x_bias: torch.dtype
    residual: torch.dtype
    out: torch.dtype
    dropout_p: float


def sum_backward(
    s: Sum, saved: Sequence[Any], dy: torch.Tensor | None, dy_narrow: torch.Tensor | None, dsum: torch.Tensor | None,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of x, residual, weight, bias and x_bias, each if `needed`.

    Args:
        s: as above.
        saved: the sum, weight, mean, rstd and the state of the mask.
        dy, dy_narrow, dsum: gradients of y, of its narrow copy and of the sum, each or all None.
        needed: of x, residual, weight, bias and x_bias.
    """
    total, weight, mean, rstd, state = saved
    if dy is None:
        if dy_narrow is None and dsum is None:
            return (None,) * 5
        dy, dy_narrow = torch.zeros_like(total, dtype=s.out) if dy_narrow is None else dy_narrow, None
    need_dx, need_dresidual, need_dw, need_db, need_dx_bias = needed
    differs = state is not None or s.x != total.dtype
    need = need_dresidual or (need_dx and not differs), need_dx and differs, need_dw, need_db, need_dx_bias
    dtotal, dx, dw, db, dx_bias = OP.bwd(dy, dy_narrow, dsum, total, weight, mean, rstd, state, s.x, s.bias, s.x_bias, s.dropout_p, *need)
    dresidual = dtotal if dtotal.dtype == s.residual else dtotal.to(s.residual)
    found = dx if differs else dtotal, dresidual, dw, db, dx_bias
    return tuple(g if wanted else None for g, wanted in zip(found, needed, strict=True))


def offer(ys: Sequence[torch.Tensor], total: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
    """Let y = norm(total), and its narrow copy, be made again in the backward. Ask `recompute.wanted` first."""
    for y in ys:

        def make(total: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, out: torch.dtype = y.dtype) -> torch.Tensor:
            return OP.fwd(total, None, weight, bias, None, None, eps, 0.0, out, None)[0]

        recompute.offer(y, make, total, weight, bias)


_LAYER_NORM, _ADD_LAYER_NORM = Usual(_LayerNorm), Usual(_AddLayerNorm)


def _check(operator: str, x: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    checks.floating(operator, "x", x)
    checks.at_least_1d(operator, "x", x)
    for name, value in parameters.items():
        if value is not None:
            checks.floating(operator, name, value)
            checks.shape(operator, name, value, x.shape[-1:], "the last dimension of x")
    checks.same_device(operator, "x", x, **parameters)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 1e-5) -> torch.Tensor:
    """Layer normalisation over the last dimension.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias

    Args:
        x: [..., N], fp32, bf16, fp16 or fp64, any strides.
        weight: [N], of any floating dtype, or None for no scaling.
        bias: [N], of any floating dtype, or None for no shift.
        eps: added to the variance.

    Returns:
        [..., N], contiguous, of the dtype of `x` (under autocast: autocast's dtype).

    Precision: arithmetic and sums in fp32 (fp64 for fp64); the variance from centred values; one rounding, at the store. The
    parameters' gradients are summed in fp32.
    Determinism: level 3; up to level 1 the order of sums depends on the shape and the device only.
    Raises: ArgumentError for an integer input, parameters of another width or device.
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016; backward derived in DESIGN.md.
    """
    way = _LAYER_NORM.way(x, weight, bias, eps)
    if way is None:
        _check("layer_norm", x, weight=weight, bias=bias)
        checks.small_number("layer_norm", "eps", eps)
        if not settings.active():
            return plain.layer_norm(x, weight, bias, eps=eps)
        way = _LAYER_NORM.first((x, weight, bias), (eps,), store_dtype(x))
    if way.record is None:
        return OP.fwd(x, None, weight, bias, None, None, eps, 0.0, way.out, None)[0]
    y: torch.Tensor = way.record(x, weight, bias, eps, way.out)
    if recompute.wanted():
        offer((y,), x, weight, bias, eps)
    return y


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    x_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    narrow_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Bias, dropout, residual addition and layer normalisation in one pass.

    s = dropout(x + x_bias) + residual;  y = (s - mean(s)) / sqrt(mean((s - mean(s))^2) + eps) * weight + bias

    Args:
        x: [..., N].
        residual: [..., N], of the same shape; its dtype may be wider (an fp32 residual stream).
        weight: [N] or None.
        bias: [N] or None.
        eps: added to the variance.
        dropout_p: chance of dropping an element of x + x_bias, in [0, 1); the mask is that of `dropout`, and is not stored.
        rng: where the mask comes from; None draws from PyTorch's generator, as in `dropout`. Not looked at when `dropout_p` is 0.
        x_bias: [N] or None, the bias of the linear layer whose product `x` is; added in fp32, unrounded.
        out_dtype: the dtype in which y is stored; by default that of `x` (under autocast: autocast's). A post-norm model, whose y is its
            residual stream, passes `residual.dtype`.
        narrow_dtype: also return y in this dtype, for the products that follow: one pass less forward, and two backward.

    Returns:
        (y, s), or (y, s, narrow): y as in `layer_norm`; s [..., N] of the wider dtype of `x` and `residual`, rounded once, and
        normalised as rounded; narrow [..., N], y rounded to `narrow_dtype`.

    Precision: as `layer_norm`.
    Determinism: as `layer_norm`; the mask depends on the key and the place alone.
    Raises: ArgumentError for shapes that differ (nothing is broadcast), integer inputs, parameters of another width or device, a
    `dropout_p` outside [0, 1), an Rng on another device.
    Source: as `layer_norm` and `dropout`.
    """
    way = _ADD_LAYER_NORM.way(x, residual, weight, bias, x_bias, eps, dropout_p)
    if way is None:
        _check("add_layer_norm", x, weight=weight, bias=bias, x_bias=x_bias)
        checks.small_number("add_layer_norm", "eps", eps)
        checks.floating("add_layer_norm", "residual", residual)
        checks.same_shape("add_layer_norm", "x", x, "residual", residual)
        checks.same_device("add_layer_norm", "x", x, residual=residual)
        checks.probability("add_layer_norm", "dropout_p", dropout_p)
        if not settings.active():
            options: dict[str, Any] = {"x_bias": x_bias, "out_dtype": out_dtype, "narrow_dtype": narrow_dtype}
            return plain.add_layer_norm(x, residual, weight, bias, eps=eps, dropout_p=dropout_p, rng=rng, **options)
        way = _ADD_LAYER_NORM.first((x, residual, weight, bias, x_bias), (eps, dropout_p), store_dtype(x))
    if dropout_p and rng is None and x_bias is None and draws(x):
        x, dropout_p = drawn("add_layer_norm", x, dropout_p), 0.0
    state = state_for("add_layer_norm", rng, x.device) if dropout_p else None
    out = out_dtype or way.out
    if way.record is None:
        y, total, _, _, narrow = OP.fwd(x, residual, weight, bias, x_bias, state, eps, dropout_p, out, narrow_dtype)
        return (y, total) if narrow_dtype is None else (y, total, narrow)
    results: tuple[torch.Tensor, ...] = way.record(x, residual, weight, bias, x_bias, state, eps, dropout_p, out, narrow_dtype)
    if recompute.wanted():
        offer((results[0], *results[2:]), results[1], weight, bias, eps)
    return results


OP.public = {"layer_norm": layer_norm, "add_layer_norm": add_layer_norm}
