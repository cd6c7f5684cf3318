"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

It works in chunks that stay in the cache: a product there costs 0.11 ns a value on one core, from memory 0.45 (Xeon, 2 MiB of L2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ops_math import features
from ops_math.ops.glu.problem import GluProblem, cost
from ops_math.spec import DTYPE_OF, Device, compute_dtype

CACHE = 3 << 19  # bytes of all tensors in a chunk [B], a thread: three quarters of a 2 MiB cache
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # gelu_tanh(x) = x sigmoid(SLOPE (x + CUBIC x^3)), since (1 + tanh u) / 2 = sigmoid(2 u)
CUBIC = 0.044715


def predict_us(p: GluProblem, device: Device, phase: str) -> float:
    """Passes over memory as measured on one core: chunks reach it once, 16-bit values are converted on the way."""
    passes = 1.5 if p.gate in ("fp32", "fp64") else 3.0
    return cost(p, phase).bytes * passes / (device.bandwidth_gbs * 1e3) + 4 * device.launch_us


def activate(activation: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = activation(x)."""
    if activation == "silu":
        features.aten("silu", "out")(x, out=out)
    elif activation == "gelu":
        features.aten("gelu", "out")(x, out=out)
    else:  # four times as fast as PyTorch's, whose tanh costs 1.8 ns a value on a CPU
        torch.mul(x, x, out=out)
        out.mul_(SLOPE * CUBIC).add_(SLOPE).mul_(x).sigmoid_().mul_(x)


def differentiate(activation: str, grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None) -> None:
    """grad *= activation'(x); out = activation(x) where asked for."""
    if activation == "gelu_tanh":
        _differentiate_tanh(grad, x, out)
        return
    if activation == "silu":
        features.aten("silu_backward", "grad_input")(grad, x, grad_input=grad)
    else:
        features.aten("gelu_backward", "grad_input")(grad, x, grad_input=grad)
    if out is not None:
        activate(activation, x, out)


def _differentiate_tanh(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None) -> None:
    """With s = sigmoid(z): d(x s)/dx = s + x s (1 - s) dz/dx and dz/dx = 3 z / x - 2 SLOPE."""
    inner = torch.mul(x, x).mul_(SLOPE * CUBIC).add_(SLOPE).clamp_max_(1e30)  # finite, so that 0 times the slope stays 0
    s = torch.mul(inner, x).sigmoid_()
    if out is not None:
        torch.mul(x, s, out=out)
    curve = features.aten("sigmoid_backward")(x, s)  # x s (1 - s)
    s.addcmul_(curve, inner.mul_(3.0).sub_(2.0 * SLOPE))
    grad.mul_(s)


def split(p: GluProblem, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as they are, or as views of the packed tensor."""
    if up is not None:
        return gate, up
    return (gate[..., 0::2], gate[..., 1::2]) if p.packing == "interleaved" else (gate[..., : p.cols], gate[..., p.cols :])


def chunks(rows: int, cols: int, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, piece by piece; the whole at once where it is small or on a GPU."""
    size = CACHE * torch.get_num_threads() // (4 * len(tensors))
    if tensors[0].device.type != "cpu" or rows * cols <= 2 * size:
        return iter((tuple(tensors),))
    if all(t.is_contiguous() for t in tensors):
        return zip(*(t.view(-1).split(size) for t in tensors), strict=True)
    return zip(*(t.reshape(rows, cols).split(max(1, size // cols)) for t in tensors), strict=True)


def target(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where to compute a result: in place where it is stored as it is computed and lies dense, else in a buffer."""
    return t if t.dtype == dtype and t.stride(-1) == 1 else torch.empty(t.shape, dtype=dtype, device=t.device)


def _compute_dtype(gate: torch.Tensor, up: torch.Tensor | None) -> torch.dtype:
    return compute_dtype(gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype))


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    dtype = _compute_dtype(gate, up)
    y = torch.empty((*gate.shape[:-1], p.cols), dtype=DTYPE_OF[p.out], device=gate.device)
    for g, u, y_part in chunks(p.rows, p.cols, (*split(p, gate, up), y)):
        wide = target(y_part, dtype)
        activate(p.activation, g.to(dtype), wide)
        wide.mul_(u.to(dtype))
        if wide is not y_part:
            y_part.copy_(wide)
    return y


def launch_bwd(p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    dtype = _compute_dtype(gate, up)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if p.need_dgate else gate.new_empty(0)
    if up is None:
        dup = gate.new_empty(0)
        named = dict(zip(("dgate", "dup"), split(p, dgate, None), strict=True)) if p.need_dgate else {}
    else:
        dup = torch.empty(up.shape, dtype=up.dtype, device=up.device) if p.need_dup else up.new_empty(0)
        named = ({"dgate": dgate} if p.need_dgate else {}) | ({"dup": dup} if p.need_dup else {})
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if p.need_y else dy.new_empty(0)
    if p.need_y:
        named["y"] = y
    for d, g, u, *parts in chunks(p.rows, p.cols, (dy, *split(p, gate, up), *named.values())):
        _backward_part(p, d.to(dtype), g.to(dtype), u.to(dtype), dict(zip(named, parts, strict=True)))
    return dgate, dup, y


def _backward_part(p: GluProblem, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, results: dict[str, torch.Tensor]) -> None:
    """dgate = dy up activation'(gate); dup = dy activation(gate); y = activation(gate) up."""
    wide = {name: target(t, dy.dtype) for name, t in results.items()}
    act = wide.get("dup", wide.get("y"))
    if "dgate" in wide:
        torch.mul(dy, up, out=wide["dgate"])
        differentiate(p.activation, wide["dgate"], gate, act)
    elif act is not None:
        activate(p.activation, gate, act)
    if "y" in wide and act is not None:
        torch.mul(act, up, out=wide["y"])
    if "dup" in wide:
        wide["dup"].mul_(dy)
    for name, t in results.items():
        if wide[name] is not t:
            t.copy_(wide[name])
