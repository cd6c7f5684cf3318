"""Names of modules that two runs share, and the facts of a module that can explain a difference.

Wrappers put components into names (`module.` of DDP, `_fsdp_wrapped_module.`, `_orig_mod.` of torch.compile, ...); they are taken out, so
that a wrapped run is compared with a bare one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor, nn

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_WRAPPING_CLASSES = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_COMPILED = "OptimizedModule"
_PLAIN = (bool, int, float, str)


def class_name(module: nn.Module) -> str:
    """The dotted name of the class that wrote the module: not one that sharding put in front."""
    cls = next(c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed."))
    return f"{cls.__module__}.{cls.__qualname__}"


class Place(NamedTuple):
    """A module at its shared name. `aliases` are its other names, where it is held more than once."""

    path: str
    module: nn.Module
    aliases: tuple[str, ...]


class Layout(NamedTuple):
    """The modules of a model by shared name, in the order of the model; the names taken out; the compiled ones."""

    places: dict[str, Place]
    removed: tuple[str, ...]
    compiled: tuple[str, ...]


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run compiled code, whose inside is not Python any more."""
    return type(module).__name__ == _COMPILED or module.__dict__.get("_compiled_call_impl") is not None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given, whose class, attributes and own parameters are meant, without DDP in between."""
    kind = type(module).__name__
    name = "_orig_mod" if kind == _COMPILED else "module" if kind in _WRAPPING_CLASSES else ""
    inner = module._modules.get(name)
    return module if inner is None else unwrapped(inner)


def _shared_name(path: str, wrapping: set[str]) -> tuple[str, list[str]]:
    """The name without wrappers, and what was taken out."""
    kept, removed, so_far = [], [], ""
    for part in path.split("."):
        if part in WRAPPERS or (part == "module" and so_far in wrapping):
            removed.append(part)
        else:
            kept.append(part)
        so_far = f"{so_far}.{part}".strip(".")
    return ".".join(kept), removed


def layout(model: nn.Module) -> Layout:
    """Find the modules of a model and their shared names.

    Where wrappers give several modules one name it is the innermost, but for compiled ones the outermost: its inside is not called.
    """
    wrapping = {path for path, m in model.named_modules() if type(m).__name__ in _WRAPPING_CLASSES}
    names: dict[int, list[str]] = {}
    places: dict[str, Place] = {}
    removed: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        name, out = _shared_name(path, wrapping) if path else ("", [])
        removed.update(out)
        known = names.setdefault(id(module), [])
        if name in places and is_compiled(places[name].module):
            continue
        if known and name not in known:
            known.append(name)
            continue
        if not known:
            known.append(name)
        places[name] = Place(name, module, ())
    found = {name: place._replace(aliases=tuple(names[id(place.module)][1:])) for name, place in places.items()}
    return Layout(found, tuple(sorted(removed)), tuple(name for name, place in found.items() if is_compiled(place.module)))


def _plain(prefix: str, value: Any) -> dict[str, Any]:
    """A plain value, or those of a dataclass, by name."""
    if value is None or isinstance(value, _PLAIN):
        return {prefix: value}
    if isinstance(value, tuple | list) and len(value) <= 8 and all(isinstance(v, _PLAIN) for v in value):
        return {prefix: list(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: v for f in dataclasses.fields(value) for k, v in _plain(f"{prefix}.{f.name}", getattr(value, f.name)).items()}
    return {}


def facts(module: nn.Module) -> dict[str, Any]:
    """What can be said of a module in plain values: class, attributes (eps, p, scale, ...), parameters and their dtypes."""
    module = unwrapped(module)
    own: dict[str, Any] = {"class": class_name(module)}
    for name, value in vars(module).items():
        if not name.startswith("_"):
            own |= _plain(name, value)
    for name, p in (*module._parameters.items(), *module._buffers.items()):
        if p is None:
            own[f"{name} is"] = "none"
        else:
            frozen = name in module._parameters and not p.requires_grad
            dtype = str(p.dtype).removeprefix("torch.")
            own[f"{name} is"] = f"{dtype} {list(p.shape)}" + (", frozen" if frozen else "")
    if "forward" in vars(module):
        forward = vars(module)["forward"]
        own["forward"] = f"{getattr(forward, '__module__', '?')}.{getattr(forward, '__qualname__', '?')}"
    return own


def tensors_of(found: Layout) -> dict[tuple[str, str], Tensor]:
    """Every parameter and buffer by module and own name; one that is held twice is there twice."""
    return {
        (path, name): value
        for path, place in found.places.items()
        for own in (unwrapped(place.module),)
        for name, value in (*own._parameters.items(), *own._buffers.items())
        if value is not None
    }


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's parameters by shared name, each under its first."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for (path, name), value in tensors_of(layout(module)).items():
        if isinstance(value, nn.Parameter):
            found.setdefault(id(value), (f"{path}.{name}".strip("."), value))
    return dict(found.values())


def ties(found: Layout) -> dict[str, str]:
    """For each parameter that is held at several places, its first name, by full name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for path, place in found.places.items():
        for name, value in unwrapped(place.module)._parameters.items():
            if value is not None:
                full = f"{path}.{name}".strip(".")
                holder = first.setdefault(id(value), full)
                if holder != full:
                    tied[full] = holder
    return tied


def blocks(found: Layout) -> set[str]:
    """The model, the blocks in its lists of blocks, and what stands beside those lists: not what is inside a block."""
    lists = [path for path, place in found.places.items() if isinstance(place.module, nn.ModuleList | nn.Sequential)]
    outer = [path for path in lists if not any(path != other and path.startswith(f"{other}." if other else "") for other in lists)]
    if not outer:
        return set(found.places)
    inside = {path for path in found.places for other in outer if path.startswith(f"{other}." if other else "") and path != other}
    blocks = {path for path in inside if path.rpartition(".")[0] in outer}
    return (found.places.keys() - inside) | blocks
