"""The operator as one pass, compiled for the CPU: what `eager` does in two forward and up to six backward."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ops_math import features
from ops_math.backends import inductor
from ops_math.layout import as_rows, dense
from ops_math.ops.glu.problem import GluProblem
from ops_math.spec import DTYPE_OF, Device, compute_dtype

PASSES = 1.2
CALLS = 2
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
WHY = "input of a gated unit", "compiled code walks rows that lie side by side"


def supports(p: GluProblem, device: Device, phase: str) -> str | None:
    """Values that a vector instruction can take side by side."""
    if not p.rows or not p.cols:
        return "does not take empty tensors"
    return "compiles interleaved columns to scalar code" if p.packing == "interleaved" else None


def _parts(p: GluProblem, inputs: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up in the dtype of arithmetic, taken from the front of the inputs."""
    gate = inputs.pop(0)
    up = gate[..., p.cols :] if not p.up else inputs.pop(0)
    return gate[..., : p.cols].to(dtype), up.to(dtype)


def _dtype(p: GluProblem) -> torch.dtype:
    return compute_dtype(torch.promote_types(DTYPE_OF[p.gate], DTYPE_OF[p.up or p.gate]))


def _active(p: GluProblem, gate: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) if p.activation == "silu" else F.gelu(gate, approximate=APPROXIMATE[p.activation])


def _forward(p: GluProblem, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = _parts(p, list(inputs), _dtype(p))
    act = _active(p, gate)
    y = (act * up).to(DTYPE_OF[p.out])
    return (y, act.to(y.dtype)) if p.keep else (y,)


def _backward(p: GluProblem, dy: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dgate = dy up activation'(gate); dup = dy activation(gate); y = activation(gate) up. Those that are needed, in this order."""
    dtype, out, rest = _dtype(p), dy.dtype, list(others)
    gate, up = _parts(p, rest, dtype)
    act = rest.pop().to(dtype) if p.keep else _active(p, gate)
    dy, made = dy.to(dtype), []
    if p.need_dgate:
        slope = dy * up
        if p.activation == "silu":
            dgate = features.aten("silu_backward")(slope, gate)
        else:
            dgate = features.aten("gelu_backward")(slope, gate, approximate=APPROXIMATE[p.activation])
        made.append((dgate if p.up else torch.cat((dgate, dy * act), -1)).to(DTYPE_OF[p.gate]))
    if p.up and p.need_dup:
        made.append((dy * act).to(DTYPE_OF[p.up]))
    if p.need_y:
        made.append((act * up).to(out))
    return tuple(made)


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """y [..., N] and, where it is to be kept, activation(gate) [..., N]."""
    tensors = [dense(as_rows(t), *WHY) for t in (gate, up) if t is not None]
    general = p._replace(rows=-1, need_dgate=True, need_dup=True, need_y=False)
    y, *act = inductor.call(("glu fwd", general), functools.partial(_forward, general), tensors, ((0,),) * len(tensors))
    shape = *gate.shape[:-1], p.cols
    return y.view(shape), act[0].view(shape) if act else y.new_empty(0)


def launch_bwd(
    p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    kept = act if p.keep else None
    tensors = [dense(as_rows(t), *WHY) for t in (dy, gate, up, kept) if t is not None]
    needed = (p.need_dgate, up is not None and p.need_dup, p.need_y)
    empty = gate.new_empty(0), gate.new_empty(0, dtype=gate.dtype if up is None else up.dtype), dy.new_empty(0)
    if not any(needed):
        return empty
    general = p._replace(rows=-1)
    made = iter(inductor.call(("glu bwd", general), functools.partial(_backward, general), tensors, ((0,),) * len(tensors)))
    shapes = gate.shape, dy.shape, dy.shape
    dgate, dup, y = (next(made).view(s) if need else e for need, s, e in zip(needed, shapes, empty, strict=True))
    return dgate, dup, y
