"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

Values stored as they are computed are worked on whole, in place (chunks that stay in the cache were slower on a CPU with a large
third-level cache); 16-bit ones are converted in chunks, so that the wide copies never reach memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ops_math import features
from ops_math.layout import dense, reshaped
from ops_math.ops.glu.problem import GluProblem, cost
from ops_math.spec import DTYPE_OF, Device, compute_dtype

CACHE = 3 << 19  # bytes of all wide copies in a chunk [B], a thread: three quarters of a 2 MiB cache
WHY = "columns of an activation", "PyTorch's activations are slow on strided columns"
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def predict_us(p: GluProblem, device: Device, phase: str) -> float:
    """Passes over memory as measured on one core: chunks reach it once, 16-bit values are converted on the way."""
    passes = 1.5 if p.gate in ("fp32", "fp64") else 3.0
    return cost(p, phase).bytes * passes / (device.bandwidth_gbs * 1e3) + 4 * device.launch_us


def activate(activation: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """out = activation(x); out may be x."""
    if activation == "silu":
        features.aten("silu", "out")(x, out=out)
    else:
        features.aten("gelu", "out")(x, approximate=APPROXIMATE[activation], out=out)


def differentiate(activation: str, dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor) -> None:
    """dx = dy activation'(x); dx may be dy or x."""
    if activation == "silu":
        features.aten("silu_backward", "grad_input")(dy, x, grad_input=dx)
    else:
        features.aten("gelu_backward", "grad_input")(dy, x, approximate=APPROXIMATE[activation], grad_input=dx)


def split(p: GluProblem, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up as they are, or as views of the packed tensor."""
    if up is not None:
        return gate, up
    return (gate[..., 0::2], gate[..., 1::2]) if p.packing == "interleaved" else (gate[..., : p.cols], gate[..., p.cols :])


def whole(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors can be worked on as they are: nothing to convert, nothing to make dense."""
    return all(t.dtype == dtype and t.stride(-1) == 1 for t in tensors)


def chunks(rows: int, cols: int, tensors: Sequence[torch.Tensor], flat: bool = True) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors, piece by piece where they are large and on a CPU.

    Pieces are whole rows unless all tensors are contiguous and `flat` allows to forget the rows."""
    size = CACHE * torch.get_num_threads() // (4 * len(tensors))
    if tensors[0].device.type != "cpu" or rows * cols <= size + size // 2:
        return iter((tuple(tensors),))
    if flat and all(t.is_contiguous() for t in tensors):
        return zip(*(t.view(-1).split(size) for t in tensors), strict=True)
    return zip(*(reshaped(t, (rows, cols), *WHY).split(max(1, size // cols)) for t in tensors), strict=True)


def target(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where to compute a result: in place where it is stored as it is computed and lies dense, else in a buffer."""
    return t if t.dtype == dtype and t.stride(-1) == 1 else torch.empty(t.shape, dtype=dtype, device=t.device)


def wide(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in the dtype of arithmetic, side by side: PyTorch's activations are scalar code on strided columns."""
    return t.to(dtype) if t.stride(-1) == 1 else dense(t.to(dtype), *WHY)


def store(t: torch.Tensor | None, made: torch.Tensor | None) -> None:
    """What was made in a buffer goes where it belongs."""
    if t is not None and made is not None and made is not t:
        t.copy_(made)


def _compute_dtype(gate: torch.Tensor, up: torch.Tensor | None) -> torch.dtype:
    return compute_dtype(gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype))


def launch_fwd(p: GluProblem, config: None, gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """y [..., N] and, where it is to be kept, activation(gate) [..., N]."""
    dtype, shape = _compute_dtype(gate, up), (*gate.shape[:-1], p.cols)
    y = torch.empty(shape, dtype=DTYPE_OF[p.out], device=gate.device)
    act = torch.empty(shape if p.keep else (0,), dtype=y.dtype, device=gate.device)
    gate, up = split(p, gate, up)
    results = (y, act) if p.keep else (y,)
    if whole(dtype, (gate, up, y)):
        activate(p.activation, gate, results[-1])
        torch.mul(results[-1], up, out=y)
        return y, act
    for g, u, *parts in chunks(p.rows, p.cols, (gate, up, *results)):
        made = [target(t, dtype) for t in parts]
        activate(p.activation, wide(g, dtype), made[-1])
        torch.mul(made[-1], wide(u, dtype), out=made[0])
        for t, m in zip(parts, made, strict=True):
            store(t, m)
    return y, act


def launch_bwd(
    p: GluProblem, config: None, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor | None, act: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dgate (packed where the inputs were), dup, y; empty where not asked for."""
    dtype = _compute_dtype(gate, up)
    dgate = torch.empty(gate.shape if p.need_dgate else (0,), dtype=gate.dtype, device=gate.device)
    dup = torch.empty(dy.shape if up is not None and p.need_dup else (0,), dtype=gate.dtype if up is None else up.dtype, device=gate.device)
    y = torch.empty(dy.shape if p.need_y else (0,), dtype=dy.dtype, device=dy.device)
    results: list[torch.Tensor | None] = [*split(p, dgate, None)] if up is None and p.need_dgate else [dgate, dup]
    results.append(y)
    results = [t if t is not None and t.numel() else None for t in results]
    inputs = (dy, *split(p, gate, up), *(() if act is None else (act,)))
    present = [t for t in results if t is not None]
    if whole(dtype, (*inputs, *present)):
        _backward(p, inputs, results)
        return dgate, dup, y
    for parts in chunks(p.rows, p.cols, (*inputs, *present)):
        rest = iter(parts[len(inputs) :])
        pieces = [None if t is None else next(rest) for t in results]
        made = [None if t is None else target(t, dtype) for t in pieces]
        _backward(p, [wide(t, dtype) for t in parts[: len(inputs)]], made)
        for t, m in zip(pieces, made, strict=True):
            store(t, m)
    return dgate, dup, y


def _backward(p: GluProblem, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> None:
    """dgate = dy up activation'(gate); dup = dy activation(gate); y = activation(gate) up."""
    dy, gate, up, *kept = inputs
    dgate, dup, y = results
    made = None if kept else dup if dup is not None else y  # where to put the activation that was not kept
    if dgate is not None:
        torch.mul(dy, up, out=dgate)
        differentiate(p.activation, dgate, gate, dgate)
    if made is not None:
        activate(p.activation, gate, made)
    act = kept[0] if kept else made
    if y is not None:
        torch.mul(act, up, out=y)
    if dup is not None:
        torch.mul(act, dy, out=dup)
