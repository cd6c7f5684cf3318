"""The way into an operator: the dtype of its result, whether autograd records the call, and the calls that need not be looked at again.

A public function checks its arguments, finds the dtype and asks whether to record: 3 us of a small call's 10. All of that follows from what
tensors look like, from plain values and from settings, so a call that is like one that went through is let through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ops_math import checks, features
from ops_math.backends import short

_KINDS_KEPT = 4  # ways of a function that are tried one after the other
_AGAIN = 64  # calls by the whole way until one is remembered in place of another, which costs 100 us


class Way(NamedTuple):
    """How a call goes on: the dtype of its result, what records it for autograd (called with the arguments of the `autograd.Function`) or
    None where nothing is recorded, and what else the checks found out."""

    out: torch.dtype
    record: Callable[..., Any] | None
    more: Any = None


class Usual:
    """What a public function remembers of calls that passed its checks. `function` is what records one."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.known: tuple[Callable[..., Way | None], ...] = ()  # replaced, never changed, since threads read it
        self.missed = 0

    def way(self, *arguments: Any) -> Way | None:
        """The way of a call that is like one before, by its tensors and then its plain values; None for any other."""
        if not torch.compiler.is_compiling():
            for like in self.known:
                found = like(*arguments)
                if found is not None:
                    return found
        return None

    def first(
        self, tensors: tuple[torch.Tensor | None, ...], rest: tuple[Any, ...], out: torch.dtype, more: Any = None, keep: bool = True
    ) -> Way:
        """The way of a call that has passed the checks, which is remembered unless `keep` is off."""
        recorded = needs_grad(*tensors)
        if keep and not torch.compiler.is_compiling():
            self.missed += 1
            if len(self.known) < _KINDS_KEPT or self.missed % _AGAIN == 0:
                self._remember(tensors, rest, Way(out, features.bound_apply(self.function) if recorded else None, more))
        return Way(out, functools.partial(apply, self.function) if recorded else None, more)

    def _remember(self, tensors: tuple[torch.Tensor | None, ...], rest: tuple[Any, ...], way: Way) -> None:
        given = [t for t in tensors if t is not None]
        if not features.quiet() or not all(map(short.ordinary, given)) or not features.no_tangents():
            return
        made = short.like(tensors, rest, way)
        if made is not None:
            self.known = (made, *self.known[: _KINDS_KEPT - 1])


def refuse_vmap(name: str, *_: Any) -> Any:
    """A batch of calls is one call on a larger tensor."""
    do = "Give the operator the batch as a leading dimension instead, or use ops_math.enabled(False)."
    checks.refuse(f"ops_math::{name}", "vmap is not supported", do)


def store_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a result is stored: autocast's where it is on for the device and `x` is not float64, else that of `x`."""
    if torch.compiler.is_compiling() or features.any_autocast():
        kind = x.device.type
        if x.dtype != torch.float64 and features.autocasts(kind):
            return torch.get_autocast_dtype(kind)
    return x.dtype


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, also where one tensor is passed twice: Dynamo refuses that, so while tracing the second becomes a view."""
    if torch.compiler.is_compiling():
        seen: list[torch.Tensor] = []
        fresh = []
        for a in args:
            twice = isinstance(a, torch.Tensor) and any(a is s for s in seen)
            fresh.append(a.view_as(a) if twice else a)
            if isinstance(a, torch.Tensor):
                seen.append(a)
        args = tuple(fresh)
        return function.apply(*args)
    return features.apply_function(function, args)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must record a call on these. Where a transform would differentiate it, it refuses: they see no graph here, and a
    tangent would come out as zeros; and vmap of a call that is recorded, for which PyTorch would name its own insides; and
    `torch.jit.trace` of one, whose graph could be neither checked nor saved."""
    transform = features.transform(tensors)
    if transform and transform != "vmap":
        do = "Use autograd, or ops_math.enabled(False)."
        checks.refuse(f"ops_math under {transform}", "grad, jvp and their kind are not supported", do)
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                if transform:
                    refuse_vmap("fwd")
                if features.traced_by_jit():
                    do = "Trace under torch.no_grad() what is to run, under ops_math.enabled(False) what is to learn; or use torch.export."
                    checks.refuse("ops_math under torch.jit.trace", "a backward of ours cannot be written into its graph", do)
                return True
    return False
