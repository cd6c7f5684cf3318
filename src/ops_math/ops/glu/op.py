"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, define, once_differentiable, store_dtype
from ops_math.ops.glu import plain
from ops_math.ops.glu.problem import GluProblem
from ops_math.spec import dtype_name as name_of
from ops_math.spec import product
from ops_math.usual import Usual, Way

GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _width(gate: torch.Tensor, packing: str) -> int:
    return gate.shape[-1] // 2 if packing else gate.shape[-1]


def _problem_fwd(gate: torch.Tensor, up: torch.Tensor | None, activation: str, packing: str, keep: bool, out: torch.dtype) -> GluProblem:
    rows, cols, up_name = product(gate.shape[:-1]), _width(gate, packing), "" if up is None else name_of(up.dtype)
    return GluProblem(rows, cols, name_of(gate.dtype), up_name, name_of(out), activation, packing, keep=keep)


def _problem_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None,
    activation: str, packing: str, need_dgate: bool, need_dup: bool, need_y: bool,
) -> GluProblem:  # fmt: skip
    p = _problem_fwd(gate, up, activation, packing, act is not None, dy.dtype)
    return p._replace(need_dgate=need_dgate, need_dup=need_dgate if up is None else need_dup, need_y=need_y)


def _fake_fwd(
    gate: torch.Tensor, up: torch.Tensor | None, activation: str, packing: str, keep: bool, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*gate.shape[:-1], _width(gate, packing))
    return gate.new_empty(shape, dtype=out), gate.new_empty(shape, dtype=out) if keep else absent(gate, out)


