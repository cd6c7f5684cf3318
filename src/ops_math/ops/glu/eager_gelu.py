"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

import torch

from ops_math.ops.glu.eager import activate, chunks, differentiate, target
from ops_math.ops.glu.problem_gelu import GeluProblem, cost
from ops_math.spec import DTYPE_OF, Device, compute_dtype

ACTIVATION = {"none": "gelu", "tanh": "gelu_tanh"}


def predict_us(p: GeluProblem, device: Device, phase: str) -> float:
    """Passes over memory as measured on one core; the tanh form is PyTorch's slowest, and ours is not PyTorch's."""
    passes = (1.2 if p.approximate == "tanh" else 1.6) * (1.0 if p.x in ("fp32", "fp64") else 2.0)
    return cost(p, phase).bytes * passes / (device.bandwidth_gbs * 1e3) + 4 * device.launch_us


def _shifted(x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x + bias in the dtype of arithmetic."""
    return x.to(dtype) if bias is None else torch.add(x, bias)


def launch_fwd(p: GeluProblem, config: None, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    dtype = compute_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(dtype)
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    rows = x.reshape(p.rows, p.cols), y.view(p.rows, p.cols)
    for x_part, y_part in chunks(p.rows, p.cols, dtype, rows, flat=bias is None):
        wide = target(y_part, dtype)
        activate(ACTIVATION[p.approximate], _shifted(x_part, wide_bias, dtype), wide)
        if wide is not y_part:
            y_part.copy_(wide)
    return y


def launch_bwd(
    p: GeluProblem, config: None, dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dbias and y; empty where not asked for."""
    dtype = compute_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(dtype)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if p.need_dx else x.new_empty(0)
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if p.need_y else dy.new_empty(0)
    dbias = torch.zeros(p.cols, dtype=dtype, device=x.device) if p.need_dbias else None
    tensors = (dy, x, *([dx] if p.need_dx else []), *([y] if p.need_y else []))
    for parts in chunks(p.rows, p.cols, dtype, [t.reshape(p.rows, p.cols) for t in tensors], flat=bias is None):
        z = _shifted(parts[1], wide_bias, dtype)
        act = target(parts[-1], dtype) if p.need_y else None
        if p.need_dx or dbias is not None:
            wide = target(parts[2], dtype) if p.need_dx else torch.empty(z.shape, dtype=dtype, device=z.device)
            differentiate(ACTIVATION[p.approximate], wide.copy_(parts[0]), z, act)
            if dbias is not None:
                dbias += wide.sum(0)
            if p.need_dx and wide is not parts[2]:
                parts[2].copy_(wide)
        elif act is not None:
            activate(ACTIVATION[p.approximate], z, act)
        if act is not None and act is not parts[-1]:
            parts[-1].copy_(act)
    return dx, x.new_empty(0) if dbias is None or bias is None else dbias.to(bias.dtype), y
