"""A model's weights in autocast's dtype, cast together once a forward.

Autocast casts each fp32 weight where it is used, a launch each; block by block these are 24 launches a layer and pass of small tensors
that keep the host busy. Here one multi-tensor copy writes all of them into one buffer, in the order of the modules, so that query, key and
value weights that follow each other are one matrix.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ops_math import checks, features, settings
from ops_math.blocks.recognise import kind_of
from ops_math.layout import copied
from ops_math.spec import dtype_name

_ROLES = ("attention", "mlp", "layer")
_ALIGNED = 8  # elements: products are slow on operands that do not begin at a multiple of 16 bytes
_PLAIN = (torch.Tensor, nn.Parameter)


class _Cast(NamedTuple):
    """A weight's narrow copy: where it lies in the buffer, and the version of the weight that it is a copy of."""

    weight: torch.Tensor
    version: int
    narrow: torch.Tensor
    start: int


class Held(NamedTuple):
    """The copies that hold within a scope, by the identity of the weight."""

    dtype: torch.dtype
    buffer: torch.Tensor
    casts: dict[int, _Cast]

    def find(self, weight: torch.Tensor, dtype: torch.dtype) -> _Cast | None:
        """The copy of a weight in this dtype, if there is one that is up to date."""
        found = self.casts.get(id(weight))
        fresh = found is not None and found.weight is weight and found.version == weight._version and self.dtype == dtype
        return found if fresh else None


class _Scope(threading.local):
    held: Held | None = None


_SCOPE = _Scope()
_HOLDERS: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()  # weak references: a layer replaced later must be free to go


def held() -> Held | None:
    """The copies in force in this thread."""
    return _SCOPE.held


def narrow(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The copy of a weight in this dtype, where one is held."""
    found = None if _SCOPE.held is None else _SCOPE.held.find(weight, dtype)
    return None if found is None else found.narrow


def packed(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """The copies of tensors that follow each other in the buffer, as one tensor along their first dimension; None where they do not."""
    held = _SCOPE.held
    if held is None:
        return None
    found = [held.find(t, dtype) for t in tensors]
    first, place, rows = found[0], None, 0
    for cast in found:
        if cast is None or (place is not None and cast.start != place):
            return None
        place, rows = cast.start + cast.weight.numel(), rows + cast.weight.shape[0]
    assert first is not None
    shape = (rows, *first.weight.shape[1:])
    return held.buffer.as_strided(shape, first.narrow.stride(), first.start)


def _holders(model: nn.Module) -> tuple[Any, ...]:
    """The modules of known attention and MLP parts that hold weights of products."""
    found = _HOLDERS.get(model)
    if found is None:
        seen: dict[nn.Module, None] = {}
        for module in model.modules():
            part = kind_of(module)
            if part is not None and part.role in _ROLES:
                seen.update((m, None) for m in module.modules() if isinstance(m, nn.Linear | nn.MultiheadAttention))
        found = _HOLDERS[model] = tuple(ref(m) for m in seen)
    return found


def _to_cast(model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Plain fp32 weights that autocast would cast, then biases, in the order of their modules, each once."""
    weights: dict[int, torch.Tensor] = {}
    biases: dict[int, torch.Tensor] = {}
    for holder in _holders(model):
        module = holder()
        for parameter in () if module is None else module._parameters.values():
            if type(parameter) in _PLAIN and parameter.dtype == torch.float32 != dtype and parameter.is_contiguous():
                (weights if parameter.dim() == 2 else biases)[id(parameter)] = parameter
    return [*weights.values(), *biases.values()]


def _cast_all(tensors: list[torch.Tensor], dtype: torch.dtype) -> Held:
    sizes = [-(-t.numel() // _ALIGNED) * _ALIGNED for t in tensors]
    with torch.no_grad():
        buffer = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
        pieces = zip(buffer.split(sizes), sizes, tensors, strict=True)
        views = [(piece if size == t.numel() else piece[: t.numel()]).view(t.shape) for piece, size, t in pieces]
        torch._foreach_copy_(views, tensors)
    copied(buffer, "all weights of a model", f"{dtype_name(tensors[0].dtype)} to {dtype_name(dtype)}")
    casts, start = {}, 0
    for t, view, size in zip(tensors, views, sizes, strict=True):
        casts[id(t)] = _Cast(t, t._version, view, start)
        start += size
    return Held(dtype, buffer, casts)


@contextmanager
def cast_weights(model: nn.Module) -> Iterator[None]:
    """Within it, under autocast on a GPU, the blocks take this model's fp32 weights from copies that were cast together on entry.

    It changes no result: a weight that is written to inside is cast again where it is used (not one written through `.data`, which PyTorch
    does not count as a change; autocast's own copies are as old then). Put it around the forward of the layers;
    `ops_nn.adopt` does so for the models it knows. Where there is nothing to gain (no autocast, no gradients, a CPU, a compiler that
    traces) it does nothing.

    Args:
        model: the module whose attention and MLP weights (`[N, K]`, fp32) and biases (`[N]`) are meant.

    Raises: ArgumentError for something that is not a module.
    Memory: one copy of these weights in autocast's dtype, which the backward keeps anyway.
    """
    if not isinstance(model, nn.Module):
        checks.fail("cast_weights", "model", "a torch.nn.Module", type(model).__name__, "Pass the model itself.")
    before = _SCOPE.held
    _SCOPE.held = _held_for(model)
    try:
        yield
    finally:
        _SCOPE.held = before


def _held_for(model: nn.Module) -> Held | None:
    if not settings.active() or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    first = next(iter(model.parameters()), None)
    if first is None or not features.copies_together(first.device) or not torch.is_autocast_enabled(first.device.type):
        return None
    dtype = torch.get_autocast_dtype(first.device.type)
    tensors = [t for t in _to_cast(model, dtype) if t.device == first.device]
    return _cast_all(tensors, dtype) if tensors else None
