"""Llama in plain PyTorch: RMSNorm, rotary embedding, grouped queries, SwiGLU.

Parameter names are those of public Llama checkpoints, so `load_state_dict` takes their tensors as they are.

Shape suffixes: B batch, S sequence, C hidden width, H query heads, K key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops_nn.models.documents import document_mask
from ops_nn.models.output import ModelOutput, token_loss


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling by wavelength (Llama 3.1): long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama model. Widths are in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool = True
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig: num_heads must be a multiple of num_kv_heads; got {self.num_heads} and "
                f"{self.num_kv_heads}; choose a number of key/value heads that divides the query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even (rotary turns pairs); got {self.head_dim}; choose an even width")


class LlamaRMSNorm(nn.Module):
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `x` and weight it."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        """Width and eps, for `print(model)`."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class LlamaRotaryEmbedding(nn.Module):
    """Cosine and sine tables of the rotary embedding (Su et al., 2021), the half convention, each `[S, D]`."""

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", _inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LlamaRotaryEmbedding:
        # `model.to(torch.bfloat16)` must not round the frequencies: at position 2048 the angle would be off by radians.
        super()._apply(fn, recurse)
        self.inv_freq = _inverse_frequencies(self.config).to(self.inv_freq.device)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tables for the positions of `x` `[B, S, C]`, in its dtype.

        Args:
            x: gives length, device and dtype only.
            position_ids: `[B, S]` integers; without them positions count from 0 and the tables are `[S, D]`.
        """
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)
        # Angles reach thousands of radians: they are always computed in fp32, whatever autocast says.
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = position_ids[..., None].float() * self.inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _inverse_frequencies(config: LlamaConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    turns = scaling.original_max_position * inv_freq / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return inv_freq * (keep + (1.0 - keep) / scaling.factor)


def rotate_half(x: Tensor) -> Tensor:
    """`(a, b) -> (-b, a)` for the two halves of the last dimension."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary(x_BHSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of `x` by its position's angle; tables are `[S, D]` or `[B, S, D]`."""
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return x_BHSD * cos + rotate_half(x_BHSD) * sin


class LlamaAttention(nn.Module):
    """Causal self attention with grouped queries and rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Attend within each sequence or document.

        Args:
            x: `[B, S, C]`.
            position_embeddings: cosine and sine tables, each `[S, D]` or `[B, S, D]`.
            cu_seqlens: `[documents + 1]` integers, where documents begin among the `B * S` tokens; None for one a row.
            max_seqlen: length of the longest document [tokens]; not read here.
        """
        batch, length, _ = x.shape
        q_BHSD = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k_BKSD = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v_BKSD = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q_BHSD = apply_rotary(q_BHSD, *position_embeddings)
        k_BKSD = apply_rotary(k_BKSD, *position_embeddings)
        mask = None if cu_seqlens is None else document_mask(cu_seqlens, batch, length, causal=True)
        grouped = self.num_heads != self.num_kv_heads
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return self.o_proj(out_BHSD.transpose(1, 2).reshape(batch, length, -1))


class LlamaMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gated transformation of `[B, S, C]`."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    """One block: attention and MLP, each behind a norm and with a residual sum."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Transform `[B, S, C]` with rotary tables `[S, D]` or `[B, S, D]`; documents as the attention takes them."""
        h = self.input_layernorm(x)
        documents = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        x = x + self.self_attn(h, position_embeddings=position_embeddings, **documents)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class LlamaModel(nn.Module):
    """Embedding, blocks and the last norm: `[B, S]` token ids to `[B, S, C]`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Normalised hidden states `[B, S, C]` of `[B, S]` token ids; the rest as `LlamaForCausalLM` takes it."""
        x = self.embed_tokens(input_ids)
        options: dict[str, Any] = {"position_embeddings": self.rotary_emb(x, position_ids)}
        if cu_seqlens is not None:
            options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        for layer in self.layers:
            x = layer(x, **options)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Llama with a language-model head, tied to the embedding or of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw every matrix from a normal distribution of `initializer_range`; norms become one."""
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ModelOutput:
        """Next-token logits and, with labels, their loss.

        Args:
            input_ids: `[B, S]` int64 token ids.
            labels: `[B, S]` int64, already shifted: `labels[b, s]` is the token that follows
                `input_ids[b, s]`; -100 is not counted.
            position_ids: `[B, S]` integers; without them positions count from 0 in each row.
            cu_seqlens: `[documents + 1]` integers, where documents begin among the `B * S` tokens, and their number: a token sees its own
                document alone. None for one document a row.
            max_seqlen: at least the length of the longest document [tokens].
        """
        logits = self.lm_head(self.model(input_ids, position_ids, cu_seqlens, max_seqlen))
        if labels is None:
            return ModelOutput(None, logits)
        return ModelOutput(token_loss(logits, labels), logits)
