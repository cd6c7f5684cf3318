"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

It works in chunks that stay in the cache, so that its passes cost about what one pass over memory does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops_math import features
from ops_math.ops.glu.problem import GluProblem
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 1.5
CALLS = 4
CHUNK = 32768  # values a thread and chunk: 128 KiB in fp32


def _activate(p: GluProblem, x: torch.Tensor, out: torch.Tensor) -> None:
    if p.activation == "silu":
        features.aten("silu", "out")(x, out=out)
    else:
        features.aten("gelu", "out")(x, approximate="tanh" if p.activation == "gelu_tanh" else "none", out=out)


def _times_derivative(p: GluProblem, dy: torch.Tensor, x: torch.Tensor) -> None:
    """dy times the derivative of the activation at x, written over dy."""
    if p.activation == "silu":
        features.aten("silu_backward", "grad_input")(dy, x, grad_input=dy)
    else:
        approximate = "tanh" if p.activation == "gelu_tanh" else "none"
        features.aten("gelu_backward", "grad_input")(dy, x, approximate=approximate, grad_input=dy)


def _split(p: GluProblem, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as they are, or as views of the packed tensor."""
    if up is not None:
        return gate, up
    return (gate[..., 0::2], gate[..., 1::2]) if p.packing == "interleaved" else (gate[..., : p.cols], gate[..., p.cols :])


def _chunks(p: GluProblem, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, piece by piece; the whole at once where it is small or on a GPU."""
    size = CHUNK * torch.get_num_threads()
    if tensors[0].device.type != "cpu" or p.rows * p.cols <= 2 * size:
        return iter((tensors,))
    if all(t.is_contiguous() for t in tensors):
        return zip(*(t.view(-1).split(size) for t in tensors), strict=True)
    return zip(*(t.reshape(p.rows, p.cols).split(max(1, size // p.cols)) for t in tensors), strict=True)


def _target(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where to compute a result: in place where it is stored as it is computed, else in a buffer."""
    return t if t.dtype == dtype else torch.empty(t.shape, dtype=dtype, device=t.device)


def _compute_dtype(gate: torch.Tensor, up: torch.Tensor | None) -> torch.dtype:
    return compute_dtype(gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype))


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    dtype = _compute_dtype(gate, up)
    y = torch.empty((*gate.shape[:-1], p.cols), dtype=DTYPE_OF[p.out], device=gate.device)
    for g, u, y_part in _chunks(p, *_split(p, gate, up), y):
        wide = _target(y_part, dtype)
        _activate(p, g.to(dtype), wide)
        wide.mul_(u)
        if wide is not y_part:
            y_part.copy_(wide)
    return y


def launch_bwd(p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    dtype = _compute_dtype(gate, up)
    none = gate.new_empty(0)
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if p.need_dgate else none
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device) if up is not None and p.need_dup else (none if up is None else up.new_empty(0))
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if p.need_y else dy.new_empty(0)
    results: dict[str, torch.Tensor] = {}
    if up is None:
        results["dgate"], results["dup"] = _split(p, dgate, None)
    else:
        results |= ({"dgate": dgate} if p.need_dgate else {}) | ({"dup": dup} if p.need_dup else {})
    if p.need_y:
        results["y"] = y
    for d, g, u, *parts in _chunks(p, dy, *_split(p, gate, up), *results.values()):
        _backward_part(p, d.to(dtype), g.to(dtype), u.to(dtype), dict(zip(results, parts, strict=True)))
    return dgate, dup, y


def _backward_part(p: GluProblem, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, results: dict[str, torch.Tensor]) -> None:
    """dgate = dy up activation'(gate); dup = dy activation(gate); y = activation(gate) up."""
    wide = {name: _target(t, dy.dtype) for name, t in results.items()}
    if "dgate" in wide:
        torch.mul(dy, up, out=wide["dgate"])
        _times_derivative(p, wide["dgate"], gate)
    if "dup" in wide:
        _activate(p, gate, wide["dup"])
        if "y" in wide:
            torch.mul(wide["dup"], up, out=wide["y"])
        wide["dup"].mul_(dy)
    elif "y" in wide:
        _activate(p, gate, wide["y"])
        wide["y"].mul_(up)
    for name, t in results.items():
        if wide[name] is not t:
            t.copy_(wide[name])
