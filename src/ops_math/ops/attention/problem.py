"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math import settings
from ops_math.spec import ITEM_SIZE, Call, Case, Cost, dtype_name


class AttentionProblem(NamedTuple):
    """One call. Packed documents: `batch` is 1, lengths are token counts, `documents` is above -1.

    Query i stands at key position i, plus k_len - q_len where `bottom_right`, and sees from `left` keys before to `right` keys after
    it (-1: no bound). `softcap` is 0 and `mask` is empty where there is none; `mask` is `bool` or a dtype name. `products` is how
    fp32 products multiply. `packed_qkv` asks the backward for one gradient of the projection that q, k, v are views of. `max_q`,
    `max_k` bound the documents' lengths, 0 where unknown.
    """

    batch: int
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    products: str
    scale: float
    bottom_right: bool
    left: int
    right: int
    softcap: float
    mask: str
    key_padding: bool
    documents: int
    max_q: int
    max_k: int
    dropout_p: float
    packed_qkv: bool = False
    need_dq: bool = True
    need_dk: bool = True
    need_dv: bool = True

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads // max(self.kv_heads, 1)

    @property
    def empty(self) -> bool:
        """No query, or no key that one could see."""
        return 0 in (self.batch, self.q_len, self.k_len, self.heads, self.head_dim)


class Rule(NamedTuple):
    """The scalar arguments of both dispatcher operators, in the order of their schemas."""

    scale: float
    bottom_right: bool
    left: int
    right: int
    softcap: float
    max_q: int
    max_k: int
    dropout_p: float


def problem_of(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, keep: torch.Tensor | None, cu_q: torch.Tensor | None, rule: Rule
) -> AttentionProblem:
    """The problem of a call; bounds that no query reaches are none, and aligned corners of a square are one."""
    batch, (q_len, heads, width), (k_len, kv_heads) = q.shape[0] if q.dim() == 4 else 1, q.shape[-3:], k.shape[-3:-1]
    reach = max(q_len, k_len)
    left, right = (-1 if bound >= reach else bound for bound in (rule.left, rule.right))
    dtype = dtype_name(q.dtype)
    return AttentionProblem(
        batch, q_len, k_len, heads, kv_heads, width, dtype, settings.fp32_products() if dtype == "fp32" else "", rule.scale,
        rule.bottom_right and not (cu_q is None and q_len == k_len), left, right, rule.softcap,
        dtype_name(mask.dtype) if mask is not None else "",
        keep is not None, cu_q.shape[0] - 1 if cu_q is not None else -1, rule.max_q, rule.max_k, rule.dropout_p,
    )  # fmt: skip


def storage(p: AttentionProblem) -> str:
    """The dtype the problem is stored in."""
    return p.dtype


def _clamped_sum(first: int, count: int, limit: int) -> int:
    """The sum of clamp(x, 0, limit) over the integers first .. first + count - 1."""

    def below(n: int) -> int:  # over 0 .. n - 1
        n = max(n, 0)
        inside = min(n, limit)
        return inside * (inside - 1) // 2 + (n - inside) * limit

    return below(first + count) - below(first)


