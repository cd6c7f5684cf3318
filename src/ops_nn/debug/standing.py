"""How a model stands when a trace begins: modules by shared name, their facts, and every parameter and buffer.

A device that has nothing to do waits for this. Of a model of 200 modules it takes 4 ms to find anew, so what follows from the modules alone
is kept from trace to trace and looked over, value by value, in a tenth of that. What is kept holds no module and no tensor.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops_nn.debug import names
from ops_nn.debug.trace import PARAMETER, PARAMETER_GRADIENT, Key

ORDINARY = frozenset((Tensor, nn.Parameter))  # of tensors of other kinds, as sharded ones, this process may hold a part
STRIDED = torch.strided
_PLAIN = (bool, int, float, str, type(None))


class Held(NamedTuple):
    """A parameter or buffer, and where its own record and its gradient's go; one that is held twice is there twice."""

    tensor: Tensor
    key: Key
    gradient: Key


class Standing(NamedTuple):
    """A model at one moment.

    Attributes:
        paths: shared names of the modules that are watched, by the `id` of the module.
        places: modules by shared name.
        facts: of each module by shared name, as `names.facts`; not to be written to.
        aliases: other names of modules that have some.
        ties: as `names.ties`.
        removed, compiled: as of `names.Layout`.
        graded: whether a parameter has a gradient.
        held: every parameter and buffer.
        kept: what others know of those, for as long as each is what and where it was when the last trace began.
        owners: the module at each place, without wrappers.
    """

    paths: dict[int, str]
    places: dict[str, nn.Module]
    facts: dict[str, dict[str, Any]]
    aliases: dict[str, tuple[str, ...]]
    ties: dict[str, str]
    removed: tuple[str, ...]
    compiled: tuple[str, ...]
    graded: bool
    held: list[Held]
    kept: dict[str, Any]
    owners: list[tuple[_Spot, nn.Module]]

    def held_now(self) -> list[Held]:
        """Every parameter and buffer, as they are now."""
        return _held(self.owners)


def _held(owners: list[tuple[_Spot, nn.Module]]) -> list[Held]:
    return [
        Held(value, *spot.keys_of(name))
        for spot, own in owners
        for tensors in (own._parameters, own._buffers)
        for name, value in tensors.items()
        if value is not None
    ]


class _Look(NamedTuple):
    """What facts say of a tensor, and where and how it is laid out, which nobody knows of tensors of other kinds than PyTorch's own."""

    key: Key
    shape: torch.Size
    dtype: torch.dtype
    graded: bool
    place: Any


def _looks(held: list[Held]) -> list[_Look]:
    """Of each tensor; a place that is not known is never the same."""
    return [
        _Look(
            key,
            t.shape,
            t.dtype,
            t.requires_grad,
            (t.data_ptr(), t.stride(), t.device) if type(t) in ORDINARY and t.layout is STRIDED else object(),
        )
        for t, key, _ in held
    ]


class _Node(NamedTuple):
    """A module as it was: what names follow from. An `id` stands for a module only as long as that lives, as its `module` tells."""

    module: weakref.ref[nn.Module]
    kind: type
    compiled: bool
    names: list[str]
    children: list[int]


class _Spot:
    """A module at its shared name, the number of the module whose parameters and attributes are meant, and the facts of that."""

    def __init__(self, path: str, number: int, owner: int) -> None:
        self.path, self.number, self.owner = path, number, owner
        self.keys: dict[str, tuple[Key, Key]] = {}
        self.facts: dict[str, Any] = {}
        self.names: list[str] = []
        self.ids: list[int] = []
        self.others: list[tuple[str, Any]] = []
        self.plain: Any = tuple
        self.alive: tuple[Any, ...] = ()

    def keys_of(self, name: str) -> tuple[Key, Key]:
        """Of a tensor's own record and of its gradient's."""
        found = self.keys.get(name)
        if found is None:
            found = self.keys[name] = Key(self.path, 0, PARAMETER, name), Key(self.path, 0, PARAMETER_GRADIENT, name)
        return found

    def facts_of(self, own: nn.Module, tensors_look_alike: bool) -> dict[str, Any]:
        """Those of before, unless an attribute changed or the look of a tensor, which the caller knows.

        Plain values are kept alive, so that an `id` stands for one value; of others, of which facts say nothing, it is their types that
        must be the same. What may change inside, a list or a dataclass, is looked at anew.
        """
        state = vars(own)
        if tensors_look_alike and self.names == [*state] and self.ids == [*map(id, self.plain(state))]:
            if not self.others or self.others == [(name, _words(name, state[name])) for name, _ in self.others]:
                return self.facts
        shown = {name: value for name, value in state.items() if not name.startswith("_")}
        plain = [name for name, value in shown.items() if _is_plain(value)]
        self.plain = operator.itemgetter(*plain, *plain) if plain else tuple  # of one name it gives no tuple
        self.facts, self.alive = names.facts(own), self.plain(state)
        self.others = [(name, _words(name, value)) for name, value in shown.items() if name not in plain]
        changeable = any(isinstance(shown[name], tuple | list) or dataclasses.is_dataclass(shown[name]) for name, _ in self.others)
        self.names, self.ids = [] if changeable else [*state], [*map(id, self.alive)]
        return self.facts


