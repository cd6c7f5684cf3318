"""PyTorch's own activations and a product: the fastest on a CPU in 16 bits, where its kernels convert in registers.

The activation is rounded before the product, as in plain PyTorch.
"""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.ops.glu.problem import GluProblem, cost
from ops_math.spec import Device

KINDS = ("cpu", "cuda", "hip")


def supports(p: GluProblem, device: Device, phase: str) -> str | None:
    """One dtype for all, and values side by side."""
    missing = [n for n, o in (("silu", "out"), ("silu_backward", "grad_input"), ("gelu", "out"), ("gelu_backward", "grad_input")) if not features.has_kernel(n, device.kind, o)]
    if missing:
        return f"this PyTorch has no {missing[0]} kernel for {device.kind}"
    if p.packing == "interleaved":
        return "PyTorch's kernels are slow on interleaved columns"
    if {p.gate, p.up or p.gate, p.out} != {p.gate}:
        return "wants one dtype for inputs and output"
    return None


def predict_us(p: GluProblem, device: Device, phase: str) -> float:
    """Passes over memory as measured on one core; forward 2 functions, backward 4."""
    passes = 2.2 if p.gate in ("fp32", "fp64") else 2.0
    return cost(p, phase).bytes * passes / (device.bandwidth_gbs * 1e3) + 4 * device.launch_us


def _split(p: GluProblem, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return (gate[..., : p.cols], gate[..., p.cols :]) if up is None else (gate, up)


def _activation(p: GluProblem, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return torch.nn.functional.silu(x) if p.activation == "silu" else torch.nn.functional.gelu(x, approximate="tanh" if p.activation == "gelu_tanh" else "none")


def _times_derivative(p: GluProblem, grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    if p.activation == "silu":
        features.aten("silu_backward", "grad_input")(grad, x, grad_input=out)
    else:
        features.aten("gelu_backward", "grad_input")(grad, x, approximate="tanh" if p.activation == "gelu_tanh" else "none", grad_input=out)


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    gate, up = _split(p, gate, up)
    return _activation(p, gate).mul_(up)


def launch_bwd(p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    packed = up is None
    whole = gate
    gate, up = _split(p, gate, up)
    dgate = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device) if p.need_dgate else whole.new_empty(0)
    dgate_part, dup_part = _split(p, dgate, None) if packed and p.need_dgate else (dgate, None)
    if p.need_dgate:
        _times_derivative(p, dy * up, gate, dgate_part)
    act = _activation(p, gate) if p.need_dup or p.need_y else None
    y = act * up if p.need_y and act is not None else dy.new_empty(0)
    if dup_part is not None and act is not None:
        torch.mul(act, dy, out=dup_part)
    dup = act.mul_(dy) if act is not None and not packed and p.need_dup else up.new_empty(0)
    return dgate, dup, y
