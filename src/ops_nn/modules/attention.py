"""Self-attention with grouped queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.seeds import stream_of


class Attention(nn.Module):
    """o(attention(rope(q(x)), rope(k(x)), v(x))), causal by default.

    Args:
        hidden_size: width C of input and output.
        num_heads: query heads H.
        num_kv_heads: key and value heads K, by default H; H is a multiple of it.
        head_dim: width D of a head, by default C / H.
        bias: whether the products have biases.
        causal: whether a query sees only itself and what stands before it.
        scale: of the scores, by default 1 / sqrt(D).
        window: (left, right) keys seen around the query, -1 for no bound.
        softcap: c in c tanh(score / c).
        dropout_p: chance of dropping a probability while training.
        device, dtype: of the parameters.

    Parameters: q_proj.weight [H D, C], k_proj.weight and v_proj.weight [K D, C], o_proj.weight [C, H D], and biases, as in public Llama
    checkpoints.
    """

    draws_from_pool = True  # of an `ops_nn.SeedPool` that is attached

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"Attention: hidden_size must be a multiple of num_heads where head_dim is not given; got {hidden_size} and {num_heads}. "
                "Pass head_dim."
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"Attention: num_heads must be a multiple of num_kv_heads; got {num_heads} and {num_kv_heads}. "
                "Choose a number of key heads that divides the query heads."
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.causal, self.scale, self.window, self.softcap, self.dropout_p = causal, scale, window, softcap, dropout_p
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias, device, dtype)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias, device, dtype)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias, device, dtype)
        self.o_proj = nn.Linear(width, hidden_size, bias, device, dtype)

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        rng: om.Rng | None = None,
    ) -> Tensor:
        """Attend within each sequence or document.

        Args:
            x: [B, S, C], or packed documents [T, C].
            position_embeddings: (cos, sin), each [S, D] or [B, S, D], as from `RotaryEmbedding`; None for no rotation.
            position_ids: [S] or [B, S] integers, the table row of each token.
            mask: additive, or boolean with True where a key is seen; broadcastable to [B, H, S, S].
            key_padding_mask: bool [B, S], True at real tokens.
            cu_seqlens: int32 or int64 [documents + 1], the first token of each document and the number of tokens.
            max_seqlen: length of the longest document [tokens].
            rng: where the dropout mask comes from; by default a `SeedPool` that is attached, else PyTorch's generator.

        Returns:
            Of the shape of `x`.
        """
        dropout_p = self.dropout_p if self.training else 0.0
        q, k, v = (
            projected.unflatten(-1, (heads, self.head_dim))
            for projected, heads in (
                (self.q_proj(x), self.num_heads),
                (self.k_proj(x), self.num_kv_heads),
                (self.v_proj(x), self.num_kv_heads),
            )
        )
        if position_embeddings is not None:
            q, k = om.rope(q, k, *position_embeddings, position_ids=position_ids)
        out = om.attention(
            q,
            k,
            v,
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            mask=mask,
            key_padding_mask=key_padding_mask,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            dropout_p=dropout_p,
            rng=rng if rng is not None or not dropout_p else stream_of(self, x.device),
        )
        return self.o_proj(out.flatten(-2))