def _words(name: str, value: Any) -> Any:
    """What facts say of a value that is not plain: nothing, but whose `forward` it is."""
    return (getattr(value, "__module__", "?"), getattr(value, "__qualname__", "?")) if name == "forward" else type(value)


def _is_plain(value: Any) -> bool:
    """Whether a value is one for ever."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))


class _Structure:
    """What follows from which modules a model has, and whether it still has them."""

    def __init__(self, model: nn.Module) -> None:
        found = names.layout(model)
        modules = list(model.modules())
        numbers = {id(module): number for number, module in enumerate(modules)}
        self.nodes = [_node(module) for module in modules]
        places = found.places.items()
        self.spots = [_Spot(path, numbers[id(p.module)], numbers[id(names.unwrapped(p.module))]) for path, p in places]
        self.aliases = {path: place.aliases for path, place in places if place.aliases}
        self.every = {id(place.module): path for path, place in places}
        blocks = names.blocks(found)
        self.blocks = {id(place.module): path for path, place in places if path in blocks}
        self.removed, self.compiled = found.removed, found.compiled
        self.looks: list[_Look] = []
        self.kept: dict[str, Any] = {}

    def modules(self, model: nn.Module) -> list[nn.Module] | None:
        """The modules, in order; None where they are not those of before."""
        found = []
        for ref, kind, compiled, children, numbers in self.nodes:
            module = ref()
            if module is None or type(module) is not kind or names.is_compiled(module) is not compiled:
                return None
            inner = module._modules
            if len(inner) != len(children) or (inner and ([*inner] != children or [*map(id, inner.values())] != numbers)):
                return None
            found.append(module)
        return found if found[0] is model else None


def _node(module: nn.Module) -> _Node:
    inner = module._modules
    return _Node(weakref.ref(module), type(module), names.is_compiled(module), [*inner], [*map(id, inner.values())])


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Structure] = weakref.WeakKeyDictionary()


def of(model: nn.Module, every_module: bool) -> Standing:
    """How a model stands now; `every_module` says that more than its blocks is watched."""
    known = _KNOWN.get(model)
    modules = None if known is None else known.modules(model)
    if known is None or modules is None:
        known = _KNOWN[model] = _Structure(model)
        modules = list(model.modules())
    owners = [(spot, modules[spot.owner]) for spot in known.spots]
    held = _held(owners)
    looks = _looks(held)
    same = looks == known.looks
    if not same:
        same = [look[:-1] for look in looks] == [look[:-1] for look in known.looks]
        known.looks, known.kept = looks, {}
    return Standing(
        known.every if every_module else known.blocks,
        {spot.path: modules[spot.number] for spot in known.spots},
        {spot.path: spot.facts_of(own, same) for spot, own in owners},
        known.aliases,
        _ties(owners),
        known.removed,
        known.compiled,
        any(p is not None and p.grad is not None for module in modules for p in module._parameters.values()),
        held,
        known.kept,
        owners,
    )


def _ties(owners: list[tuple[_Spot, nn.Module]]) -> dict[str, str]:
    """For each parameter that is held at several places, its first name, by full name."""
    first: dict[int, tuple[str, str]] = {}
    tied: dict[str, str] = {}
    for spot, own in owners:
        for name, value in own._parameters.items():
            if value is not None:
                holder = first.setdefault(id(value), (spot.path, name))
                if holder[0] != spot.path or holder[1] != name:
                    tied[f"{spot.path}.{name}".strip(".")] = f"{holder[0]}.{holder[1]}".strip(".")
    return tied
