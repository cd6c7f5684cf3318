"""The contract: signature, checks, autograd, registration."""

from __future__ import annotations

import math
from typing import Any

import torch

from ops_math import checks, settings
from ops_math.dispatch import absent, apply, define, needs_grad, once_differentiable, store_dtype
from ops_math.ops.attention import op_drawn, plain
from ops_math.ops.attention.problem import AttentionProblem, Rule, problem_of
from ops_math.rng import Rng, state_for
from ops_math.spec import compute_dtype

Optional = torch.Tensor | None


def _problem_fwd(*args: Any) -> AttentionProblem:
    q, k, _, mask, keep, cu_q, _, _, *rule = args
    return problem_of(q, k, mask, keep, cu_q, Rule(*rule))


def _problem_bwd(*args: Any) -> AttentionProblem:
    _, *before, packed_qkv, need_dq, need_dk, need_dv = args
    q, k, _, _, _, *rest = before
    problem = _problem_fwd(q, k, None, *rest)
    return problem._replace(packed_qkv=packed_qkv, need_dq=need_dq, need_dk=need_dk, need_dv=need_dv)


def _fake_fwd(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=compute_dtype(q.dtype))


def _fake_bwd(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    packed_qkv, need_dq, need_dk, need_dv = rest[-4:]
    if packed_qkv:
        heads = q.shape[-2] + 2 * k.shape[-2]
        return q.new_empty((*q.shape[:-2], heads * q.shape[-1])), absent(q), absent(q)
    return tuple(x.new_empty(x.shape) if need else absent(x) for x, need in ((q, need_dq), (k, need_dk), (v, need_dv)))


_MASKS = "Tensor? mask, Tensor? keep, Tensor? cu_q, Tensor? cu_k, Tensor? state, "
_NEEDS = "bool packed_qkv, bool need_dq, bool need_dk, bool need_dv"
_RULE = "float scale, bool bottom_right, int left, int right, float softcap, SymInt max_q, SymInt max_k, float dropout_p"
OP = define(
    "attention",
    __package__,
    fwd=f"(Tensor q, Tensor k, Tensor v, {_MASKS}{_RULE}) -> (Tensor, Tensor)",
    bwd=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASKS}{_RULE}, {_NEEDS}) -> (Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("triton_gpu", "vendor", "eager"),
)


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out, lse and what hides scores; lse has no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Optional,
        keep: Optional,
        cu_q: Optional,
        cu_k: Optional,
        state: Optional,
        *rule: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = OP.fwd(q, k, v, mask, keep, cu_q, cu_k, state, *rule)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, out, lse, mask, keep, cu_q, cu_k, state)
        ctx.rule = rule
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, dlse: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[:3]
        grads = OP.bwd(dout, *ctx.saved_tensors, *ctx.rule, False, *needed)
        return (*(g if need else None for g, need in zip(grads, needed, strict=True)), *(None,) * (len(ctx.needs_input_grad) - 3))


