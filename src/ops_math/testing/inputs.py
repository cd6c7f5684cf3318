"""Inputs of a case from a seed, and one run of a function with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ops_math.rng import Rng
from ops_math.spec import DTYPE_OF, Call


class Draw:
    """Makes the tensors of a case: the same numbers for a seed on every device, rounded to the dtype under test.

    Args:
        seed: of the generator.
        dtype: name of the dtype under test, e.g. `bf16`.
        device: where the tensors go; `meta` gives shapes only.
    """

    def __init__(self, seed: int, dtype: str, device: torch.device | str = "cpu") -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def _place(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.to(dtype).to(self.device)

    def normal(self, *shape: int, scale: float = 1.0, offset: float = 0.0, dtype: str | None = None) -> torch.Tensor:
        """Normal numbers, `offset + scale * N(0, 1)`."""
        x = torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale + offset
        return self._place(x, DTYPE_OF[dtype or self.dtype])

    def uniform(self, *shape: int, dtype: str | None = None) -> torch.Tensor:
        """Uniform numbers in [0, 1)."""
        return self._place(torch.rand(*shape, generator=self._generator, dtype=torch.float64), DTYPE_OF[dtype or self.dtype])

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high)."""
        return self._place(torch.randint(0, max(high, 1), shape, generator=self._generator), torch.int64)

    def bools(self, p_true: float, *shape: int) -> torch.Tensor:
        """True with probability `p_true`."""
        return self._place(torch.rand(*shape, generator=self._generator) < p_true, torch.bool)

    def tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A literal."""
        return self._place(torch.tensor(values), dtype)

    def rng(self, seed: int) -> Rng:
        """A mask stream on the device."""
        return Rng(seed, self.device)


class Result(NamedTuple):
    """Outputs and gradients of one run. `names` label them: `out0`, ..., then `d` and the argument's position or name."""

    values: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    num_outputs: int
    differentiable: tuple[int, ...]

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The outputs alone."""
        return self.values[: self.num_outputs]


def is_floating(value: Any) -> bool:
    """Whether the value is a floating tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def as_leaves(
    call: Call, frozen: Sequence[int | str], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Call, dict[str, torch.Tensor]]:
    """The call with each floating tensor changed and detached, requiring a gradient unless frozen; and those leaves by name. Dtypes that
    the call asks for are changed alike."""
    leaves: dict[str, torch.Tensor] = {}

    def one(key: int | str, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return change(torch.empty(0, dtype=value)).dtype
        if not is_floating(value):
            return value
        leaf = change(value.detach()).detach()
        if key not in frozen:
            leaves[f"d{key}"] = leaf.requires_grad_()
        return leaf

    args = tuple(one(i, v) for i, v in enumerate(call.args))
    return Call(args, {k: one(k, v) for k, v in call.kwargs.items()}), leaves


def output_gradients(outputs: Sequence[torch.Tensor], indices: Sequence[int], seed: int, rounded: torch.dtype) -> list[torch.Tensor]:
    """Gradients to feed back: the same numbers in every dtype, since they are rounded to the dtype under test first."""
    made = []
    for i in indices:
        generator = torch.Generator().manual_seed(seed * 1000 + i)
        g = torch.randn(outputs[i].shape, generator=generator, dtype=torch.float64).to(rounded)
        made.append(g.to(outputs[i].dtype).to(outputs[i].device))
    return made


def run(
    fn: Callable[..., Any],
    call: Call,
    frozen: Sequence[int | str] = (),
    *,
    seed: int = 0,
    rounded: torch.dtype = torch.float32,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    differentiable: Sequence[int] | None = None,
    change_gradient: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> Result:
    """Run forward and backward once.

    Args:
        fn: the function.
        call: its arguments.
        frozen: positions and keywords that get no gradient.
        seed: of the output gradients.
        rounded: the dtype that the output gradients are rounded to before they are cast to the outputs' own.
        change: applied to each floating input (a cast, a copy with other strides).
        differentiable: indices of the outputs that get a gradient; by default those that require one.
        change_gradient: applied to each output gradient (other strides).
    """
    moved, leaves = as_leaves(call, frozen, change)
    returned = fn(*moved.args, **moved.kwargs)
    outputs = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    indices = tuple(i for i, o in enumerate(outputs) if o.requires_grad) if differentiable is None else tuple(differentiable)
    grads: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if indices and leaves:
        fed = [change_gradient(g) for g in output_gradients(outputs, indices, seed, rounded)]
        grads = torch.autograd.grad([outputs[i] for i in indices], list(leaves.values()), fed, allow_unused=True)
    filled = tuple(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves.values(), strict=True))
    names = tuple(f"out{i}" for i in range(len(outputs))) + tuple(leaves)
    return Result(tuple(o.detach() for o in outputs) + filled, names, len(outputs), indices)
