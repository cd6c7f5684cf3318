"""Plants the faults of `faults` in any differentiable function, not only in launchers of ours.

The function becomes one autograd node. Its forward is a launcher `(numbers, None, *tensors) -> outputs`; its backward, which runs the
function again and lets autograd differentiate it, is a launcher `(numbers, None, *output gradients, *tensors) -> gradients`. So whatever
wraps a launcher wraps these: a fault can drop a block of rows from a sum, round what was saved, or use one output gradient for all.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ops_math.spec import Call
from ops_math.testing.faults import Fault, Trace, on_problem, watched

_named_tuple: Callable[..., Any] = namedtuple  # whose fields are the call's own, which no type checker can know


class _Plan(NamedTuple):
    """A call taken apart: where its tensors go, and what else it was given."""

    op: Callable[..., Any]
    template: Call
    places: tuple[int | str, ...]
    numbers: Any
    fault: Fault
    trace: Trace
    learning: tuple[int, ...]

    def again(self, numbers: Any, tensors: Any) -> Any:
        """The call with these numbers and tensors in their places."""
        at = {**dict(zip(self.places, tensors, strict=True)), **{_key(n): getattr(numbers, n) for n in numbers._fields if n != "shapes"}}
        args = tuple(at.get(i, v) for i, v in enumerate(self.template.args))
        return self.op(*args, **{k: at.get(k, v) for k, v in self.template.kwargs.items()})

    def forward(self, numbers: Any, config: None, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """The honest launcher of the forward."""
        with torch.no_grad():
            return _tuple(self.again(numbers, tensors))

    def backward(self, numbers: Any, config: None, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """The honest launcher of the backward: the gradient of each tensor that learns, in order."""
        count = len(self.places)
        dys, saved = tensors[:-count], [t.detach() for t in tensors[-count:]]
        for i in self.learning:
            saved[i].requires_grad_()
        with torch.enable_grad():
            outs = [o for o in _tuple(self.again(numbers, saved)) if isinstance(o, torch.Tensor) and o.is_floating_point()]
            pairs = [(o, dy) for o, dy in zip(outs, dys, strict=True) if o.requires_grad]
            if not pairs:
                return (None,) * len(self.learning)
            fed = [dy for _, dy in pairs]
            return torch.autograd.grad([o for o, _ in pairs], [saved[i] for i in self.learning], fed, allow_unused=True)


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _key(name: str) -> int | str:
    return int(name[3:]) if name.startswith("arg") and name[3:].isdigit() else name


class _Planted(torch.autograd.Function):
    """One node with the fault in it."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor) -> Any:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        launcher = plan.forward
        if plan.fault.phase == "fwd":
            launcher = watched(launcher, plan.fault.wrap(launcher), plan.trace)
        outs = _tuple(launcher(plan.numbers, None, *tensors))
        ctx.floating = [i for i, o in enumerate(outs) if isinstance(o, torch.Tensor) and o.is_floating_point()]
        fixed = [o for o in outs if isinstance(o, torch.Tensor) and not o.is_floating_point()]
        ctx.mark_non_differentiable(*fixed)
        return tuple(o.view_as(o) if isinstance(o, torch.Tensor) and any(o is t for t in tensors) else o for o in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> Any:
        plan, tensors = ctx.plan, ctx.saved_tensors
        launcher = plan.backward
        if plan.fault.phase == "bwd":
            launcher = watched(launcher, plan.fault.wrap(launcher), plan.trace)
        found = _tuple(launcher(plan.numbers, None, *(dys[i] for i in ctx.floating), *tensors))
        grads: list[Any] = [None] * len(tensors)
        for i, gradient in zip(plan.learning, found, strict=True):
            grads[i] = gradient
        return None, *grads


def planted_in(op: Callable[..., Any], fault: Fault, trace: Trace) -> Callable[..., Any]:
    """The function with the fault in it; the trace tells whether it ever mattered.

    Args:
        op: a function of tensors and numbers that returns a tensor or a tuple of tensors. Tensors in lists stay as they are.
        fault: what to plant.
        trace: filled while the function runs.
    """
    kept = _kept(fault)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        places = tuple(k for k, v in items if isinstance(v, torch.Tensor))
        tensors = [v for _, v in items if isinstance(v, torch.Tensor)]
        given = {f"arg{k}" if isinstance(k, int) else k: v for k, v in items if isinstance(v, int | float) or v is None}
        kind = _named_tuple("Numbers", ("shapes", *given))
        shapes = tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
        learning = tuple(i for i, t in enumerate(tensors) if t.requires_grad)
        plan = _Plan(op, Call(args, kwargs), places, kind(shapes, **given), kept, trace, learning)
        outs = _Planted.apply(plan, *tensors)
        return outs if len(outs) > 1 else outs[0]

    return faulty


def _kept(fault: Fault) -> Fault:
    """The fault with one wrapper for all calls, so that one with a memory (a stale buffer) keeps it."""
    current: dict[str, Callable[..., Any]] = {}
    wrapped = fault.wrap(lambda *given: current["launcher"](*given))

    def wrap(launcher: Callable[..., Any]) -> Callable[..., Any]:
        current["launcher"] = launcher
        return wrapped

    return fault._replace(wrap=wrap)


def number_faults(calls: list[Call]) -> tuple[Fault, ...]:
    """Faults of the numbers and options that these calls were given: each number ten times too large, each option turned around."""
    found: dict[str, Fault] = {}
    for call in calls:
        items: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
        for key, value in items:
            name = f"arg{key}" if isinstance(key, int) else key
            if isinstance(value, bool):
                found[name] = Fault(f"option {name} turned around", "fwd", on_problem(name, lambda v: not v))
            elif isinstance(value, float):
                found[name] = Fault(f"number {name} ten times too large", "fwd", on_problem(name, lambda v: v * 10))
    return tuple(found.values())
