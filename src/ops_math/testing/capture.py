"""The dispatcher calls that a piece of code makes, with their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OpCall(NamedTuple):
    """One call of `ops_math::NAME_fwd` or `ops_math::NAME_bwd`."""

    operator: str
    phase: str
    overload: Any
    args: tuple[Any, ...]


class _Watch(TorchDispatchMode):
    """Sees every dispatcher call below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        if getattr(func, "namespace", "") == "ops_math":
            operator, _, phase = func._schema.name.removeprefix("ops_math::").rpartition("_")
            self.calls.append(OpCall(operator, phase, func, tuple(args)))
        return func(*args, **(kwargs or {}))


def watch(fn: Callable[[], Any]) -> _Watch:
    """Run `fn`; `.calls` lists the calls of our operators, `.names` all dispatcher calls by name."""
    mode = _Watch()
    with mode:
        fn()
    return mode


def like_on(t: Any, device: str) -> Any:
    """A tensor of the same shape, strides and dtype on a device, without its data; other values as they are."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) if isinstance(t, torch.Tensor) else t
