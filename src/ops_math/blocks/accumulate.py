"""Weight gradients of micro-batches added where they are kept: the product that makes a gradient adds it to `.grad`, in one pass.

PyTorch makes each micro-batch's gradient in memory of its own and then adds it: one weight more in memory, and one read and write more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ops_math import checks, features
from ops_math.layout import adjoining
from ops_math.spec import dtype_name

_WHAT = "accumulate_into_grad"
_OUTSIDE = "Call backward() outside the context."
_PLAIN = (torch.Tensor, nn.Parameter)


class Accumulation:
    """Gradients of weights are added in place while it is entered.

    Attributes:
        added: products that added to a gradient.
        apart: why others did not, and how often: their gradients went the usual way.
    """

    def __init__(self, names: dict[int, str], parameters: list[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters  # the parameters are held, so that their ids stay theirs
        self.added = 0
        self.apart: Counter[str] = Counter()
        self._before: list[Accumulation | None] = []

    def __enter__(self) -> Accumulation:
        for p in self._parameters:
            _refuse_hooks(self._names[id(p)], p)
        self._before.append(_LIVE.current)  # one may be entered while it is in force
        _LIVE.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        _LIVE.current = self._before.pop()

    def __str__(self) -> str:
        others = "".join(f"; {count} as usual: {why}" for why, count in self.apart.items())
        return f"{self.added} gradients added in place{others}"

    def target(self, owner: Any, dy: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a weight that a product with `dy` may add to; None where it goes the usual way, which is counted."""
        name = self._names.get(id(owner))
        if name is None:
            self.apart["it is not among the parameters given"] += 1
            return None
        where = features.destination(owner)
        _refuse_task(name, owner, where)
        grad = owner.grad
        why = "this backward does not ask for it" if where == "nowhere" else _why_not(grad, dy)
        if why:
            self.apart[why] += 1
            return None
        return grad


class _Live:
    """The context in force, for all threads: a backward runs on threads of the devices."""

    def __init__(self) -> None:
        self.current: Accumulation | None = None


_LIVE = _Live()


def _refuse_hooks(name: str, p: torch.Tensor) -> None:
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        checks.refuse(_WHAT, f"{name} has a hook, which would not see its gradient", "Remove the hook, or leave this parameter out.")


def _refuse_task(name: str, owner: Any, where: str) -> None:
    """Refuse a backward that asks for gradients as results, or that may be differentiated again."""
    if features.keeps_graph():
        why = f"the backward keeps its graph (retain_graph or create_graph), and what is written into {name}.grad is in no graph"
        checks.refuse(_WHAT, why, _OUTSIDE)
    if where == "result":
        checks.refuse(_WHAT, f"torch.autograd.grad asks for the gradient of {name} as a result", _OUTSIDE)
    _refuse_hooks(name, owner)


def _why_not(grad: torch.Tensor | None, dy: torch.Tensor) -> str:
    """Why a product with `dy` cannot add to this gradient."""
    if grad is None:
        return "there is no gradient yet"
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        return "the gradient is not a dense tensor"
    if grad.dtype == dy.dtype:
        return ""
    if grad.dtype == torch.float32 and features.widens("addmm", dy.device):
        return ""
    return f"a product of {dtype_name(dy.dtype)} does not add to {dtype_name(grad.dtype)} on this device"


def _add(grad: torch.Tensor, dy_MN: torch.Tensor, x_MK: torch.Tensor) -> None:
    """grad += dy^T x."""
    if grad.dtype == dy_MN.dtype:
        grad.addmm_(dy_MN.t(), x_MK)
    else:
        features.aten("addmm", "dtype_out")(grad, dy_MN.t(), x_MK, grad.dtype, out=grad)


def added(owner: Any, dy_MN: torch.Tensor, x_MK: torch.Tensor) -> bool:
    """Add dy^T x to the weight's gradient, where a context asks for it and it can be done."""
    live = _LIVE.current
    if live is None or owner is None:
        return False
    grad = live.target(owner, dy_MN)
    if grad is None:
        return False
    _add(grad, dy_MN, x_MK)
    live.added += 1
    return True


def added_together(owners: Sequence[Any], dy_MN: torch.Tensor, x_MK: torch.Tensor, sizes: Sequence[int]) -> bool:
    """The same for weights that are one product: all of them or none, in one product where their gradients lie together."""
    live = _LIVE.current
    if live is None or not owners:
        return False
    grads = [live.target(owner, dy_MN) for owner in owners]
    there = [g for g in grads if g is not None]
    if len(there) < len(grads):
        return False
    one = adjoining(there)
    if one is not None:
        _add(one, dy_MN, x_MK)
    else:
        for grad, part in zip(there, dy_MN.split(list(sizes), 1), strict=True):
            _add(grad, part, x_MK)
    live.added += len(there)
    return True


def accumulate_into_grad(parameters: nn.Module | Iterable[torch.Tensor]) -> Accumulation:
    """Within it, a backward adds the weight gradients of blocks straight into `.grad`.

    grad <- grad + dy^T x, as one product

    For micro-batches: from the second on, a weight's gradient is neither made in memory of its own nor added in a pass of its own. It
    concerns the products of `residual_attention` and `residual_mlp`; all other gradients (embeddings, norms, biases, the loss's head) and
    the first micro-batch's go the usual way, and a weight that has both kinds gets the sum of both.

    Args:
        parameters: a model, or parameters.

    Returns:
        an `Accumulation`, a context manager, to be entered around `loss.backward()`; it tells what was added, and why others were not.

    Precision: a gradient of the products' dtype is rounded once, where PyTorch rounds the product and then the sum. An fp32 gradient of
        16-bit products is added to in fp32, where the device can; elsewhere it goes the usual way. The order of sums is the product's, so
        bits may differ from those without it.
    Determinism: as the products.
    Raises: UnsupportedError for parameters with hooks, sharded ones, DistributedDataParallel or more than one rank, and in a backward
        under `torch.autograd.grad`, with `retain_graph` or with `create_graph`; ArgumentError for something that holds no parameters.
    Source: Shoeybi et al., Megatron-LM, 2019 (gradient accumulation fusion).
    """
    if isinstance(parameters, nn.parallel.DistributedDataParallel):
        checks.refuse(_WHAT, "DistributedDataParallel reduces gradients by hooks, which would not be called", "Leave it out.")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        checks.refuse(_WHAT, "with more than one rank gradients are reduced by hooks, which would not be called", "Leave it out.")
    named = list(parameters.named_parameters()) if isinstance(parameters, nn.Module) else _numbered(parameters)
    held = [(name, p) for name, p in named if p.requires_grad]
    if not held:
        do = "Pass the model, or model.parameters()."
        checks.fail(_WHAT, "parameters", "a module or parameters that require gradients", type(parameters).__name__, do)
    for name, p in held:
        if type(p) not in _PLAIN or not p.is_leaf:
            what = "sharded or of a class of its own" if type(p) not in _PLAIN else "no leaf"
            checks.refuse(_WHAT, f"{name} is {what}", "Leave it out.")
    return Accumulation({id(p): name for name, p in held}, [p for _, p in held])


def _numbered(parameters: Any) -> list[tuple[str, torch.Tensor]]:
    found = list(parameters) if isinstance(parameters, Iterable) and not isinstance(parameters, torch.Tensor) else []
    for p in found:
        checks.tensor(_WHAT, "parameters", p)
    return [(f"parameter {number}", p) for number, p in enumerate(found)]
