"""The problems that a step meets, each with the arguments of its first call kept in the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops_math.schedule.live import LIVE

MOST_STRETCHED = 4  # times its elements that a view's storage may span before its copy becomes contiguous


class Met:
    """One problem: its operator and phase, how often a step meets it, and arguments to measure it with."""

    def __init__(self, op: str, phase: str, problem: Any, device: torch.device, args: Sequence[Any] | None) -> None:
        self.op, self.phase, self.problem, self.device, self.args = op, phase, problem, device, args
        self.count = 1

    def args_on_device(self) -> list[Any]:
        """The arguments, moved to where they came from."""
        assert self.args is not None
        return [laid_out_like(a, a, self.device) if isinstance(a, torch.Tensor) else a for a in self.args]


class Collector(TorchDispatchMode):
    """Sees every call of our operators below autograd and lets it run.

    Args:
        most_bytes: how much to keep [B]; what is larger is met, and measured never.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.met: dict[tuple[Any, ...], Met] = {}
        self.left = most_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "ops_math":
            self._note(func._schema.name.removeprefix("ops_math::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        op, _, phase = name.rpartition("_")
        operator = LIVE.operators.get(op)
        if operator is None or phase not in operator.phases or type(args[0]) not in (torch.Tensor, torch.nn.Parameter):
            return
        problem = operator.phases[phase].problem_of(*args)
        key = (op, phase, problem, args[0].device)
        found = self.met.get(key)
        if found is not None:
            found.count += 1
            return
        size = sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
        kept = None
        if size <= self.left:
            self.left -= size
            kept = [laid_out_like(a, a, torch.device("cpu")) if isinstance(a, torch.Tensor) else a for a in args]
        self.met[key] = Met(op, phase, problem, args[0].device, kept)


def laid_out_like(values: torch.Tensor, layout: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device with the strides of `layout`, also where it is expanded; contiguous where those would span too much memory."""
    values = values.detach()
    expanded = [dim for dim, stride in enumerate(layout.stride()) if stride == 0 and layout.shape[dim] > 1]
    base = values
    for dim in expanded:
        base = base.narrow(dim, 0, 1)
    span = 1 + sum((n - 1) * s for n, s in zip(base.shape, layout.stride(), strict=True)) if base.numel() else 0
    if span > MOST_STRETCHED * max(base.numel(), 1):
        return values.to(device, copy=True, memory_format=torch.contiguous_format)
    strides = [s if n > 1 else 1 for n, s in zip(base.shape, layout.stride(), strict=True)]
    made = torch.empty_strided(base.shape, strides, dtype=base.dtype, device=device)
    made.copy_(base)
    return made.expand(values.shape) if expanded else torch.as_strided(made, values.shape, layout.stride())
