"""PyTorch's own log-softmax kernels around our targets.

The loss is gathered rather than taken from `nll_loss`, which ends the process's CUDA context on a target outside the vocabulary where
this operator promises NaN. `linear_cross_entropy` has no such file: PyTorch's own (2.13 and newer) computes its gradients inside an
autograd node of its own and changes them in place in the backward, so it cannot be split at our saved state.
"""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.layout import as_rows
from ops_math.ops.cross_entropy import eager
from ops_math.ops.cross_entropy.problem import CrossEntropyProblem
from ops_math.spec import Device, compute_dtype

KINDS = ("cpu", "cuda", "hip")
PASSES = 8.0  # a copy without the targets and log-probabilities are written in fp32, and read again for their maxima
CALLS = 16


def supports(p: CrossEntropyProblem, device: Device, phase: str) -> str | None:
    """It knows plain logits: no soft cap, no smoothing."""
    name = "_log_softmax" if phase == "fwd" else "_log_softmax_backward_data"
    if not features.has_kernel(name, device.kind):
        return f"this PyTorch has no {name} kernel for {device.kind}"
    if p.softcap:
        return "has no soft cap"
    if p.label_smoothing:
        return "has no smoothing"
    if p.rows == 0:
        return "cannot take an empty input"
    return None


def launch_fwd(
    p: CrossEntropyProblem,
    config: None,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, factors [rows, 3], and the divisor of the mean (empty without one).

    PyTorch's kernel sees the other classes alone: of a probability near 1 its log-probability keeps no digit of what they hold.
    """
    dtype = compute_dtype(logits.dtype)
    rows = eager.read_targets(p, target, None if class_weight is None else class_weight.to(dtype), dtype)
    z, index = as_rows(logits), rows.index[:, None]
    z_target = z.gather(1, index)[:, 0].to(dtype)
    widens = z.is_cuda and z.dtype == torch.float16  # the one conversion that the kernel does itself, and on GPUs only
    wide = z if widens else z.to(dtype)
    others = wide.scatter(1, index, float("-inf")) if wide is z else wide.scatter_(1, index, float("-inf"))
    top_of_others = others.amax(1).to(dtype)
    log_of_others = -features.aten("_log_softmax")(others, 1, widens).amax(1)  # NaN where there are none
    top = torch.maximum(top_of_others, z_target).clamp_(min=torch.finfo(dtype).min)
    sum_of_others = torch.where(top_of_others == float("-inf"), 0.0, (top_of_others - top).exp_() * log_of_others.exp_())
    sums = eager.Sums(top, sum_of_others, (z_target - top).exp_())
    loss, factors = eager.row_results(p, rows, sums, z_target, None)
    reduced, divisor = eager.reduce(p, loss, rows, num_tokens)
    return reduced.view(target.shape) if p.reduction == "none" else reduced, factors, divisor


def launch_bwd(
    p: CrossEntropyProblem,
    config: None,
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    factors: torch.Tensor,
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """dlogits, of the dtype and shape of the logits.

    The kernel computes dlog_p - exp(log_p) sum(dlog_p): given z - top for log_p, and for dlog_p the factor of exp(z - top) at the target
    alone, it needs no pass that divides exponentials. The target's gradient, for which that does not hold, is written after it.
    """
    dtype = factors.dtype
    rows = eager.read_targets(p, target, None if class_weight is None else class_weight.to(dtype), dtype)
    scale = torch.where(rows.kept, (dloss if divisor is None else dloss / divisor).reshape(-1).to(dtype), 0.0)
    top, on_other, on_target = factors.unbind(1)
    shifted, index = as_rows(logits).to(dtype) - top[:, None], rows.index[:, None]
    dlog_p = torch.zeros_like(shifted).scatter_(1, index, (-on_other * scale)[:, None])
    dz = features.aten("_log_softmax_backward_data")(dlog_p, shifted, 1, dtype)
    dz.scatter_(1, index, (on_target * scale).masked_fill_(~rows.kept, 0.0)[:, None])
    return dz.to(logits.dtype).view(logits.shape)
