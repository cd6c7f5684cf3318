"""Calls of the operators that promise level 2, each with what follows the rows: how a batch of them is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import ops_math as om

Tensor = torch.Tensor


class Sample(NamedTuple):
    """A call on `batch` [B, S, ...] tensors that are cut along dimension 0, and on tensors that all pieces share."""

    name: str
    batch: Callable[[torch.Generator, int], list[Tensor]]
    shared: Callable[[torch.Generator], list[Tensor]]
    run: Callable[..., Any]
    token_rows: int  # rows of the operator's problem in one row of the batch


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def attend(first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return om.attention(q, k, v, causal=True)


def drop(first: int, x: Tensor) -> Tensor:
    return om.dropout(x, 0.3, rng=om.Rng(5, x.device, first_row=first))


def add_norm_drop(first: int, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return om.add_layer_norm(x, residual, weight, bias, dropout_p=0.2, rng=om.Rng(3, x.device, first_row=first))


def turn(first: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return om.rope(q, k, cos, sin)


def loss(first: int, logits: Tensor, target: Tensor) -> Tensor:
    return om.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)


def rows(width: int, count: int = 1) -> Callable[[torch.Generator, int], list[Tensor]]:
    return lambda g, n: [normal(g, n, width) for _ in range(count)]


def params(*widths: int) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda g: [normal(g, w) for w in widths]


def heads(*counts: int) -> Callable[[torch.Generator, int], list[Tensor]]:
    return lambda g, n: [normal(g, n, 21, h, 24) for h in counts]


SAMPLES = (
    Sample("rms_norm", rows(1025), params(1025), lambda _, x, w: om.rms_norm(x, w), 1),
    Sample("add_rms_norm", rows(317, 2), params(317), lambda _, x, r, w: om.add_rms_norm(x, r, w), 1),
    Sample("layer_norm", rows(1025), params(1025, 1025), lambda _, x, w, b: om.layer_norm(x, w, b), 1),
    Sample("add_layer_norm", rows(257, 2), params(257, 257), add_norm_drop, 1),
    Sample("softmax", rows(4099), params(), lambda _, x: om.softmax(x), 1),
    Sample("dropout", rows(333), params(), drop, 1),
    Sample("swiglu", rows(259, 2), params(), lambda _, a, b: om.swiglu(a, b), 1),
    Sample("geglu_packed", rows(2 * 131), params(), lambda _, a: om.geglu_packed(a), 1),
    Sample("gelu", rows(259), params(259), lambda _, x, b: om.gelu(x, b), 1),
    Sample("cross_entropy", lambda g, n: [normal(g, n, 503), torch.randint(0, 503, (n,), generator=g)], params(), loss, 1),
    Sample("rope", heads(6, 2), lambda g: [normal(g, 21, 12).sin(), normal(g, 21, 12).cos()], turn, 21),
    Sample("attention", heads(6, 2, 2), params(), attend, 21),
)


class Outcome(NamedTuple):
    """Outputs, gradients of the batch's tensors, gradients of the shared ones."""

    outputs: list[Tensor]
    inputs: list[Tensor]
    shared: list[Tensor]


def outcome(sample: Sample, batch: list[Tensor], shared: list[Tensor], grads: list[Tensor], first: int) -> Outcome:
    """One call with its gradients, of tensors of its own."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in batch]
    held = [t.clone().requires_grad_(sample.name not in ("rope",)) for t in shared]
    made = sample.run(first, *leaves, *held)
    outputs = list(made) if isinstance(made, tuple) else [made]
    torch.autograd.backward(outputs, [g.clone() for g in grads])
    found = [t.detach() for t in outputs]
    return Outcome(found, [t.grad for t in leaves if t.grad is not None], [t.grad for t in held if t.grad is not None])


def drawn(
    sample: Sample, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Batch, shared tensors and output gradients of a sample."""
    g = torch.Generator().manual_seed(size)
    place = lambda t: t.to(device, dtype) if t.is_floating_point() else t.to(device)  # noqa: E731
    batch, shared = [place(t) for t in sample.batch(g, size)], [place(t) for t in sample.shared(g)]
    with torch.no_grad():
        made = sample.run(0, *batch, *shared)
    outputs = list(made) if isinstance(made, tuple) else [made]
    return batch, shared, [place(normal(g, *t.shape)).to(t.dtype) for t in outputs]


def in_pieces(sample: Sample, cuts: list[int], batch: list[Tensor], shared: list[Tensor], grads: list[Tensor]) -> list[Outcome]:
    """The same batch, piece by piece."""
    first, found = 0, []
    for size in cuts:
        piece = slice(first, first + size)
        found.append(outcome(sample, [t[piece] for t in batch], shared, [t[piece] for t in grads], first))
        first += size
    return found


def joined(pieces: list[Outcome]) -> Outcome:
    """Outputs and input gradients one after the other, shared gradients added up in order."""
    outputs = [torch.cat(parts) for parts in zip(*(p.outputs for p in pieces), strict=True)]
    inputs = [torch.cat(parts) for parts in zip(*(p.inputs for p in pieces), strict=True)]
    shared = []
    for parts in zip(*(p.shared for p in pieces), strict=True):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        shared.append(total)
    return Outcome(outputs, inputs, shared)


def differing(a: list[Tensor], b: list[Tensor]) -> list[int]:
    """Which tensors have other bits."""
    assert len(a) == len(b)
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]
