"""What describes a step: the lists it works on, the problem in plain numbers, its cost, and the cases it is tested on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ops_math.spec import ITEM_SIZE, Cost


class Group(NamedTuple):
    """Tensors that are updated by the same hyper-parameters: one parameter group of an optimizer.

    All lists are parallel: parameter i, its gradient, its two averages and its step count belong together.

    Args:
        params: parameters of any shape, fp32, bf16, fp16 or fp64, written in place.
        grads: their gradients, of their shapes. Read only.
        exp_avgs, exp_avg_sqs: running means of the gradient and of its square, of one dtype; written in place.
        steps: fp32 scalars [] on the device of their parameter, how many steps were taken; written in place.
        lr: learning rate, a number or a tensor of one element.
        beta1, beta2: decay of the two averages, in [0, 1).
        eps: added to the root.
        weight_decay: decoupled decay; a step shrinks a parameter by `lr * weight_decay`.
        maximize: whether to ascend.
        max_exp_avg_sqs: largest mean square so far (amsgrad), or empty.
        masters: fp32 copies that the step updates in place of narrower parameters, which become their rounding; or empty.
        numbers: a number for each parameter, by which its random words are drawn; counted through all groups where empty.
    """

    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    exp_avgs: Sequence[torch.Tensor]
    exp_avg_sqs: Sequence[torch.Tensor]
    steps: Sequence[torch.Tensor]
    lr: float | torch.Tensor = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False
    max_exp_avg_sqs: Sequence[torch.Tensor] = ()
    masters: Sequence[torch.Tensor] = ()
    numbers: Sequence[int] = ()

    def lists(self) -> dict[str, Sequence[torch.Tensor]]:
        """The lists of tensors that are there, by name."""
        return {name: getattr(self, name) for name in TENSOR_LISTS if name in NEEDED or getattr(self, name)}

    def some(self, places: Sequence[int]) -> Group:
        """The group of a few of its parameters, in their order."""
        if len(places) == len(self.params):
            return self
        chosen: dict[str, Any] = {name: [tensors[i] for i in places] for name, tensors in self.lists().items()}
        return self._replace(**chosen, numbers=[self.numbers[i] for i in places])


NEEDED = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps")
TENSOR_LISTS = (*NEEDED, "max_exp_avg_sqs", "masters")


class Scaling(NamedTuple):
    """What multiplies or forbids a step, each a tensor of one element on some device, or None; reading one never synchronises.

    `grad_scale` divides gradients, `clip` multiplies them, a non-zero `found_inf` leaves everything as it was, `key` is the state [3] of
    the `Rng` of stochastic rounding.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    key: torch.Tensor | None = None

    def on(self, device: torch.device) -> Scaling:
        """The same on a device."""
        return Scaling(*(t if t is None or t.device == device else t.to(device, non_blocking=True) for t in self))


class AdamWProblem(NamedTuple):
    """Tensors of one kind, updated together.

    `param`, `grad` and `state` are dtype names; `dense` says that the tensors of a parameter have equal strides without gaps, `aligned`
    that all start at multiples of 16 bytes, `scaled` that gradients are multiplied.
    """

    num_elements: int
    num_tensors: int
    param: str
    grad: str
    state: str
    master: bool = False
    stochastic: bool = False
    amsgrad: bool = False
    dense: bool = True
    aligned: bool = True
    scaled: bool = False


def storage(p: AdamWProblem) -> str:
    """The dtype of the parameters."""
    return p.param


def cost(p: AdamWProblem, phase: str = "step") -> Cost:
    """Bytes and operations of a step, term by term."""
    param, grad, state = (p.num_elements * ITEM_SIZE[d] for d in (p.param, p.grad, p.state))
    averages = (2 + p.amsgrad) * state
    master = p.num_elements * 4 * p.master
    read = (("gradient", grad), ("averages", averages), ("master", master), ("parameter", 0 if p.master else param))
    return Cost(read, (("averages", averages), ("master", master), ("parameter", param)), (("elementwise", 14 * p.num_elements),))


class StepCase(NamedTuple):
    """One model worth stepping: shapes, dtype names and options. `shift` makes every tensor start that many elements late."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    param: str = "fp32"
    state: str = "fp32"
    master: bool = False
    stochastic: bool = False
    shift: int = 0


_MIXED: tuple[tuple[int, ...], ...] = ((31,), (1,), (0,), (4001,), (40, 129), (), (1024,), (2048, 3))

CASES: tuple[StepCase, ...] = (
    StepCase("mixed sizes in fp32", _MIXED),
    StepCase("bf16 parameters and averages", _MIXED, "bf16", "bf16"),
    StepCase("bf16 parameters, fp32 averages", _MIXED, "bf16"),
    StepCase("fp16 parameters", _MIXED, "fp16", "fp16"),
    StepCase("a master copy of bf16", _MIXED, "bf16", master=True),
    StepCase("stochastic rounding", _MIXED, "bf16", "bf16", stochastic=True),
    StepCase("stochastic rounding with fp32 averages", _MIXED, "bf16", stochastic=True),
    StepCase("tensors that start off the grid", _MIXED, shift=1),
    StepCase("many tensors", tuple((n,) for n in range(300))),
)
