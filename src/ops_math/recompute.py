"""recompute_norms(): what a norm gives is not kept for the backward, but worked out again from what is kept anyway.

A product saves its input for the gradient of its weight, and that input is mostly a norm's output. The norm's node saves what it
normalised, so its output can be made again: one pass over memory, no matrix product. Inside the context every tensor that autograd
saves passes through here; one that is a norm's output is replaced by a recipe.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ops_math import checks, features

Tensor = torch.Tensor


class _Source(NamedTuple):
    """A tensor that is read in the backward, with its version when it was seen."""

    tensor: Tensor
    version: int


class _Recipe(NamedTuple):
    """A norm's output while it lives, and how to make it again from its sources."""

    output: weakref.ref[Tensor]
    version: int
    make: Callable[[], Tensor]
    sources: tuple[_Source, ...]


class _Again(NamedTuple):
    """What stands for a saved tensor that is made again, in this shape."""

    recipe: _Recipe
    shape: torch.Size


def _unchanged(source: _Source, what: str) -> Tensor:
    if source.tensor._version != source.version:
        found = f"one that was written to in place ({what}, shape {list(source.tensor.shape)})"
        checks.fail("recompute_norms", "saved tensor", "unchanged until the backward has run", found, "Change it after the backward.")
    return source.tensor


class _Scope:
    """The recipes of one context, and the hooks through which autograd saves tensors."""

    def __init__(self) -> None:
        self.recipes: dict[int, _Recipe] = {}
        self.replaced = self.bytes = 0

    def pack(self, t: Tensor) -> _Again | _Source:
        recipe = self.recipes.get(t.data_ptr()) if t.numel() and t.device.type != "meta" else None
        if recipe is not None:
            output = recipe.output()
            same = output is not None and output.data_ptr() == t.data_ptr() and output._version == recipe.version
            if same and (output.numel(), output.dtype) == (t.numel(), t.dtype) and t.is_contiguous():  # type: ignore[union-attr]
                self.replaced += 1
                self.bytes += t.numel() * t.element_size()
                return _Again(recipe, t.shape)
        return _Source(t.detach(), t._version)  # with its graph, a node's own output would keep the node and itself alive for ever

    @staticmethod
    def unpack(kept: _Again | _Source) -> Tensor:
        if isinstance(kept, _Source):  # autograd itself looks at versions only where there are no hooks
            return _unchanged(kept, "saved for the backward")
        for source in kept.recipe.sources:
            _unchanged(source, "from which a norm's output is made again")
        with torch.no_grad():
            return kept.recipe.make().view(kept.shape)


class _Local(threading.local):
    scope: _Scope | None = None


_LOCAL = _Local()


class Recomputed:
    """What a context did: `tensors` that were not kept, and their `bytes`."""

    def __init__(self, scope: _Scope) -> None:
        self._scope = scope

    @property
    def tensors(self) -> int:
        """How many saved tensors were replaced by a recipe."""
        return self._scope.replaced

    @property
    def bytes(self) -> int:
        """Their size [B]; less memory is saved where two nodes keep one tensor."""
        return self._scope.bytes

    def __repr__(self) -> str:
        return f"{self.tensors} norm outputs ({self.bytes / 2**20:.1f} MiB) are made again in the backward"


@contextmanager
def recompute_norms() -> Iterator[Recomputed]:
    """Run the forward inside, and norm outputs are computed again in the backward instead of being kept: less memory, a pass more.

    Gradients are those of the same numbers: a recipe reads what the norm's own backward reads. For a Llama block it frees two
    [tokens, width] tensors, for a BERT block under autocast two in autocast's dtype. The backward may run outside.

    Yields:
        A `Recomputed` that counts what was replaced.

    Raises: ArgumentError in the backward where a saved tensor was changed in place meanwhile (as autograd does without the context).
    While tracing (`torch.compile`, export) nothing is replaced: the compiler decides there what is kept. Nor is anything inside other
    hooks on saved tensors (`save_on_cpu`, activation checkpointing), which take tensors in its place.
    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, here for norms only.
    """
    outer, scope = _LOCAL.scope, _Scope()
    _LOCAL.scope = scope
    try:
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, scope.unpack):
            yield Recomputed(scope)
    finally:
        _LOCAL.scope = outer
        scope.recipes.clear()


def wanted() -> bool:
    """Whether norms should `offer` their outputs. Not under other hooks: what runs must then be what runs when it is recomputed outside."""
    scope = _LOCAL.scope
    return scope is not None and not torch.compiler.is_compiling() and features.packs_saved_tensors(scope.pack)


def offer(output: Tensor, make: Callable[..., Tensor], *sources: Tensor | None) -> None:
    """Let saved copies of `output` be replaced by `make(*sources)`, which gives its shape and dtype. Ask `wanted` first."""
    scope = _LOCAL.scope
    if scope is None:
        return
    held = tuple(None if t is None else t.detach() for t in sources)  # shares the version counter, and holds no graph
    seen = tuple(_Source(t, t._version) for t in held if t is not None)
    scope.recipes[output.data_ptr()] = _Recipe(weakref.ref(output), output._version, lambda: make(*held), seen)
