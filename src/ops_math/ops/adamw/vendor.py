"""PyTorch's own fused AdamW, on CPUs and GPUs: the rival, and what runs where the kernel does not."""

from __future__ import annotations

from torch.optim.adamw import adamw as torch_adamw

from ops_math.ops.adamw.problem import AdamWProblem, Group, Scaling
from ops_math.spec import Device

KINDS = ("cpu", "cuda", "hip")
CALLS = 2


def supports(p: AdamWProblem, device: Device, phase: str = "step") -> str | None:
    """One dtype for all, and gradients as they are."""
    if p.master:
        return "has no master copy"
    if p.stochastic:
        return "rounds to nearest only"
    if not p.param == p.grad == p.state:
        return f"needs one dtype, these are {p.param}, {p.grad} and {p.state}"
    if not p.dense:
        return "needs tensors without gaps and of equal strides"
    return "writes unscaled gradients back" if p.scaled else None


def launch_step(p: AdamWProblem, group: Group, scaling: Scaling) -> None:
    """One step of every parameter of a group."""
    torch_adamw(
        list(group.params), list(group.grads), list(group.exp_avgs), list(group.exp_avg_sqs), list(group.max_exp_avg_sqs),
        list(group.steps), fused=True, found_inf=None if scaling.found_inf is None else scaling.found_inf.reshape(()),
        amsgrad=p.amsgrad, beta1=group.beta1, beta2=group.beta2, lr=group.lr, weight_decay=group.weight_decay, eps=group.eps,
        maximize=group.maximize,
    )  # fmt: skip