def _fake_bwd(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None,
    activation: str, packing: str, need_dgate: bool, need_dup: bool, need_y: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dgate = gate.new_empty(gate.shape) if need_dgate else absent(gate)
    dup = up.new_empty(up.shape) if up is not None and need_dup else absent(gate if up is None else up)
    return dgate, dup, dy.new_empty(dy.shape) if need_y else absent(dy)


OP = define(
    "glu",
    __package__,
    fwd="(Tensor gate, Tensor? up, str activation, str packing, bool keep, ScalarType out) -> (Tensor, Tensor)",
    bwd="(Tensor dy, Tensor gate, Tensor? up, Tensor? act, str activation, str packing, bool need_dgate, bool need_dup, bool need_y)"
    " -> (Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "eager", "vendor", "inductor"),
)


class _Glu(torch.autograd.Function):
    """y = activation(gate) up; saves the inputs.

    On a GPU the backward computes the activation again in registers, for nothing. On a CPU that would be a pass of its own, slower
    than PyTorch, so there it is kept, as PyTorch keeps it.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, activation: str, packing: str, out: torch.dtype) -> torch.Tensor:
        keep = gate.device.type == "cpu"
        y, act = OP.fwd(gate, up, activation, packing, keep, out)
        ctx.save_for_backward(gate, up, act if keep else None)
        ctx.options = activation, packing
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        need_dgate, need_dup = ctx.needs_input_grad[:2]
        dgate, dup, _ = OP.bwd(dy, *ctx.saved_tensors, *ctx.options, need_dgate, need_dup, False)
        return dgate if need_dgate else None, dup if need_dup else None, None, None, None


_SWIGLU, _SWIGLU_PACKED, _GEGLU, _GEGLU_PACKED = (Usual(_Glu) for _ in range(4))


def _run(way: Way, gate: torch.Tensor, up: torch.Tensor | None, activation: str, packing: str) -> torch.Tensor:
    if way.record is None:
        return OP.fwd(gate, up, activation, packing, False, way.out)[0]
    y: torch.Tensor = way.record(gate, up, activation, packing, way.out)
    return y


def _check_pair(operator: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    checks.floating(operator, "gate", gate)
    checks.at_least_1d(operator, "gate", gate)
    checks.floating(operator, "up", up)
    checks.same_shape(operator, "gate", gate, "up", up)
    checks.same_device(operator, "gate", gate, up=up)


def _check_packed(operator: str, gate_up: torch.Tensor) -> None:
    checks.floating(operator, "gate_up", gate_up)
    checks.at_least_1d(operator, "gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        got = f"shape {checks.shape_text(gate_up.shape)}"
        checks.fail(
            operator, "gate_up", "of an even last dimension (gate and up)", got, "Concatenate gate and up along the last dimension."
        )


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Gated linear unit with the SiLU activation.

    y = silu(gate) * up,  silu(x) = x / (1 + exp(-x))

    Args:
        gate: [..., N], fp32, bf16, fp16 or fp64, any strides.
        up: [..., N], of the same shape; any floating dtype.

    Returns:
        [..., N], contiguous, of the wider dtype of the two (under autocast: autocast's dtype).

    Precision: arithmetic in fp32 (fp64 for fp64); one rounding, at the store. As in PyTorch, a gate of -inf gives NaN, and
        infinite gates give NaN gradients. On a GPU the backward keeps the inputs only.
    Determinism: level 3 on a GPU, 2 on a CPU, where PyTorch works on the last columns of a row with other instructions.
    Raises: ArgumentError for shapes that differ (nothing is broadcast), integer inputs, another device.
    Source: Shazeer, GLU Variants Improve Transformer, 2020. dgate = dy up s (1 + gate (1 - s)), dup = dy gate s, s = sigmoid(gate).
    """
    way = _SWIGLU.way(gate, up)
    if way is None:
        _check_pair("swiglu", gate, up)
        if not settings.active():
            return plain.swiglu(gate, up)
        way = _SWIGLU.first((gate, up), (), torch.promote_types(store_dtype(gate), store_dtype(up)))
    return _run(way, gate, up, "silu", "")


def swiglu_packed(gate_up: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """`swiglu` of gate and up packed in one tensor, as one matrix product makes them; the gradient is packed alike.

    Args:
        gate_up: [..., 2N]: gate in the first N columns and up in the last N, or, interleaved, gate in columns 0, 2, ... and up in
            1, 3, ... (which can be cut along columns for tensor parallelism).
        interleaved: how gate and up are packed.

    Returns:
        [..., N], contiguous, of the dtype of `gate_up` (under autocast: autocast's dtype).

    Precision: as `swiglu`.
    Determinism: as `swiglu`.
    Raises: ArgumentError for an odd last dimension or an integer input.
    Source: as `swiglu`.
    """
    way = _SWIGLU_PACKED.way(gate_up)
    if way is None:
        _check_packed("swiglu_packed", gate_up)
        if not settings.active():
            return plain.swiglu_packed(gate_up, interleaved=interleaved)
        way = _SWIGLU_PACKED.first((gate_up,), (), store_dtype(gate_up))
    return _run(way, gate_up, None, "silu", "interleaved" if interleaved else "halves")


def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """Gated linear unit with the GELU activation.

    y = gelu(gate) * up,  gelu(x) = x Phi(x), Phi the normal distribution function

    Args:
        gate: [..., N], fp32, bf16, fp16 or fp64, any strides.
        up: [..., N], of the same shape; any floating dtype.
        approximate: "tanh" for x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), "none" for the error function.

    Returns:
        [..., N], contiguous, of the wider dtype of the two (under autocast: autocast's dtype).

    Precision: arithmetic in fp32 (fp64 for fp64); one rounding, at the store. A gate of -inf gives NaN, as in PyTorch.
    Determinism: as `swiglu`.
    Raises: ArgumentError for shapes that differ (nothing is broadcast), integer inputs, another device, an unknown `approximate`.
    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016; Shazeer, 2020.
    """
    way = _GEGLU.way(gate, up, approximate)
    if way is None:
        _check_pair("geglu", gate, up)
        checks.one_of("geglu", "approximate", approximate, tuple(GELU))
        if not settings.active():
            return plain.geglu(gate, up, approximate=approximate)
        way = _GEGLU.first((gate, up), (approximate,), torch.promote_types(store_dtype(gate), store_dtype(up)))
    return _run(way, gate, up, GELU[approximate], "")


def geglu_packed(gate_up: torch.Tensor, *, approximate: str = "tanh", interleaved: bool = False) -> torch.Tensor:
    """`geglu` of gate and up packed in one tensor; the gradient is packed alike.

    Args:
        gate_up: [..., 2N], as in `swiglu_packed`.
        approximate: as in `geglu`.
        interleaved: how gate and up are packed.

    Returns:
        [..., N], contiguous, of the dtype of `gate_up` (under autocast: autocast's dtype).

    Precision: as `geglu`.
    Determinism: as `swiglu`.
    Raises: ArgumentError for an odd last dimension, an integer input, an unknown `approximate`.
    Source: as `geglu`.
    """
    way = _GEGLU_PACKED.way(gate_up, approximate)
    if way is None:
        _check_packed("geglu_packed", gate_up)
        checks.one_of("geglu_packed", "approximate", approximate, tuple(GELU))
        if not settings.active():
            return plain.geglu_packed(gate_up, approximate=approximate, interleaved=interleaved)
        way = _GEGLU_PACKED.first((gate_up,), (approximate,), store_dtype(gate_up))
    return _run(way, gate_up, None, GELU[approximate], "interleaved" if interleaved else "halves")


OP.public = {"swiglu": swiglu, "swiglu_packed": swiglu_packed, "geglu": geglu, "geglu_packed": geglu_packed}
