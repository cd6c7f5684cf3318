"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

Where inputs are stored as they are computed it works on whole tensors in place (chunks that stay in the cache were slower on a CPU
with a large third-level cache); 16-bit ones are converted in chunks, so that the wide copies never reach memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ops_math import features
from ops_math.ops.glu.problem import GluProblem, cost
from ops_math.spec import DTYPE_OF, Device, compute_dtype

CACHE = 3 << 19  # bytes of all wide copies in a chunk [B], a thread: three quarters of a 2 MiB cache
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


def chunks(
    rows: int, cols: int, dtype: torch.dtype, tensors: Sequence[torch.Tensor], flat: bool = True
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, piece by piece where they must be converted to `dtype` on a CPU, else the whole at once.

    Pieces are whole rows unless all tensors are contiguous and `flat` allows to forget the rows."""
    size = CACHE * torch.get_num_threads() // (4 * len(tensors))
    if tensors[0].device.type != "cpu" or rows * cols <= 2 * size or all(t.dtype == dtype for t in tensors):
        return iter((tuple(tensors),))
    if flat and all(t.is_contiguous() for t in tensors):
        return zip(*(t.view(-1).split(size) for t in tensors), strict=True)
    return zip(*(t.reshape(rows, cols).split(max(1, size // cols)) for t in tensors), strict=True)


def target(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where to compute a result: in place where it is stored as it is computed and lies dense, else in a buffer."""
    return t if t.dtype == dtype and t.stride(-1) == 1 else torch.empty(t.shape, dtype=dtype, device=t.device)


def wide(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in the dtype of arithmetic, side by side: PyTorch's activations are scalar code on strided columns."""
    return t.to(dtype) if t.stride(-1) == 1 else t.to(dtype).contiguous()


def _compute_dtype(gate: torch.Tensor, up: torch.Tensor | None) -> torch.dtype:
    return compute_dtype(gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype))


def _empty(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor, needed: bool) -> torch.Tensor:
    return torch.empty(shape if needed else (0,), dtype=dtype, device=like.device)


def _store(results: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
    for t, w in zip(results, made, strict=True):
        if w is not t:
            t.copy_(w)


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """y [..., N] and, where it is to be kept, activation(gate) [..., N]."""
    dtype, shape = _compute_dtype(gate, up), (*gate.shape[:-1], p.cols)
    y = torch.empty(shape, dtype=DTYPE_OF[p.out], device=gate.device)
    act = _empty(shape, y.dtype, y, p.keep)
    results = (y, act) if p.keep else (y,)
    for g, u, *parts in chunks(p.rows, p.cols, dtype, (*split(p, gate, up), *results)):
        made = [target(t, dtype) for t in parts]
        activate(p.activation, wide(g, dtype), made[-1])
        torch.mul(made[-1], wide(u, dtype), out=made[0])
        _store(parts, made)
    return y, act


def launch_bwd(
    p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    dtype = _compute_dtype(gate, up)
    dgate = _empty(gate.shape, gate.dtype, gate, p.need_dgate)
    dup = _empty(dy.shape, gate.dtype if up is None else up.dtype, gate, up is not None and p.need_dup)
    y = _empty(dy.shape, dy.dtype, dy, p.need_y)
    if up is None:
        named = dict(zip(("dgate", "dup"), split(p, dgate, None), strict=True)) if p.need_dgate else {}
    else:
        named = ({"dgate": dgate} if p.need_dgate else {}) | ({"dup": dup} if p.need_dup else {})
    if p.need_y:
        named["y"] = y
    inputs = (dy, *split(p, gate, up), *(() if act is None else (act,)))
    for parts in chunks(p.rows, p.cols, dtype, (*inputs, *named.values())):
        results = parts[len(inputs) :]
        made = [target(t, dtype) for t in results]
        _backward_part(p, [wide(t, dtype) for t in parts[: len(inputs)]], dict(zip(named, made, strict=True)))
        _store(results, made)
    return dgate, dup, y


def _backward_part(p: GluProblem, inputs: list[torch.Tensor], results: dict[str, torch.Tensor]) -> None:
    """dgate = dy up activation'(gate); dup = dy activation(gate); y = activation(gate) up."""
    dy, gate, up, *kept = inputs
    dgate, dup, y = (results.get(name) for name in ("dgate", "dup", "y"))
    made = None if kept else dup if dup is not None else y  # where to put the activation that was not kept
    if dgate is not None:
        torch.mul(dy, up, out=dgate)
        differentiate(p.activation, dgate, gate, made)
    elif made is not None:
        activate(p.activation, gate, made)
    act = kept[0] if kept else made
    if y is not None:
        torch.mul(act, up, out=y)
    if dup is not None:
        torch.mul(act, dy, out=dup)
