"""How a hand-written backward is entered: outside autocast, and refusing to be differentiated itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ops_math import features


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decorator, which a backward that is not to be differentiated itself (all but those with `create_graph`) does without: grad
    mode is off there already, and switching it off again costs 2 us.

    PyTorch's looks at the incoming gradients alone. With one that is a constant, as of a sum, it would give gradients without a graph, and
    a penalty on them would be lost without an error: here it always counts as one that is learned.

    The backward takes the dtypes of its forward, whether autocast is on where it runs or not.
    """
    guarded = torch.autograd.function.once_differentiable(backward)
    is_compiling, any_autocast, recording = torch.compiler.is_compiling, features.any_autocast, torch.is_grad_enabled

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if is_compiling():
            return guarded(ctx, *grads) if recording() else backward(ctx, *grads)
        if any_autocast():
            kind = next((g.device.type for g in grads if g is not None), None)
            if kind is not None and features.autocasts(kind):
                with torch.autocast(kind, enabled=False):
                    return run(ctx, *grads)
        if recording():
            return guarded(ctx, *[_learned(g) for g in grads])
        return backward(ctx, *grads)

    return run


def _learned(grad: Any) -> Any:
    return grad if grad is None or grad.requires_grad else grad.detach().requires_grad_()
