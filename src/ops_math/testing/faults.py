"""Generic faults to plant in an implementation: a budget that lets one live is no budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ops_math.dispatch import Operator

Launcher = Callable[..., Any]


class Fault(NamedTuple):
    """A fault: `wrap(launcher)` gives a launcher with it; it is planted in `phase`.

    `shows_in` lists the dtypes in which it can be seen at all; the rest drown it in rounding that the policy allows.
    """

    name: str
    phase: str
    wrap: Callable[[Launcher], Launcher]
    shows_in: tuple[str, ...] = ("fp32", "bf16", "fp16")


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def on_output(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Launcher], Launcher]:
    """Change one result after the launch."""

    def wrap(launcher: Launcher) -> Launcher:
        def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
            values = list(_tuple(launcher(problem, config, *tensors)))
            if index < len(values) and values[index] is not None and values[index].numel():
                values[index] = change(values[index])
            return tuple(values) if len(values) > 1 else values[0]

        return faulty

    return wrap


def on_inputs(change: Callable[[list[Any]], list[Any]]) -> Callable[[Launcher], Launcher]:
    """Change the tensors before the launch."""

    def wrap(launcher: Launcher) -> Launcher:
        return lambda problem, config, *tensors: launcher(problem, config, *change(list(tensors)))

    return wrap


def on_problem(field: str, change: Callable[[Any], Any]) -> Callable[[Launcher], Launcher]:
    """Change one field of the problem before the launch, where it has that field."""

    def wrap(launcher: Launcher) -> Launcher:
        def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
            if hasattr(problem, field):
                problem = problem._replace(**{field: change(getattr(problem, field))})
            return launcher(problem, config, *tensors)

        return faulty

    return wrap


def _zero_last(dim: int, count: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        if t.dim() <= abs(dim) - (dim < 0):
            return t
        t = t.clone()
        t.narrow(dim, t.shape[dim] - min(count, t.shape[dim]), min(count, t.shape[dim])).zero_()
        return t

    return change


def _shift_rows(t: torch.Tensor) -> torch.Tensor:
    return torch.roll(t.reshape(-1, t.shape[-1]), 1, 0).reshape(t.shape).clone() if t.dim() else t


def _shift_columns(t: torch.Tensor) -> torch.Tensor:
    return torch.roll(t, 1, -1).clone() if t.dim() else t


def _poison(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[-1] = float("nan")
    return t


def _first_gradient_for_all(tensors: list[Any]) -> list[Any]:
    dy = tensors[0]
    if dy.dim() == 0 or dy.shape[0] == 0:
        return tensors
    return [dy[:1].expand_as(dy).contiguous(), *tensors[1:]]


def _last_row_dropped(tensors: list[Any]) -> list[Any]:
    return [_zero_last(0)(tensors[0]), *tensors[1:]] if tensors[0].dim() else tensors


def _narrow_inputs(tensors: list[Any]) -> list[Any]:
    return [t.to(torch.bfloat16).to(t.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]


def _swap_first_two(launcher: Launcher) -> Launcher:
    def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
        values = list(_tuple(launcher(problem, config, *tensors)))
        if len(values) > 1 and values[0].shape == values[1].shape:
            values[0], values[1] = values[1], values[0]
        return tuple(values) if len(values) > 1 else values[0]

    return faulty


def _stale(launcher: Launcher) -> Launcher:
    kept: dict[Any, Any] = {}

    def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
        fresh = launcher(problem, config, *tensors)
        return kept.setdefault(problem, fresh)

    return faulty


FAULTS: tuple[Fault, ...] = (
    Fault("result scaled by 1.01", "fwd", on_output(0, lambda t: t * 1.01)),
    Fault("last row of the result not written", "fwd", on_output(0, _zero_last(0))),
    Fault("last column of the result not written", "fwd", on_output(0, _zero_last(-1))),
    Fault("rows of the result shifted by one", "fwd", on_output(0, _shift_rows)),
    Fault("columns of the result shifted by one", "fwd", on_output(0, _shift_columns)),
    Fault("last element of the result is NaN", "fwd", on_output(0, _poison)),
    Fault("result of the call before", "fwd", _stale),
    Fault("inputs rounded to bf16", "fwd", on_inputs(_narrow_inputs), ("fp32",)),
    Fault("eps ten times too large", "fwd", on_problem("eps", lambda v: v * 10)),
    *(Fault(f"gradient {i} scaled by 1.01", "bwd", on_output(i, lambda t: t * 1.01)) for i in range(4)),
    *(Fault(f"gradient {i} of opposite sign", "bwd", on_output(i, torch.neg)) for i in range(2)),
    *(Fault(f"last row of gradient {i} not written", "bwd", on_output(i, _zero_last(0))) for i in range(2)),
    *(Fault(f"last column of gradient {i} not written", "bwd", on_output(i, _zero_last(-1))) for i in range(2)),
    *(Fault(f"gradient {i} is zero", "bwd", on_output(i, torch.zeros_like)) for i in range(4)),
    Fault("rows of gradient 0 shifted by one", "bwd", on_output(0, _shift_rows)),
    Fault("gradient of the call before", "bwd", _stale),
    Fault("first output gradient used for every row", "bwd", on_inputs(_first_gradient_for_all)),
    Fault("last row left out of the backward", "bwd", on_inputs(_last_row_dropped)),
    Fault("first two gradients swapped", "bwd", _swap_first_two),
    Fault("saved tensors rounded to bf16", "bwd", on_inputs(_narrow_inputs), ("fp32",)),
)


class Trace:
    """Whether a planted fault changed any result at all; one that never does is not applicable to the operator."""

    def __init__(self) -> None:
        self.changed = False


def _watched(honest: Launcher, faulty: Launcher, trace: Trace) -> Launcher:
    def launcher(problem: Any, config: Any, *tensors: Any) -> Any:
        wrong = faulty(problem, config, *tensors)
        if not trace.changed:
            right = _tuple(honest(problem, config, *tensors))
            trace.changed = any(not torch.equal(a, b) for a, b in zip(_tuple(wrong), right, strict=True))
        return wrong

    return launcher


@contextmanager
def planted(operator: Operator, implementation: str, fault: Fault) -> Iterator[Trace]:
    """While inside, the implementation of the operator has the fault; the trace tells whether it ever mattered."""
    target = next(i for i in operator.implementations() if i.name == implementation)
    honest = target.launcher(fault.phase)
    trace = Trace()
    target.replaced[fault.phase] = _watched(honest, fault.wrap(honest), trace)
    operator.forget()
    try:
        yield trace
    finally:
        del target.replaced[fault.phase]
        operator.forget()