def pairs(p: AttentionProblem) -> int:
    """Visible (query, key) pairs of one head over the batch, padding and masks not counted; documents are taken as equally long."""
    count = max(p.documents, 1) if p.documents >= 0 else p.batch
    queries, keys = (p.q_len // count, p.k_len // count) if p.documents >= 0 else (p.q_len, p.k_len)
    shift = keys - queries if p.bottom_right else 0
    past = queries * keys if p.right < 0 else _clamped_sum(shift + p.right + 1, queries, keys)
    before = 0 if p.left < 0 else _clamped_sum(shift - p.left, queries, keys)
    return count * (past - before)


def cost(p: AttentionProblem, phase: str) -> Cost:
    """Two products forward, five backward; each tensor moved once."""
    item = ITEM_SIZE[p.dtype]
    query = p.batch * p.q_len * p.heads * p.head_dim * item
    key = p.batch * p.k_len * p.kv_heads * p.head_dim * item
    lse = p.batch * p.q_len * p.heads * 4
    mask = p.batch * p.heads * p.q_len * p.k_len * ITEM_SIZE.get(p.mask, 1) if p.mask else 0
    product = 2 * p.heads * pairs(p) * p.head_dim
    if phase == "fwd":
        return Cost(
            (("q", query), ("k", key), ("v", key), ("mask", mask)),
            (("out", query), ("lse", lse)),
            (("product qk", product), ("product pv", product)),
        )
    read = (("dout", query), ("q", query), ("k", key), ("v", key), ("out", query), ("lse", lse), ("mask", mask))
    written = (("dq", query * p.need_dq), ("dk", key * p.need_dk), ("dv", key * p.need_dv))
    return Cost(
        read,
        written,
        (("product qk", product), ("product dp", product), ("product dv", product), ("product dk", product), ("product dq", product)),
    )


def gradients(
    p: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What a backward returns, and dq, dk, dv to write into (empty where not needed): three tensors, or views of one for one projection."""
    if not p.packed_qkv:
        each = tuple(x.new_empty(x.shape if need else 0) for x, need in ((q, p.need_dq), (k, p.need_dk), (v, p.need_dv)))
        return each, each
    heads = p.heads + 2 * p.kv_heads
    packed = q.new_empty((*q.shape[:-2], heads * p.head_dim))
    return (packed, q.new_empty(0), q.new_empty(0)), packed.unflatten(-1, (heads, p.head_dim)).split((p.heads, p.kv_heads, p.kv_heads), -2)


def _case(name: str, q: tuple[int, ...], k: tuple[int, ...], options: Any = None, scale: float = 1.0, **fields: Any) -> Case:
    """A case of `attention`; `options` makes keyword arguments from a draw."""
    make = lambda d: Call((d.normal(*q, scale=scale), d.normal(*k, scale=scale), d.normal(*k)), options(d) if options else {})  # noqa: E731
    return Case(name, "attention", make, **fields)


def _qkv(name: str, shape: tuple[int, ...], options: Any, **fields: Any) -> Case:
    return Case(name, "attention_qkv", lambda d: Call((d.normal(*shape),), options(d)), **fields)


def _ends(d: Any, *ends: int) -> torch.Tensor:
    return d.tensor([0, *ends], dtype=torch.int32)


def _padding(d: Any, lengths: tuple[int, ...], total: int) -> torch.Tensor:
    return d.tensor([[1 if j < n else 0 for j in range(total)] for n in lengths], dtype=torch.bool)


_CAUSAL = {"causal": True}
_NARROW = ("bf16", "fp16")
_ENDS = (33, 33, 34, 70)  # lengths 33, 0, 1, 36

CASES = (
    _case("full", (1, 40, 2, 32), (1, 40, 2, 32)),
    _case("batch, causal, grouped", (2, 40, 4, 16), (2, 40, 2, 16), lambda d: _CAUSAL),
    _case("causal, several tiles", (1, 150, 1, 64), (1, 150, 1, 64), lambda d: _CAUSAL),
    _case("more keys, bottom right", (1, 33, 1, 16), (1, 70, 1, 16), lambda d: _CAUSAL),
    _case("more keys, top left", (1, 33, 1, 16), (1, 70, 1, 16), lambda d: {"causal": "top_left"}),
    _case("more queries, bottom right: rows without a key", (1, 70, 1, 16), (1, 33, 1, 16), lambda d: _CAUSAL),
    _case("more queries, top left", (1, 70, 2, 16), (1, 33, 1, 16), lambda d: {"causal": "top_left"}),
    _case("cross, full", (2, 17, 2, 24), (2, 45, 2, 24)),
    _case("three heads a key head, width 40", (1, 31, 3, 40), (1, 31, 1, 40), lambda d: _CAUSAL),
    _case("width 80, scale", (1, 31, 1, 80), (1, 31, 1, 80), lambda d: {"scale": 0.2}),
    _case("width 128", (1, 66, 1, 128), (1, 66, 1, 128), lambda d: _CAUSAL),
    # fp32 products on 256 columns spill registers whatever the tile is; width 128 stands for fp32
    _case("width 256", (1, 20, 1, 256), (1, 33, 1, 256), dtypes=_NARROW),
    _case("sliding window", (1, 100, 2, 16), (1, 100, 1, 16), lambda d: {**_CAUSAL, "window": (20, 0)}),
    _case("window of one", (1, 50, 1, 16), (1, 50, 1, 16), lambda d: {"window": (0, 0)}),
    _case("window both ways, cross", (1, 40, 1, 16), (1, 90, 1, 16), lambda d: {"window": (7, 11)}),
    _case("window to the right only", (1, 70, 1, 16), (1, 70, 1, 16), lambda d: {"window": (-1, 5)}),
    _case("soft cap", (1, 50, 2, 32), (1, 50, 1, 32), lambda d: {**_CAUSAL, "softcap": 5.0}, scale=2.0),
    _case("confident", (1, 50, 2, 32), (1, 50, 2, 32), lambda d: _CAUSAL, scale=4.0, kind="confident"),
    _case("key padding", (3, 35, 1, 16), (3, 35, 1, 16), lambda d: {"key_padding_mask": _padding(d, (35, 12, 0), 35)}),
    _case("key padding, causal", (2, 40, 2, 16), (2, 40, 1, 16), lambda d: {**_CAUSAL, "key_padding_mask": _padding(d, (40, 25), 40)}),
    _case("additive mask", (1, 33, 2, 16), (1, 40, 2, 16), lambda d: {"mask": d.normal(1, 2, 33, 40)}, frozen=("mask",)),
    _case("fp32 mask", (1, 33, 2, 16), (1, 40, 2, 16), lambda d: {"mask": d.normal(33, 40, dtype="fp32")}, frozen=("mask",),
    dtypes=_NARROW),
    _case("boolean mask, causal", (2, 40, 1, 16), (2, 40, 1, 16), lambda d: {**_CAUSAL, "mask": d.bools(0.7, 2, 1, 40, 40)}),
    _case("packed documents, one empty, one of one", (70, 2, 16), (70, 1, 16), lambda d: {**_CAUSAL, "cu_seqlens_q": _ends(d, *_ENDS)}),
    _case("packed documents, cross", (60, 1, 16), (75, 1, 16), lambda d: {"cu_seqlens_q": _ends(d, 20, 60, 60),
    "cu_seqlens_k": _ends(d, 35, 35, 75)}),
    _case("packed, window, soft cap", (80, 1, 16), (80, 1, 16), lambda d: {"window": (9, 0), "softcap": 3.0, "cu_seqlens_q": _ends(d,
    30, 80)}),
    _case("dropout", (2, 40, 1, 16), (2, 50, 1, 16), lambda d: {"dropout_p": 0.2, "rng": d.rng(3)}),
    _case("dropout, causal, padded", (2, 40, 2, 16), (2, 40, 1, 16), lambda d: {**_CAUSAL, "dropout_p": 0.1, "rng": d.rng(4),
    "key_padding_mask": _padding(d, (40, 25), 40)}),
    _case("dropout, packed", (70, 1, 16), (70, 1, 16), lambda d: {**_CAUSAL, "dropout_p": 0.3, "rng": d.rng(5),
    "cu_seqlens_q": _ends(d, *_ENDS)}),
    _case("dropout, causal, several tiles, half dropped", (1, 150, 2, 64), (1, 150, 1, 64), lambda d: {**_CAUSAL, "dropout_p": 0.5,
    "rng": d.rng(6)}, small=False),
    _case("dropout, window, soft cap", (1, 70, 1, 16), (1, 133, 1, 16), lambda d: {"window": (20, 9), "softcap": 4.0, "dropout_p": 0.3,
    "rng": d.rng(-7).child(3)}),
    _case("log-sum-exp", (1, 40, 2, 16), (1, 40, 2, 16), lambda d: {**_CAUSAL, "return_lse": True},
    looser=(("max", 30.0), ("l2", 40.0), ("gain", 16.0), ("rows", 16.0)), looser_for=("vendor",),
    reason="PyTorch's forward in 16 bits takes a fast exponential on a CPU: its lse is off by 1.3e-5 (torch 2.13)"),
    _case("no query", (1, 0, 2, 16), (1, 9, 2, 16)),
    _case("no key", (2, 9, 2, 16), (2, 0, 2, 16)),
    # frozen: the gradients of q and k are zero but for rounding, which no budget relative to them can hold
    _case("one query, one key", (1, 1, 1, 8), (1, 1, 1, 8), frozen=(0, 1)),
    _case("width that no kernel takes", (1, 9, 2, 12), (1, 9, 2, 12)),
    _case("only the query learns", (1, 40, 2, 16), (1, 40, 1, 16), lambda d: _CAUSAL, frozen=(1, 2)),
    _case("only key and value learn", (1, 40, 2, 16), (1, 40, 1, 16), lambda d: _CAUSAL, frozen=(0,)),
    _case("4001 keys", (1, 5, 1, 16), (1, 4001, 1, 16), lambda d: _CAUSAL, small=False),
    _case("long, grouped", (2, 300, 4, 64), (2, 300, 2, 64), lambda d: _CAUSAL, small=False),
    _qkv("one projection", (1, 50, 6 * 16), lambda d: {"num_heads": 2, **_CAUSAL}),
    _qkv("one projection, grouped", (1, 40, 8 * 32), lambda d: {"num_heads": 4, "num_kv_heads": 2, **_CAUSAL}),
    _qkv("one projection, packed documents", (70, 4 * 16), lambda d: {"num_heads": 2, "num_kv_heads": 1, **_CAUSAL,
    "cu_seqlens_q": _ends(d, *_ENDS)}),
    _qkv("one projection, dropout", (2, 40, 3 * 16), lambda d: {"num_heads": 1, "dropout_p": 0.2, "rng": d.rng(8)}),
    _qkv("one projection, padded", (2, 40, 3 * 16), lambda d: {"num_heads": 1, "key_padding_mask": _padding(d, (40, 25), 40)}),
)  # fmt: skip
