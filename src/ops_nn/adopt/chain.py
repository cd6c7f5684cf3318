"""How adopted layers hand the residual stream on, so that each sum is fused with the norm after it."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Hooks that look at a layer's inputs and outputs as a tree of tensors, so that an unsummed pair passes through them.
_TREE_HOOKS = ("torch.distributed.",)


def adopted(module: nn.Module) -> bool:
    """Whether the module's forward is one that this package put there."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, MethodType) and getattr(forward.__func__, "__module__", "").startswith("ops_nn.adopt.")


def bare(module: nn.Module) -> bool:
    """Whether the forward that is set on the module is its class's own: what is left of an adoption in a model that was pickled."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward


def observed(module: nn.Module) -> bool:
    """Whether somebody's hook, on the module or on all modules, would see its inputs or outputs."""
    if any(getattr(nn.modules.module, f"_global{name}") for name in _HOOKS):
        return True
    for name in _HOOKS:
        for hook in module.__dict__[name].values():
            function = hook if isinstance(hook, FunctionType) else getattr(hook, "__func__", hook)
            if not str(getattr(function, "__module__", "")).startswith(_TREE_HOOKS):
                return True
    return False


def run(layers: Iterable[nn.Module], x: Any, hand_over: str, to_the_end: bool, **kwargs: Any) -> Any:
    """Call the layers one after the other; an adopted one leaves work for the next, where nobody looks between them.

    Args:
        layers: modules that take and return the residual stream.
        x: the stream.
        hand_over: the keyword that asks a layer to do so: `defer` leaves the last sum, `narrow` adds a copy in autocast's dtype.
        to_the_end: whether the last layer does so too, for `om.residual_norm` to take it up.
        **kwargs: what every layer takes.

    Returns:
        the residual stream, as the last layer left it.
    """
    stack = list(layers)
    open_after = [adopted(layer) and not observed(layer) for layer in stack]
    for i, layer in enumerate(stack):
        last = i + 1 == len(stack)
        asked = open_after[i] and (to_the_end if last else open_after[i + 1])
        x = layer(x, **kwargs, **{hand_over: True}) if asked else layer(x, **kwargs)
    return x
