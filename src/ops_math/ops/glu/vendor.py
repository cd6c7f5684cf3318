"""PyTorch's own activations and a product: the fastest on a CPU in 16 bits, where its kernels convert in registers.

The activation is rounded before the product, as in plain PyTorch.
"""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.ops.glu.problem import GluProblem, cost
from ops_math.spec import Device

KINDS = ("cpu", "cuda", "hip")
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
KERNELS = (("silu", "out"), ("silu_backward", "grad_input"), ("gelu", "out"), ("gelu_backward", "grad_input"))


def supports(p: GluProblem, device: Device, phase: str) -> str | None:
    """One dtype for all, and values side by side."""
    for name, overload in KERNELS:
        if not features.has_kernel(name, device.kind, overload):
            return f"this PyTorch has no {name} kernel for {device.kind}"
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
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if p.activation == "silu":
        return features.aten("silu", "out")(x, out=out)
    return features.aten("gelu", "out")(x, approximate=APPROXIMATE[p.activation], out=out)


def _times_derivative(p: GluProblem, grad: torch.Tensor, x: torch.Tensor) -> None:
    if p.activation == "silu":
        features.aten("silu_backward", "grad_input")(grad, x, grad_input=grad)
    else:
        features.aten("gelu_backward", "grad_input")(grad, x, approximate=APPROXIMATE[p.activation], grad_input=grad)


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """y [..., N] and, where it is to be kept, activation(gate) [..., N]."""
    gate, up = _split(p, gate, up)
    act = _activation(p, gate)
    return (torch.mul(act, up, out=torch.empty_like(act)), act) if p.keep else (act.mul_(up), act.new_empty(0))


def launch_bwd(
    p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    none = gate.new_empty(0)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if p.need_dgate else none
    dup = torch.empty(dy.shape, dtype=gate.dtype, device=gate.device) if up is not None and p.need_dup else none
    dgate_part, dup_part = _split(p, dgate, dup) if up is not None or not p.need_dgate else _split(p, dgate, None)
    gate, up = _split(p, gate, up)
    if p.need_dgate:
        torch.mul(dy, up, out=dgate_part)
        _times_derivative(p, dgate_part, gate)
    if act is None and (p.need_dup or p.need_y):
        act = _activation(p, gate)
    if act is not None and p.need_dup:
        torch.mul(act, dy, out=dup_part)
    return dgate, dup, torch.mul(act, up, out=torch.empty_like(act)) if act is not None and p.need_y else none
