"""The tensors in what a module takes and returns, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ops_math as om


class Leaf(NamedTuple):
    """A tensor in an argument or result. `carrier` is where its gradient arrives, `also` where another part of it does; `value` gives the
    tensor that is meant, the sum of `summands` where there are two."""

    name: str
    carrier: Tensor
    value: Callable[[], Tensor]
    also: Tensor | None = None
    summands: tuple[Tensor, Tensor] | None = None


def _joined(prefix: str, name: object) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def leaves(value: Any, prefix: str = "") -> Iterator[Leaf]:
    """Every tensor of a tree of tuples, lists, dictionaries and dataclasses, in order.

    An `Unsummed` residual stream is the sum that it stands for, which adopted layers leave to the next norm; a `Narrowed` one is its wide
    tensor. So a fused layer has the results of a plain one.
    """
    if isinstance(value, om.Unsummed):
        x, branch = value
        yield Leaf(prefix, branch if branch.requires_grad else x, lambda: x.detach() + branch.detach(), summands=(x, branch))
    elif isinstance(value, om.Narrowed):
        wide, narrow = value
        yield Leaf(prefix, wide, lambda: wide, narrow)
    elif isinstance(value, Tensor):
        yield Leaf(prefix, value, lambda: value)
    else:
        for name, item in _items(value):
            yield from leaves(item, _joined(prefix, name))


def _items(value: Any) -> list[tuple[object, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return []


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Leaf]:
    """The tensors among the arguments of a call."""
    for number, value in enumerate(args):
        yield from leaves(value, str(number))
    for name, value in kwargs.items():
        yield from leaves(value, name)


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor changed; streams become the one tensor that they mean."""
    if isinstance(value, om.Unsummed):
        return change(value.x.detach() + value.branch.detach())
    if isinstance(value, om.Narrowed):
        return change(value.x)
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: changed(item, change) for name, item in value.items()}
    if hasattr(value, "_fields"):
        return type(value)(*(changed(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(changed(item, change) for item in value)
    return value