class _AttentionQKV(torch.autograd.Function):
    """q, k, v as views of one projection, whose gradient is one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        num_heads: int,
        kv_heads: int,
        mask: Optional,
        keep: Optional,
        cu_q: Optional,
        cu_k: Optional,
        state: Optional,
        *rule: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = OP.fwd(*_views(qkv, num_heads, kv_heads), mask, keep, cu_q, cu_k, state, *rule)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(qkv, out, lse, mask, keep, cu_q, cu_k, state)
        ctx.rule, ctx.heads = rule, (num_heads, kv_heads)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, dlse: Any) -> tuple[Any, ...]:
        qkv, *saved = ctx.saved_tensors
        dqkv = OP.bwd(dout, *_views(qkv, *ctx.heads), *saved, *ctx.rule, True, True, True, True)[0]
        return (dqkv, *(None,) * (len(ctx.needs_input_grad) - 1))


def _views(qkv: torch.Tensor, num_heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v [..., heads, D] of a projection [..., (H + 2 K) D]."""
    heads = qkv.unflatten(-1, (num_heads + 2 * kv_heads, qkv.shape[-1] // (num_heads + 2 * kv_heads)))
    return heads.split((num_heads, kv_heads, kv_heads), -2)


def _check_inputs(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    dims, layout = (3, "[T, H, D]") if packed else (4, "[B, S, H, D]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.floating(op, name, x)
        checks.rank(op, name, x, dims, layout + (" (packed documents)" if packed else ""))
    checks.same_device(op, "q", q, k=k, v=v)
    if store_dtype(q) != store_dtype(k) or store_dtype(q) != store_dtype(v):
        other, x = ("k", k) if store_dtype(q) != store_dtype(k) else ("v", v)
        checks.same_dtype(op, "q", q, other, x)
    checks.same_shape(op, "k", k, "v", v)
    batch = () if packed else (q.shape[0],)
    checks.shape(op, "k", k, (*batch, *k.shape[-3:-1], q.shape[-1]), "batch and head width of q")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if (kv_heads == 0 and heads) or (kv_heads and heads % kv_heads):
        checks.fail(
            op,
            "q",
            f"of a number of heads that is a multiple of the {kv_heads} key heads",
            f"{heads} heads",
            "Each key head serves the same number of query heads.",
        )


def _check_documents(
    op: str, tokens: dict[str, int], ends: dict[str, Optional], device: torch.device, mask: Optional, keep: Optional
) -> None:
    for name, value in (("mask", mask), ("key_padding_mask", keep)):
        if value is not None:
            checks.fail(
                op,
                name,
                "None with cu_seqlens",
                "a tensor",
                "Packed documents have no padding; leave it out, or pass [B, S, H, D] tensors.",
            )
    sizes = []
    for name, value in ends.items():
        checks.integer(op, name, value)
        checks.rank(op, name, value, 1, "[documents + 1]")
        if value is not None and value.device != device:
            checks.fail(op, name, f"on {device}, as q is", f"a tensor on {value.device}", f"Move it: {name}.to('{device}').")
        if value is not None and value.shape[0] == 0:
            checks.fail(op, name, "at least [0]", "an empty tensor", "It starts with 0 and has one end for each document.")
        if value is not None and value.shape[0] == 1 and tokens[name]:
            got, do = f"[1], which are no documents, for {tokens[name]} tokens", f"One document of all tokens is [0, {tokens[name]}]."
            checks.fail(op, name, "of shape [documents + 1]", got, do)
        sizes.append(0 if value is None else value.shape[0])
    if sizes[0] != sizes[1]:
        checks.fail(op, "cu_seqlens_k", f"of length {sizes[0]}, as cu_seqlens_q is", f"length {sizes[1]}", "Both list the same documents.")
    if settings.STATE.checked:
        for name, value in ends.items():
            checks.document_ends(op, name, value, tokens[name])


def _check_masks(op: str, q: torch.Tensor, k_len: int, mask: Optional, keep: Optional) -> Optional:
    """The mask as a view [B, H, Sq, Sk]."""
    batch, q_len, heads = q.shape[:3]
    if keep is not None:
        checks.boolean(op, "key_padding_mask", keep, "True where a key may be seen")
        checks.shape(op, "key_padding_mask", keep, (batch, k_len), "batch and number of keys; True where a key may be seen")
        checks.same_device(op, "q", q, key_padding_mask=keep)
    if mask is None:
        return None
    checks.attention_mask(op, mask)
    if mask.dtype != torch.bool:
        if mask.requires_grad and torch.is_grad_enabled():
            checks.refuse(
                f"{op}: mask",
                "an additive mask gets no gradient here, and this one requires one",
                "Pass mask.detach(), or switch the operator off with ops_math.enabled(False).",
            )
    checks.same_device(op, "q", q, mask=mask)
    return checks.broadcast_to(op, "mask", mask, (batch, heads, q_len, k_len), "[B, H, Sq, Sk]")


def _rule(
    op: str,
    width: int,
    causal: Any,
    scale: float | None,
    window: Any,
    softcap: float | None,
    max_q: int | None,
    max_k: int | None,
    dropout_p: float,
) -> Rule:
    checks.one_of(op, "causal", causal, (False, True, "top_left"))
    checks.probability(op, "dropout_p", dropout_p)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None:
            checks.positive(op, name, value)
    left, right = (-1, -1) if window is None else checks.window(op, window)
    if causal:
        right = 0
    return Rule(
        1.0 / math.sqrt(max(width, 1)) if scale is None else float(scale),
        causal != "top_left",
        left,
        right,
        float(softcap or 0.0),
        max_q or 0,
        max_k or 0,
        float(dropout_p),
    )


def _cast(x: torch.Tensor) -> torch.Tensor:
    """To autocast's dtype where it is on."""
    dtype = store_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False, scale: float | None = None,
    window: tuple[int, int] | None = None, softcap: float | None = None, mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0, rng: Rng | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Scaled dot-product attention.

    out = dropout(softmax(softcap(scale q k^T) + mask)) v, with softcap(s) = c tanh(s / c)

    Query i stands at key position i + Sk - Sq, so that the last query sees the last key (`causal="top_left"`: at position i).

    Args:
        q: [B, Sq, H, D], or [T, H, D] for packed documents; any strides (a view of a packed projection is read where it lies).
        k, v: [B, Sk, K, D], or [Tk, K, D]; H is a multiple of K, and key head h // (H / K) serves query head h.
        causal: True hides keys after the query's position; "top_left" does so with positions counted from the first key.
        scale: of q k^T, above 0; by default 1 / sqrt(D).
        window: (left, right) keys seen before and after the query's position besides that one; -1 for no bound.
        softcap: c above.
        mask: boolean (True: may be seen) or additive, broadcastable to [B, H, Sq, Sk]. An additive mask gets no gradient; at or below
            -1e30 it hides as -inf does.
        key_padding_mask: bool [B, Sk], True where a key may be seen. What stands in hidden keys and values does not matter.
        cu_seqlens_q: int32 or int64 [documents + 1], the first token of each document and the number of tokens at the end. Rows behind a
            smaller end are not written and hold anything; `om.checked()` looks.
        cu_seqlens_k: the same for keys; by default as cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: longest document [tokens], where known; our own kernels do without.
        dropout_p: chance of dropping a probability, met to within 2^-17 by a keyed mask; the others grow so that the mean stays.
        rng: what the dropout mask is a function of, with row b Sq + i (packed: the token), head, and key (packed: within the
            document). None draws from PyTorch's generator: a key, or, where cuDNN runs the call, the mask itself.
        return_lse: also return the logarithm of the sum of exponentials of each row's scores, which is not differentiable.

    Returns:
        out, shaped as q, contiguous; with `return_lse` also lse [B, H, Sq] or [H, T], fp32 (fp64 for fp64), natural logarithm.
        A row that sees no key gives 0 and -inf, and no gradient.

    Precision: products of operands in the storage dtype (probabilities and their gradients are rounded to it) with fp32 sums; softmax
        in fp32. fp32 products multiply as `ops_math.precision` says; fp64 is eager's. Autocast casts q, k, v. On a CPU lse of 16-bit
        scores may be off by 2e-5, since PyTorch's kernel takes a fast exponential there.
    Determinism: our kernels level 3 (with dropout 2, of packed documents 1); of PyTorch's 1, and their GPU backward 0.
    Raises: ArgumentError for shapes, dtypes, devices or options that do not fit; UnsupportedError for a mask that requires a gradient.
    Source: Dao, FlashAttention-2, 2023; sliding window as in Beltagy et al., Longformer, 2020; backward derived in DESIGN.md.
    """
    _check_inputs("attention", q, k, v, cu_seqlens_q is not None)
    if not settings.active():
        return plain.attention(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, mask=mask, key_padding_mask=key_padding_mask,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dropout_p=dropout_p, rng=rng, return_lse=return_lse,
        )  # fmt: skip
    rule = _rule("attention", q.shape[-1], causal, scale, window, softcap, max_seqlen_q, max_seqlen_k, dropout_p)
    grad = needs_grad(q, k, v)
    dtype = store_dtype(q)
    q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (q, k, v))
    if _draws(q, k, mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k, rule, rng, return_lse):
        return op_drawn.attend(q, k, v, rule.right == 0, rule.scale, dropout_p)
    extra = _extra("attention", q, k, mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k, dropout_p, rng)
    out, lse = apply(_Attention, q, k, v, *extra, *rule) if grad else OP.fwd(q, k, v, *extra, *rule)
    return (out, lse) if return_lse else out


def _draws(
    q: torch.Tensor, k: torch.Tensor, mask: Optional, keep: Optional, cu_q: Optional, cu_k: Optional, rule: Rule, rng: Rng | None, lse: bool
) -> bool:
    """Whether PyTorch may draw the dropout mask inside a vendor kernel: no key was given, no lse is wanted, and nothing else is hidden."""
    if not rule.dropout_p or lse or rng is not None or any(t is not None for t in (mask, keep, cu_q, cu_k)):
        return False
    if rule.softcap or rule.left >= 0 or rule.right > 0 or (rule.right == 0 and q.shape[1] != k.shape[1]):
        return False
    return op_drawn.can_draw(q, k, rule.right == 0, rule.scale, rule.dropout_p)


def _extra(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    mask: Optional,
    keep: Optional,
    cu_q: Optional,
    cu_k: Optional,
    dropout_p: float,
    rng: Rng | None,
) -> tuple[Optional, ...]:
    """Checked: mask, keys to keep, ends of documents, random state."""
    state = state_for(op, rng, q.device) if dropout_p else None
    if cu_q is None:
        if cu_k is not None:
            checks.fail(op, "cu_seqlens_k", "given with cu_seqlens_q only", "a tensor alone", "Pass cu_seqlens_q too.")
        return _check_masks(op, q, k.shape[1], mask, keep), keep, None, None, state
    cu_k = cu_q if cu_k is None else cu_k
    _check_documents(
        op, {"cu_seqlens_q": q.shape[0], "cu_seqlens_k": k.shape[0]}, {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}, q.device, mask, keep
    )
    return None, None, cu_q, cu_k, state


def attention_qkv(
    qkv: torch.Tensor, *, num_heads: int, num_kv_heads: int | None = None, causal: bool | str = False, scale: float | None = None,
    window: tuple[int, int] | None = None, softcap: float | None = None, mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0, rng: Rng | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Self-attention on one packed projection, whose gradient comes back packed, written in place by the backward kernels.

    q, k, v = split(qkv); out = attention(q, k, v, ...)

    Args:
        qkv: [B, S, (H + 2 K) D], or [T, (H + 2 K) D] for packed documents: all query heads, then all key heads, then all value heads.
        num_heads: H.
        num_kv_heads: K, by default H.
        causal, scale, window, softcap, mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, rng,
            return_lse: as in `attention`.

    Returns:
        out [B, S, H, D] or [T, H, D], contiguous; with `return_lse` also lse.

    Precision: as `attention`.
    Determinism: as `attention`.
    Raises: as `attention`; ArgumentError for a width that is not a multiple of the number of heads.
    Source: as `attention`.
    """
    op = "attention_qkv"
    checks.floating(op, "qkv", qkv)
    packed = cu_seqlens_q is not None
    checks.rank(op, "qkv", qkv, 2 if packed else 3, "[T, (H + 2 K) D] (packed documents)" if packed else "[B, S, (H + 2 K) D]")
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    checks.positive(op, "num_heads", num_heads)
    checks.positive(op, "num_kv_heads", kv_heads)
    if qkv.shape[-1] % (num_heads + 2 * kv_heads):
        checks.fail(
            op,
            "qkv",
            f"of a width that is a multiple of num_heads + 2 num_kv_heads = {num_heads + 2 * kv_heads}",
            f"width {qkv.shape[-1]}",
            "Check the numbers of heads.",
        )
    q, k, v = _views(qkv, num_heads, kv_heads)
    _check_inputs(op, q, k, v, packed)
    if not settings.active():
        return plain.attention(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, mask=mask, key_padding_mask=key_padding_mask,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dropout_p=dropout_p, rng=rng, return_lse=return_lse,
        )  # fmt: skip
    rule = _rule(op, q.shape[-1], causal, scale, window, softcap, max_seqlen_q, max_seqlen_k, dropout_p)
    dtype = store_dtype(q)
    q, k, v = (x if x.dtype == dtype else x.to(dtype) for x in (q, k, v))
    if _draws(q, k, mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k, rule, rng, return_lse):
        return op_drawn.attend_packed(_cast(qkv), num_heads, kv_heads, rule.right == 0, rule.scale, dropout_p)
    extra = _extra(op, q, k, mask, key_padding_mask, cu_seqlens_q, cu_seqlens_k, dropout_p, rng)
    if needs_grad(qkv):
        out, lse = apply(_AttentionQKV, _cast(qkv), num_heads, kv_heads, *extra, *rule)
    else:
        out, lse = OP.fwd(*_views(_cast(qkv), num_heads, kv_heads), *extra, *rule)
    return (out, lse) if return_lse else out


OP.public = {"attention": attention, "attention_qkv": attention_qkv}
