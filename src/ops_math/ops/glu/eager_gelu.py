"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops_math.layout import reshaped
from ops_math.ops.glu.eager import WHY, activate, chunks, differentiate, store, target, whole, wide
from ops_math.ops.glu.problem_gelu import GeluProblem, cost
from ops_math.spec import DTYPE_OF, Device, compute_dtype

ACTIVATION = {"none": "gelu", "tanh": "gelu_tanh"}


def predict_us(p: GeluProblem, device: Device, phase: str) -> float:
    """Passes over memory as measured on one core; the tanh form is PyTorch's slowest, and ours is not PyTorch's."""
    passes = (1.2 if p.approximate == "tanh" else 1.6) * (1.0 if p.x in ("fp32", "fp64") else 2.0)
    return cost(p, phase).bytes * passes / (device.bandwidth_gbs * 1e3) + 4 * device.launch_us


def _shifted(x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    """x + bias in the dtype of arithmetic, in `out`; x itself, dense, without a bias."""
    if bias is None:
        return wide(x, dtype)
    return torch.add(x, bias, out=out) if x.dtype == dtype else out.copy_(x).add_(bias)


def _pieces(
    p: GeluProblem, bias: torch.Tensor | None, dtype: torch.dtype, tensors: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors as matrices: whole, or in chunks where they must be converted."""
    rows = [reshaped(t, (p.rows, p.cols), *WHY) for t in tensors]
    if whole(dtype, rows):
        return iter((tuple(rows),))
    return chunks(p.rows, p.cols, rows, flat=bias is None)


def launch_fwd(p: GeluProblem, config: None, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    dtype = compute_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(dtype)
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    for x_part, y_part in _pieces(p, bias, dtype, [x, y]):
        made = target(y_part, dtype)
        activate(ACTIVATION[p.approximate], _shifted(x_part, wide_bias, dtype, made), made)
        store(y_part, made)
    return y


def launch_bwd(
    p: GeluProblem, config: None, dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dbias and y; empty where not asked for."""
    dtype = compute_dtype(x.dtype)
    wide_bias = None if bias is None else bias.to(dtype)
    dx = torch.empty(x.shape if p.need_dx else (0,), dtype=x.dtype, device=x.device)
    y = torch.empty(dy.shape if p.need_y else (0,), dtype=dy.dtype, device=dy.device)
    dbias = torch.zeros(p.cols, dtype=dtype, device=x.device) if p.need_dbias else None
    for dy_part, x_part, *parts in _pieces(p, bias, dtype, [dy, x, *([dx] if p.need_dx else []), *([y] if p.need_y else [])]):
        made = [target(t, dtype) for t in parts]
        grad = made[0] if p.need_dx else torch.empty(x_part.shape, dtype=dtype, device=x.device)  # until it is made, x + bias
        z = _shifted(x_part, wide_bias, dtype, grad)
        if p.need_y:
            activate(ACTIVATION[p.approximate], z, made[-1])
        if p.need_dx or dbias is not None:
            differentiate(ACTIVATION[p.approximate], wide(dy_part, dtype), z, grad)
        if dbias is not None:
            dbias += grad.sum(0)
        for t, m in zip(parts, made, strict=True):
            store(t, m)
    return dx, x.new_empty(0) if dbias is None or bias is None else dbias.to(bias.dtype), y
