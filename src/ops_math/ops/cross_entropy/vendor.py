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
PASSES = 6.0  # log-probabilities are written in fp32, and read again for the logsumexp
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
    """The loss, lse [rows], and the divisor of the mean (empty without one)."""
    dtype = compute_dtype(logits.dtype)
    rows = eager.read_targets(p, target, None if class_weight is None else class_weight.to(dtype), dtype)
    z = as_rows(logits)
    widens = z.is_cuda and z.dtype == torch.float16  # the one conversion that the kernel does itself, and on GPUs only
    log_p = features.aten("_log_softmax")(z if widens else z.to(dtype), 1, widens)
    lse = z.amax(1).to(dtype) - log_p.amax(1)
    loss = -log_p.gather(1, rows.index[:, None])[:, 0] * rows.weight
    if p.z_loss:
        loss += lse.square() * rows.one * p.z_loss
    reduced, divisor = eager.reduce(p, torch.where(rows.kept, loss, 0.0), rows, num_tokens)
    return reduced.view(target.shape) if p.reduction == "none" else reduced, lse, divisor


def launch_bwd(
    p: CrossEntropyProblem,
    config: None,
    dloss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    lse: torch.Tensor,
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """dlogits, of the dtype and shape of the logits."""
    dtype = lse.dtype
    rows = eager.read_targets(p, target, None if class_weight is None else class_weight.to(dtype), dtype)
    scale = torch.where(rows.kept, (dloss if divisor is None else dloss / divisor).reshape(-1).to(dtype), 0.0)
    log_p = as_rows(logits).to(dtype) - lse[:, None]
    at_target = -rows.weight * scale
    dlog_p = torch.zeros_like(log_p).scatter_(1, rows.index[:, None], at_target[:, None])
    dz = features.aten("_log_softmax_backward_data")(dlog_p, log_p, 1, dtype)
    if p.z_loss:
        dz.addcmul_(log_p.exp_(), (lse * rows.one * scale * (2 * p.z_loss))[:, None])
    return dz.to(logits.dtype).view(logits.shape)
