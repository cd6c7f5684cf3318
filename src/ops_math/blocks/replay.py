"""The three ways in which `om.debug` runs a block: ours, the modules as they are, and the modules in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ops_math.rng import Rng, state_for

Tensors = dict[str, torch.Tensor]


class _Whole(nn.Module):
    """The block's modules in one, so that their parameters can be replaced by float64 ones for one call."""

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            # Once each: replacing the parameters of a module that is held twice would not put them back.
            if isinstance(module, nn.Module) and not any(module is m for m in self.modules()):
                self._modules[name] = module

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the block."""
        return run()


def draws(module: Any) -> bool:
    """Whether a module draws random numbers in its present mode."""
    if not isinstance(module, nn.Module):
        return False
    for part in module.modules():
        chance = (
            part.p if isinstance(part, nn.Dropout) else (getattr(part, name, 0.0) for name in ("dropout", "attention_dropout", "dropout_p"))
        )
        chances = [chance] if isinstance(chance, float | int) else list(chance)
        if part.training and any(isinstance(c, float) and c > 0 for c in chances):
            return True
    return False


def _inputs(x: Any) -> Tensors:
    if not isinstance(x, tuple):
        return {"x": x}
    return dict(zip(x._fields if hasattr(x, "_fields") else ("x", "normed"), x, strict=True))


def _again(x: Any, tensors: Tensors) -> Any:
    """`x` in its form, with other tensors."""
    if not isinstance(x, tuple):
        return tensors["x"]
    return type(x)(*tensors.values()) if hasattr(x, "_fields") else tuple(tensors.values())


def _wide(value: Any) -> Any:
    """Floating tensors of a keyword in float64."""
    if isinstance(value, tuple):
        return tuple(_wide(v) for v in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def ways(
    run: Any, x: Any, norm: Any, module: Any, next_norm: Any, rng: Rng | None, dropout_p: float, kwargs: dict[str, Any]
) -> tuple[Any, Any, Any, Tensors, Tensors]:
    """Ours, plain and exact ways of a block, its inputs, and the parameters of its modules.

    Args:
        run: the block as `run(x, rng, kwargs, compose, values)`.
        x, norm, module, next_norm, rng, dropout_p, kwargs: as the block takes them.

    Where random numbers are drawn, the plain ways put the branch together from plain functions that draw the same, since modules
    would draw their own.
    """
    inputs, random = _inputs(x), draws(module)
    if (random or dropout_p) and rng is None:
        rng = Rng.of_state(state_for("debug", None, next(iter(inputs.values())).device))
    whole = _Whole(module=module, norm=norm, next_norm=next_norm)
    held = dict(whole.named_parameters())
    wide_kwargs = {name: _wide(value) for name, value in kwargs.items()}

    def ours(own: Tensors) -> Any:
        return run(_again(x, own), rng, kwargs, True, True)

    def plain(own: Tensors) -> Any:
        return run(_again(x, own), rng, kwargs, random, False)

    def exact(own: Tensors, parameters: Tensors) -> Any:
        paths = dict(zip(held, parameters.values(), strict=True))
        return torch.func.functional_call(whole, paths, (lambda: run(_again(x, own), rng, wide_kwargs, random, True),))

    return ours, plain, exact, inputs, {name.removeprefix("module."): p for name, p in held.items()}
