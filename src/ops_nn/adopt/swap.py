"""A forward put into one module, and taken out again."""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

from torch import nn


def own_class(module: nn.Module) -> type:
    """The class that wrote the module's forward: beneath those that sharding puts around it, which add no forward."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed."))


def class_name(module: nn.Module) -> str:
    """Its dotted name."""
    cls = own_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


class Swap(NamedTuple):
    """A forward for a module. `what` says in words what it is; `parts` are the modules whose weights it reads; `why` not, if so."""

    path: str
    module: nn.Module
    forward: Any
    what: str
    parts: dict[str, Any]
    why: str = ""

    def put(self) -> None:
        """Bind the forward to the instance: a deep copy of the model binds it to the copy, a state dict does not see it."""
        self.module.forward = MethodType(self.forward, self.module)

    def take(self) -> None:
        """Back to the class's forward."""
        self.module.__dict__.pop("forward", None)
