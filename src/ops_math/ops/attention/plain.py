"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ops_math.ops.attention import reference
from ops_math.spec import compute_dtype

STANDS_FOR = ("F.scaled_dot_product_attention",)  # PyTorch's functions that the operator takes the place of


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False, scale: float | None = None,
    window: tuple[int, int] | None = None, softcap: float | None = None, mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0, rng: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """`F.scaled_dot_product_attention` where it has the features, else products and a softmax."""
    if softcap or return_lse or cu_seqlens_q is not None or (dropout_p and rng is not None):
        return _written_out(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, mask=mask, key_padding_mask=key_padding_mask,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dropout_p=dropout_p, rng=rng, return_lse=return_lse,
        )  # fmt: skip
    queries, keys = q.shape[1], k.shape[1]
    square = bool(causal) and window is None and mask is None and key_padding_mask is None and (queries == keys or causal == "top_left")
    if not square and (causal or window is not None):
        mask = _joined(mask, reference.visible(queries, keys, causal, window or (-1, -1), q.device))
    if key_padding_mask is not None:
        mask = _joined(mask, key_padding_mask[:, None, None, :])
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=square,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _joined(mask: torch.Tensor | None, allowed: torch.Tensor) -> torch.Tensor:
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, float("-inf"))


def _written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    wide = compute_dtype(q.dtype)
    result = reference.attention(q.to(wide), k.to(wide), v.to(wide), **options)
    return (result[0].to(q.dtype), result[1]) if options["return_lse"] else result.to(q.dtype)


def attention_qkv(qkv: torch.Tensor, *, num_heads: int, num_kv_heads: int | None = None, **options: Any) -> Any:
    """`attention` on the three parts of one projection."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    q, k, v = qkv.unflatten(-1, (num_heads + 2 * kv_heads, -1)).split((num_heads, kv_heads, kv_heads), -2)
    return attention(q, k, v, **options)
