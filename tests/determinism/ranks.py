"""Calls as several tensor-parallel ranks make them, one after the other on one device: what each is given, and how results are joined.

A cut is by heads (dimension 2 of [B, S, H, D]), by columns (the last dimension, as a column-parallel product leaves it), or by rows (as
sequence parallelism leaves it). Gradients of what is cut are joined as the outputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import ops_math as om
from ops_math.ops.adamw.op import AdamWGroup

Tensor = torch.Tensor
DEGREES = (1, 2, 4)


class Cut(NamedTuple):
    """A call on tensors that are cut along `dim`, of which those in `packed` hold so many parts along it, and on tensors that each rank
    has whole."""

    name: str
    cut: Callable[[torch.Generator], list[Tensor]]
    whole: Callable[[torch.Generator], list[Tensor]]
    run: Callable[..., Any]
    dim: int
    packed: Mapping[int, Sequence[int]] = MappingProxyType(
        {}
    )  # of a tensor's number: the sizes of its parts, e.g. of q, k and v, each of which is cut


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g)


def drop(first: int, x: Tensor) -> Tensor:
    return om.dropout(x, 0.3, rng=om.Rng(5, x.device, first_row=first))


def norm_drop(first: int, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return om.add_layer_norm(x, residual, weight, bias, dropout_p=0.2, rng=om.Rng(3, x.device, first_row=first))


def none(g: torch.Generator) -> list[Tensor]:
    return []


def tables(g: torch.Generator) -> list[Tensor]:
    return [normal(g, 19, 8), normal(g, 19, 8)]


def turn(first: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return om.rope(q, k, cos, sin)


def attend(first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return om.attention(q, k, v, causal=True)


def attend_near(first: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return om.attention(q, k, v, window=(9, 0), softcap=5.0)


def attend_documents(first: int, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    return om.attention(q, k, v, causal=True, cu_seqlens_q=ends)


def attend_packed(first: int, x: Tensor) -> Tensor:
    return om.attention_qkv(x, num_heads=x.shape[-1] // 32, num_kv_heads=x.shape[-1] // 64, causal=True)


def loss(first: int, logits: Tensor, target: Tensor) -> Tensor:
    return om.cross_entropy(logits, target, reduction="none", label_smoothing=0.1, z_loss=1e-3)


def heads(*counts: int, tokens: Sequence[int] = (2, 19), width: int = 16) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda g: [normal(g, *tokens, h, width) for h in counts]


def rows(count: int, width: int = 1025) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda g: [normal(g, 64, width) for _ in range(count)]


def params(count: int, width: int = 1025) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda g: [normal(g, width) for _ in range(count)]


def columns(count: int, width: int) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda g: [normal(g, 7, width) for _ in range(count)]


def logits(g: torch.Generator) -> list[Tensor]:
    return [normal(g, 64, 503), torch.randint(0, 503, (64,), generator=g)]


BY_HEADS = [
    Cut("attention", heads(8, 4, 4), none, attend, 2),
    Cut("attention, one key head a rank", heads(16, 4, 4, tokens=(1, 33), width=8), none, attend_near, 2),
    Cut("attention of documents", heads(8, 8, 8, tokens=(21,)), lambda g: [torch.tensor([0, 5, 6, 21]).int()], attend_documents, 1),
    Cut("attention_qkv", lambda g: [normal(g, 2, 19, 256)], none, attend_packed, 2, {0: (128, 64, 64)}),
    Cut("rope", heads(8, 4), tables, turn, 2),
    Cut("softmax of scores", lambda g: [normal(g, 2, 8, 13, 1031)], none, lambda _, x: om.softmax(x), 1),
]
BY_ROWS = [
    Cut("rms_norm", rows(1), params(1), lambda _, x, w: om.rms_norm(x, w), 0),
    Cut("add_rms_norm", rows(2), params(1), lambda _, x, r, w: om.add_rms_norm(x, r, w), 0),
    Cut("layer_norm", rows(1), params(2), lambda _, x, w, b: om.layer_norm(x, w, b), 0),
    Cut("add_layer_norm with dropout", rows(2), params(2), norm_drop, 0),
    Cut("dropout", rows(1, 65), none, drop, 0),
    Cut("cross_entropy", logits, none, loss, 0),
]
BY_COLUMNS = [
    Cut("swiglu", columns(2, 4 * 37), none, lambda _, a, b: om.swiglu(a, b), 1),
    Cut("geglu", columns(2, 192), none, lambda _, a, b: om.geglu(a, b), 1),
    Cut("swiglu_packed", columns(1, 2 * 148), none, lambda _, x: om.swiglu_packed(x), 1, {0: (148, 148)}),
    Cut("gelu", columns(1, 148), none, lambda _, x: om.gelu(x, approximate="tanh"), 1),
]


def shard(t: Tensor, cut: Cut, number: int, rank: int, degree: int) -> Tensor:
    """The part of a tensor that a rank has, in memory of its own."""
    parts = t.split(cut.packed[number], cut.dim) if number in cut.packed else (t,)
    return torch.cat([p.chunk(degree, cut.dim)[rank] for p in parts], cut.dim).contiguous()


def joined(shards: Sequence[Tensor], cut: Cut, packed: Sequence[int] | None) -> Tensor:
    """The whole of what the ranks have."""
    if packed is None:
        return torch.cat(list(shards), cut.dim)
    degree = len(shards)
    pieces = [s.split([n // degree for n in packed], cut.dim) for s in shards]
    return torch.cat([torch.cat([p[i] for p in pieces], cut.dim) for i in range(len(packed))], cut.dim)


def at(cut: Cut, degree: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, list[Tensor]]:
    """Outputs, gradients of what is cut and of what is not, of as many ranks as the degree, joined."""
    g = torch.Generator().manual_seed(11)
    given, whole = ([t.to(dtype) if t.is_floating_point() else t for t in made] for made in (cut.cut(g), cut.whole(g)))
    ranks = []
    for rank in range(degree):
        shards = [shard(t, cut, i, rank, degree).to(device) for i, t in enumerate(given)]
        leaves = [t.requires_grad_(t.is_floating_point()) for t in shards]
        shared = [t.to(device).clone() for t in whole]
        learned = [t.requires_grad_() for t in shared if t.is_floating_point() and cut.name != "rope"]
        first = rank * (given[0].shape[0] // degree) if cut.dim == 0 else 0
        out = cut.run(first, *leaves, *shared)
        outs = list(out) if isinstance(out, tuple) else [out]
        grads = []
        for o in outs:  # as of one device: cosines by the place in the whole
            size = [n * degree if d == cut.dim else n for d, n in enumerate(o.shape)]
            full = torch.cos(torch.arange(o.numel() * degree, dtype=torch.float32)).view(size)
            grads.append(full.chunk(degree, cut.dim)[rank].to(device, o.dtype))
        learning = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(outs, [*learning, *learned], grads)
        ranks.append(([o.detach() for o in outs], found[: len(learning)], found[len(learning) :]))
    learning_numbers = [i for i, t in enumerate(given) if t.is_floating_point()]
    return {
        "outputs": [joined([r[0][i] for r in ranks], cut, None) for i in range(len(ranks[0][0]))],
        "gradients": [joined([r[1][i] for r in ranks], cut, cut.packed.get(n)) for i, n in enumerate(learning_numbers)],
        "of whole tensors": [in_order([r[2][i] for r in ranks]) for i in range(len(ranks[0][2]))],
    }


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The ranks' gradients of a tensor that all have, added one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def stepped(degree: int, device: str = "cpu") -> list[Tensor]:
    """Parameters and averages after two steps of AdamW on shards of 4 x 37 elements."""
    g = torch.Generator().manual_seed(4)
    full = [normal(g, 4 * 37) for _ in range(4)]
    ranks = []
    for rank in range(degree):
        p, grad, m, v = (t.chunk(degree)[rank].clone().to(device) for t in full)
        group = AdamWGroup([p], [grad], [m], [v.square()], [torch.zeros((), device=device)], lr=1e-2)
        for _ in range(2):
            om.adamw([group])
        ranks.append([p, group.exp_avgs[0], group.exp_avg_sqs[0]])
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]
