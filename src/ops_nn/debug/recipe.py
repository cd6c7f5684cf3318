"""How to build a module again from plain data: class, plain attributes, children; its tensors are kept beside it.

Nothing is pickled, so that a file from somebody else runs no code but that of the classes it names.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.debug.names import class_name

_PLAIN = (bool, int, float, str)
# Kept by `nn.Module.__init__` itself, or written anew.
_STATE = frozenset(nn.Module().__dict__)


class _Undescribable(Exception):
    """A value that has no plain form."""


def describe(module: nn.Module) -> dict[str, Any]:
    """The recipe, or why there is none, under `"reason"`."""
    try:
        return _module(module)
    except _Undescribable as error:
        return {"reason": str(error)}


def _module(module: nn.Module) -> dict[str, Any]:
    name = class_name(module)
    if type(module) is not _found(name):
        raise _Undescribable(f"{name} cannot be imported by that name")
    attributes = {}
    for key, value in vars(module).items():
        if key in _STATE or key == "forward":
            continue
        attributes[key] = _value(value, f"{name}.{key}")
    return {
        "class": name,
        "attributes": attributes,
        "training": module.training,
        "buffers": [key for key, value in module._buffers.items() if value is not None],
        "parameters": {key: value.requires_grad for key, value in module._parameters.items() if value is not None},
        "missing": [key for key, value in (*module._parameters.items(), *module._buffers.items()) if value is None],
        "children": {key: None if child is None else _module(child) for key, child in module._modules.items()},
    }


def _found(name: str) -> Any:
    """What a dotted name stands for; None where it stands for nothing."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for part in parts[split:]:
            found = getattr(found, part, None)
        return found
    return None


def _value(value: Any, where: str) -> Any:
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return {type(value).__name__: [_value(item, where) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _value(item, where) for key, item in value.items()}}
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"dataclass": cls, "fields": {f.name: _value(getattr(value, f.name), where) for f in dataclasses.fields(value)}}
    if callable(value) and _found(name) is value:
        return {"name": name}
    builtin = f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
    for candidate in (builtin, f"torch.nn.functional.{getattr(value, '__name__', '')}"):
        if callable(value) and _found(candidate) is value:
            return {"name": candidate}
    raise _Undescribable(f"{where} is a {type(value).__name__}, which has no plain form")


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call as plain data, each tensor as its name; or why there is none, under `"reason"`."""
    try:
        return {
            "args": [_argument(value, str(number)) for number, value in enumerate(args)],
            "kwargs": {name: _argument(value, name) for name, value in kwargs.items()},
        }
    except _Undescribable as error:
        return {"reason": str(error)}


def _argument(value: Any, name: str) -> Any:
    if isinstance(value, Tensor | om.Unsummed | om.Narrowed):
        return {"tensor": name}
    if isinstance(value, tuple | list):
        return {"tuple": [_argument(item, f"{name}.{i}") for i, item in enumerate(value)]}
    return _value(value, f"the argument {name}")


def call_of(plain: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords from plain data and the tensors by name."""
    return tuple(_made(value, tensors) for value in plain["args"]), {k: _made(v, tensors) for k, v in plain["kwargs"].items()}


def _made(value: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value and tensors is not None:
        return _tensor(tensors, value["tensor"])
    if "tuple" in value:
        return tuple(_made(item, tensors) for item in value["tuple"])
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "list" in value:
        return [_made(item) for item in value["list"]]
    if "dict" in value:
        return {key: _made(item) for key, item in value["dict"].items()}
    found = _class(value.get("name") or value["dataclass"])
    if "name" in value:
        return found
    made = object.__new__(found)
    for key, item in value["fields"].items():
        object.__setattr__(made, key, _made(item))
    return made


def _class(name: str) -> Any:
    found = _found(name)
    if found is None:
        raise om.UnsupportedError(f"replay: {name}: it cannot be imported here. Install or put on the path what defines it.")
    return found


def build(recipe: dict[str, Any], tensors: dict[str, Tensor], prefix: str = "") -> nn.Module:
    """The module.

    Args:
        recipe: from `describe`.
        tensors: its parameters and buffers by their names in it.
        prefix: of the names.

    Raises:
        UnsupportedError: for a class that cannot be imported, or something that is no module.
    """
    cls = _class(recipe["class"])
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise om.UnsupportedError(f"replay: {recipe['class']}: it is no module. The file is not one of ours.")
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, child in recipe["children"].items():
        module._modules[name] = None if child is None else build(child, tensors, f"{prefix}{name}.")
    for key, value in recipe["attributes"].items():
        object.__setattr__(module, key, _made(value))
    for name in recipe["missing"]:
        module.register_parameter(name, None)
    for name, learns in recipe["parameters"].items():
        module.register_parameter(name, nn.Parameter(_tensor(tensors, prefix + name).clone(), requires_grad=learns))
    for name in recipe["buffers"]:
        module.register_buffer(name, _tensor(tensors, prefix + name).clone())
    module.training = recipe["training"]
    return module


def _tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise om.UnsupportedError(f"replay: {name}: its values are not in the file. Write the file again with a larger limit_bytes=.")
    return tensors[name]
