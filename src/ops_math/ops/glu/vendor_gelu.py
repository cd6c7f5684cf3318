"""PyTorch's own GELU."""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.layout import dense
from ops_math.ops.glu.problem_gelu import GeluProblem
from ops_math.spec import Device

KINDS = ("cpu", "cuda", "hip")
WHY = "rows of GELU", "its result lies dense, and PyTorch's lies as its input does"


def supports(p: GeluProblem, device: Device, phase: str) -> str | None:
    """It knows no bias, computes one result a call, and has one dtype for all."""
    if not features.has_kernel("gelu", device.kind, "out") or not features.has_kernel("gelu_backward", device.kind, "grad_input"):
        return f"this PyTorch has no gelu kernel for {device.kind}"
    if p.bias:
        return "does not add a bias"
    if p.need_y:
        return "does not compute the output in the backward"
    if p.out != p.x:
        return "wants one dtype for input and output"
    return None


def launch_fwd(p: GeluProblem, config: None, x: torch.Tensor, bias: None) -> torch.Tensor:
    """y, contiguous."""
    return torch.nn.functional.gelu(dense(x, *WHY), approximate=p.approximate)


def launch_bwd(
    p: GeluProblem, config: None, dy: torch.Tensor, x: torch.Tensor, bias: None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, contiguous, and two empty tensors."""
    dx = features.aten("gelu_backward")(dense(dy, *WHY), dense(x, *WHY), approximate=p.approximate)
    return dx, x.new_empty(0), dy.new_empty(0)
