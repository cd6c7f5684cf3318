"""Whether a module is what the table says, asked anew at each call, since hooks and adapters can come at any time.

The answer is a row of the table, or the reason why not. The way to yes costs about a microsecond a module; the reason is looked for
only after a no.
"""

from __future__ import annotations

import inspect
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as module_state

from ops_math.blocks import parts
from ops_math.blocks.parts import Part

_PLAIN_TENSORS = (nn.Parameter, torch.Tensor)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple("_global" + name for name in _HOOKS)
_STATE = frozenset(nn.Module().__dict__)
_RELAYED = ("ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb", "eager_attention_forward")
_LINEARS_OF_SEQUENCE = {
    ("linear", "act", "linear"),
    ("linear", "act", "dropout", "linear"),
    ("linear", "act", "linear", "dropout"),
    ("linear", "act", "dropout", "linear", "dropout"),
}


class _Known(NamedTuple):
    """A class of the table, with the forward it had when it was first seen."""

    part: Part
    forward: Any
    required: frozenset[str]
    kinds: dict[str, tuple[str, ...]]
    uses: dict[str, tuple[str, ...]]
    relays: tuple[tuple[dict[str, Any], str, Any], ...]


_CLASSES: dict[type, _Known | str] = {}


def _judge(module: nn.Module) -> _Known | str:
    """The row of a module's class, or why it has none; looks at the forward's code once a class."""
    cls = type(module)
    part = parts.BY_CLASS.get(_name(cls)) or _layer_below(cls)
    if part is None:
        return f"{cls.__name__} is not in the table of parts"
    required = frozenset(n for n, _ in part.children if n not in part.optional)
    forward = cls.forward
    scope = getattr(inspect.unwrap(forward), "__globals__", {})
    relays = tuple((scope, name, _relay(scope[name])) for name in _RELAYED if name in scope) if part.role == "attention" else ()
    known = _Known(part, forward, required, dict(part.children), dict(part.uses), relays)
    return known if part.role == "layer" else _why_not_forward(module, known) or known


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _layer_below(cls: type) -> Part | None:
    """The row of a layer that the class derives from: sharding makes such classes, and a layer's own forward is not run."""
    found = [parts.BY_CLASS.get(_name(base)) for base in cls.__mro__]
    return next((part for part in found if part is not None and part.role == "layer"), None)


def _why_not_forward(module: nn.Module, known: _Known) -> str:
    """Why the forward of a module's class is not the one that the table was written for."""
    cls, forward, part = type(module), known.forward, known.part
    home = next(c for c in cls.__mro__ if "forward" in c.__dict__)
    if forward.__module__ != home.__module__ or forward.__qualname__ != f"{home.__qualname__}.forward":
        return f"the forward of {cls.__name__} was replaced by {forward.__module__}.{forward.__qualname__}"
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return f"the forward of {cls.__name__} is not a Python function"
    read = {n for n in code.co_names if n in module.__dict__} - _STATE - set(part.attributes)
    if read:
        return f"the forward of {cls.__name__} reads {', '.join(sorted(read))}: a version that is not in the table"
    root = cls.__module__.split(".")[0]
    foreign = next((name for _, name, found in known.relays if str(getattr(found, "__module__", "")).split(".")[0] != root), "")
    return f"{foreign} of {cls.__module__} was replaced" if foreign else ""


def _relay(found: Any) -> Any:
    """A module-level function that a known forward calls; of a registry of attention functions, the one called `sdpa`."""
    interface = getattr(found, "get_interface", None)
    return found if interface is None else interface("sdpa", None)


def _known(module: nn.Module) -> _Known | str:
    cls = type(module)
    found = _CLASSES.get(cls)
    if found is None:
        found = _CLASSES[cls] = _judge(module)
    return found


def kind_of(module: Any) -> Part | None:
    """The row of a module's class, whatever its state; None for a class that is not in the table."""
    found = _known(module) if isinstance(module, nn.Module) else None
    return found.part if isinstance(found, _Known) else None


def _quiet(state: dict[str, Any]) -> bool:
    """No hooks, no forward of its own but that of a keyed dropout, no buffers, and plain tensors for parameters."""
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    if state["_buffers"] or state.get("_compiled_call_impl") is not None:
        return False
    if "forward" in state and not getattr(state["forward"], "keyed", False):  # a keyed dropout draws as the block does
        return False
    for parameter in state["_parameters"].values():
        if parameter is not None and type(parameter) not in _PLAIN_TENSORS:
            return False
    return True


def _sound(module: nn.Module, kinds: tuple[str, ...], role: str = "") -> bool:
    """The module is of one of these kinds, quiet, and so is all below it."""
    known = _known(module)
    if isinstance(known, str) or known.part.kind not in kinds:
        return False
    if known.uses:
        children = module.__dict__["_modules"]
        for name in known.uses.get(role, ()):
            child = children.get(name)
            if not (name not in known.required if child is None else _sound(child, known.kinds[name])):
                return False
        return True
    if type(module).forward is not known.forward:
        return False
    for scope, name, function in known.relays:
        if _relay(scope.get(name)) is not function:
            return False
    state = module.__dict__
    if not _quiet(state):
        return False
    if known.part.kind == "linear":
        return "weight" in state["_parameters"]
    children = state["_modules"]
    if known.part.kind == "sequential_mlp":
        return _sequence(children) in _LINEARS_OF_SEQUENCE and all(_sound(c, (kind_of(c).kind,)) for c in children.values())  # type: ignore[union-attr]
    count = 0
    for name, allowed in known.kinds.items():
        child = children.get(name)
        if child is None:
            if name in known.required:
                return False
            continue
        if not _sound(child, allowed):
            return False
        count += 1
    return count == len(children)


