"""The problems that a step meets, each with the arguments of its first call kept in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from ops_math import checks
from ops_math.schedule.live import LIVE, changed

_LISTENING = threading.Lock()
MOST_STRETCHED = 4  # times its elements that a view's storage may span before its copy becomes contiguous


class Met:
    """One problem: its operator and phase, its device, and arguments to measure it with (None where they are too large to keep)."""

    def __init__(self, op: str, phase: str, problem: Any, device: torch.device, args: Sequence[Any] | None) -> None:
        self.op, self.phase, self.problem, self.device, self.args = op, phase, problem, device, args

    def args_on_device(self) -> list[Any]:
        """The arguments, moved to where they came from."""
        assert self.args is not None
        return [laid_out_like(a, a, self.device) if isinstance(a, torch.Tensor) else a for a in self.args]


class Collector:
    """Keeps each problem that is met for the first time while it is listening; calls run as ever, compiled ones too. One listens at a time:
    each would hear a part of what the other's step meets.

    Args:
        most_bytes: how much to keep [B]; what is larger is met, and measured never.
    """

    def __init__(self, most_bytes: int) -> None:
        self.met: dict[tuple[Any, ...], Met] = {}
        self.left = most_bytes

    def __enter__(self) -> Collector:
        if not _LISTENING.acquire(blocking=False):
            do = "Call one after the other, not inside a step or in another thread."
            checks.refuse("calibrate", "another calibrate is running a step of this process", do)
        LIVE.collector = self.note
        changed()  # what is remembered is not met again
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        LIVE.collector = None
        _LISTENING.release()

    def note(self, op: str, phase: str, problem: Any, args: Sequence[Any]) -> None:
        """Keep a problem and its arguments, unless it is kept already."""
        key = (op, phase, problem, args[0].device)
        if key in self.met:
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
