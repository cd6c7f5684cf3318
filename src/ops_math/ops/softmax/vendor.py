"""PyTorch's own softmax."""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.layout import dense
from ops_math.ops.softmax.problem import SoftmaxProblem
from ops_math.spec import DTYPE_OF, Device

KINDS = ("cpu", "cuda", "hip", "interpreter")
WHY = "rows of softmax", "PyTorch's kernel takes tensors without gaps"
PASSES = 1.7  # H200, bf16: 1270 to 2406 GB/s forward, 1760 to 2146 backward (2026-11-29)


def supports(p: SoftmaxProblem, device: Device, phase: str) -> str | None:
    """One dtype for input and result."""
    name = "_softmax" if phase == "fwd" else "_softmax_backward_data"
    if not features.has_kernel(name, device.kind):
        return f"this PyTorch has no {name} kernel for {device.kind}"
    if p.out != p.x:
        return "wants one dtype for input and result"
    return None


def launch_fwd(p: SoftmaxProblem, config: None, x: torch.Tensor) -> torch.Tensor:
    """y."""
    return features.aten("_softmax")(dense(x, *WHY), -1, False)


def launch_bwd(p: SoftmaxProblem, config: None, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dx."""
    return features.aten("_softmax_backward_data")(dense(dy, *WHY), dense(y, *WHY), -1, DTYPE_OF[p.x])
