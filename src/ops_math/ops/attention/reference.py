"""The definition. B batch, S query and T key positions, H heads, K key heads, G = H / K, D head width; packed: no B."""

from __future__ import annotations

import math
from typing import Any

import torch

from ops_math import rng as random

MASKED_BELOW = -1e30  # an additive mask at or below this masks, as -inf does: lse could not hold such a score anyway


def attention(
    q_BSHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, *, causal: bool | str = False, scale: float | None = None,
    window: tuple[int, int] | None = None, softcap: float | None = None, mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0, rng: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """out = dropout(softmax(softcap(scale q k^T) + mask)) v over the keys that causal, window and masks allow."""
    state = random.state_for("attention", rng, q_BSHD.device) if dropout_p else None
    options = (causal, 1 / math.sqrt(q_BSHD.shape[-1]) if scale is None else scale, window or (-1, -1), softcap, dropout_p, state)
    if cu_seqlens_q is None:
        out_BSHD, lse_BHS = _dense(q_BSHD, k_BTKD, v_BTKD, mask, key_padding_mask, 0, *options)
    else:
        ends_k = (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).tolist()
        ends_q = cu_seqlens_q.tolist()
        parts = [
            _dense(q_BSHD[None, q0:q1], k_BTKD[None, k0:k1], v_BTKD[None, k0:k1], None, None, q0, *options)
            for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
        ]
        out_BSHD = torch.cat([q_BSHD[:0], *(out[0] for out, _ in parts)])
        lse_BHS = torch.cat([q_BSHD[:0, :, 0].T, *(lse[0] for _, lse in parts)], -1)
    return (out_BSHD, lse_BHS.detach()) if return_lse else out_BSHD


def attention_qkv(qkv: torch.Tensor, *, num_heads: int, num_kv_heads: int | None = None, **options: Any) -> Any:
    """`attention` on the three parts of one projection [..., (H + 2 K) D]: all query heads, then all key heads, then all value heads."""
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    heads = qkv.unflatten(-1, (num_heads + 2 * kv_heads, -1))
    return attention(*heads.split((num_heads, kv_heads, kv_heads), -2), **options)


def _dense(
    q_BSHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, mask: torch.Tensor | None, keep_BT: torch.Tensor | None,
    first_row: int,
    causal: bool | str, scale: float, window: tuple[int, int], softcap: float | None, dropout_p: float, state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    B, S, H, _ = q_BSHD.shape
    T = k_BTKD.shape[1]
    if keep_BT is not None:  # what stands in the padding must not matter, not even NaN
        k_BTKD, v_BTKD = (x.masked_fill(~keep_BT[:, :, None, None], 0.0) for x in (k_BTKD, v_BTKD))
    k_BTHD, v_BTHD = (x.repeat_interleave(H // x.shape[2], 2) for x in (k_BTKD, v_BTKD))
    s_BHST = torch.einsum("bshd,bthd->bhst", q_BSHD, k_BTHD) * scale
    if softcap:
        s_BHST = softcap * torch.tanh(s_BHST / softcap)
    allowed = visible(S, T, causal, window, q_BSHD.device)
    if keep_BT is not None:
        allowed = allowed & keep_BT[:, None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        allowed = allowed & (mask > MASKED_BELOW)
        s_BHST = s_BHST + mask
    s_BHST = s_BHST.masked_fill(~allowed, -math.inf)
    top = s_BHST.detach().amax(-1, keepdim=True) if T else s_BHST.new_full((B, H, S, 1), -math.inf)
    top = top.masked_fill(top == -math.inf, 0.0)
    e_BHST = torch.exp(s_BHST - top)
    total = e_BHST.sum(-1, keepdim=True)
    p_BHST = e_BHST / total.masked_fill(total == 0, 1.0)
    if state is not None:
        rows = first_row + torch.arange(B * S, device=q_BSHD.device).view(B, 1, S)
        heads = torch.arange(H, device=q_BSHD.device).view(1, H, 1)
        p_BHST = p_BHST * random.keep_mask(state, rows, heads, T, dropout_p) / (1 - random.honoured(dropout_p))
    return torch.einsum("bhst,bthd->bshd", p_BHST, v_BTHD), (total.log() + top)[..., 0]


def visible(S: int, T: int, causal: bool | str, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """bool [S, T]: query i stands at key position i (`top_left`) or i + T - S, and sees from `left` before to `right` after it."""
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    at_S1 = torch.arange(S, device=device)[:, None] + (0 if causal == "top_left" else T - S)
    keys_T = torch.arange(T, device=device)
    allowed = torch.ones(S, T, dtype=torch.bool, device=device)
    if left >= 0:
        allowed = allowed & (keys_T >= at_S1 - left)
    return allowed & (keys_T <= at_S1 + right) if right >= 0 else allowed
