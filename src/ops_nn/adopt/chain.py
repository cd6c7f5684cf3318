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


def run(layers: Iterable[nn.Module], x: Any, **kwargs: Any) -> Any:
    """Call the layers one after the other; an adopted one leaves its last sum to the next, where nobody looks between them.

    Returns:
        the residual stream, unsummed where the last layer left it so (for `om.residual_norm`).
    """
    stack = list(layers)
    open_after = [adopted(layer) and not observed(layer) for layer in stack]
    for i, layer in enumerate(stack):
        last = i + 1 == len(stack)
        defer = open_after[i] and (last or open_after[i + 1])
        x = layer(x, **kwargs, defer=True) if defer else layer(x, **kwargs)
    return x