def _sequence(children: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of a Sequential's children, with `act` for an activation that an MLP may have."""
    found = [kind_of(child) for child in children.values()]
    return tuple("" if part is None else ("act" if part.kind in ("gelu", "relu") else part.kind) for part in found)


def globally_hooked() -> bool:
    """Whether hooks for every module are set."""
    m: Any = module_state
    return bool(m._global_forward_hooks or m._global_forward_pre_hooks or m._global_backward_hooks or m._global_backward_pre_hooks)


def sound(module: Any, kinds: tuple[str, ...], role: str = "") -> bool:
    """Whether the module is exactly one of these kinds and nothing observes or alters it or what is below it.

    `role` says what a layer is asked for: `attention` or `mlp`.
    """
    return isinstance(module, nn.Module) and not globally_hooked() and _sound(module, kinds, role)


def why_not(module: Any, kinds: tuple[str, ...], role: str = "", path: str = "") -> str:
    """In words, why `sound` says no; empty when it says yes."""
    if not isinstance(module, nn.Module):
        return f"{path or 'it'} is a {type(module).__name__}, not a module"
    if globally_hooked():
        return "global module hooks are set"
    where = path or type(module).__name__
    known = _known(module)
    if isinstance(known, str):
        return f"{path}: {known}" if path else known
    if known.part.kind not in kinds:
        return f"{where} is a {known.part.kind}, not a {' or '.join(kinds)}"
    if known.uses:
        return _why_not_children(module, known, path, known.uses.get(role, ()))
    if type(module).forward is not known.forward:
        return f"the forward of {type(module).__name__} was replaced"
    relayed = next((name for scope, name, function in known.relays if _relay(scope.get(name)) is not function), "")
    if relayed:
        return f"{relayed} of {type(module).__module__} was replaced"
    return _why_not_quiet(module, where) or _why_not_children(module, known, path)


def _why_not_quiet(module: nn.Module, where: str) -> str:
    state = module.__dict__
    hooks = [name.strip("_").replace("_", " ") for name, found in zip(_HOOKS, itemgetter(*_HOOKS)(state), strict=True) if found]
    if hooks:
        return f"{where} has {' and '.join(hooks)}"
    if "forward" in state and not getattr(state["forward"], "keyed", False):
        return f"{where} has a forward of its own, set on the instance"
    if state.get("_compiled_call_impl") is not None:
        return f"{where} was compiled on its own"
    if state["_buffers"]:
        return f"{where} has buffers: {', '.join(state['_buffers'])}"
    for name, parameter in state["_parameters"].items():
        if parameter is not None and type(parameter) not in _PLAIN_TENSORS:
            return f"{where}.{name} is a {type(parameter).__name__}, not a plain parameter"
    return ""


def _why_not_children(module: nn.Module, known: _Known, path: str, used: tuple[str, ...] | None = None) -> str:
    children = module.__dict__["_modules"]
    prefix = f"{path}." if path else ""
    if known.part.kind == "linear":
        return "" if "weight" in module.__dict__["_parameters"] else f"{path or 'it'} holds no weight of its own"
    if known.part.kind == "sequential_mlp":
        if _sequence(children) not in _LINEARS_OF_SEQUENCE:
            return f"Sequential holds {', '.join(type(c).__name__ for c in children.values())}; {known.part.reads} is known"
        pairs = [(name, child, (kind_of(child).kind,)) for name, child in children.items()]  # type: ignore[union-attr]
        return next((why for name, child, kinds in pairs if (why := why_not(child, kinds, path=prefix + name))), "")
    for name in known.kinds if used is None else used:
        child, allowed = children.get(name), known.kinds[name]
        if child is None and name in known.required:
            return f"{prefix}{name} is missing"
        why = why_not(child, allowed, path=prefix + name) if child is not None else ""
        if why:
            return why
    foreign = sorted(children.keys() - known.kinds.keys()) if used is None else []
    return f"{prefix}{foreign[0]} is not part of a {known.part.kind}" if foreign else ""


class PartReport(NamedTuple):
    """What a module is to the blocks: its kind in the table, and why it would run as it is (empty where its weights are read)."""

    kind: str | None
    reason: str

    @property
    def fused(self) -> bool:
        """Whether the blocks read its weights instead of calling it."""
        return self.kind is not None and not self.reason


def part_of(module: nn.Module) -> PartReport:
    """What the blocks know of a module at this moment; nothing is run.

    Args:
        module: an attention module, MLP, norm, linear layer or one that holds these.

    Returns:
        its kind in the table of parts (None for a class that is not in it) and, where it would run as it is, the reason: hooks, a
        parametrisation, an adapter, a replaced forward, a version that is not in the table.
    """
    part = kind_of(module)
    kinds = tuple(parts.BY_KIND) if part is None else (part.kind,)
    roles = dict(part.uses) if part is not None and part.uses else {"": ()}
    return PartReport(None if part is None else part.kind, next((why for role in roles if (why := why_not(module, kinds, role))), ""))
