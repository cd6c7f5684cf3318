"""BERT for masked-language modelling in plain PyTorch: post-norm blocks, exact GELU, dropout (Devlin et al., 2018).

Module and parameter names are those of public BERT checkpoints; the decoder is tied to the word embedding.

Shape suffixes: B batch, S sequence, C hidden width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ops_nn.models.documents import document_mask
from ops_nn.models.output import ModelOutput, token_loss


@dataclass(frozen=True)
class BertConfig:
    """Shape of a BERT model. Widths are in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"BertConfig: hidden_size must be a multiple of num_heads; got {self.hidden_size} and "
                f"{self.num_heads}; choose a number of heads that divides the width"
            )


class BertEmbeddings(nn.Module):
    """Word, position and segment embeddings, summed, normalised and dropped."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Embed `[B, S]` token ids as `[B, S, C]`; every token is of segment 0. `position_ids` `[B, S]` count from 0 when left out."""
        length, limit = input_ids.shape[1], self.position_embeddings.num_embeddings
        if position_ids is None and length > limit:
            raise ValueError(
                f"BertEmbeddings: input_ids needs at most {limit} positions; got {length}; shorten the sequence or "
                "build the model with a larger max_position_embeddings"
            )
        positions = torch.arange(length, device=input_ids.device) if position_ids is None else position_ids
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(torch.zeros_like(input_ids))
        return self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))


class BertSelfAttention(nn.Module):
    """Bidirectional multi-head attention without its output projection."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_heads
        self.attention_head_size = config.hidden_size // config.num_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Attend to every position of the sequence or document that is not padding.

        Args:
            hidden: `[B, S, C]`.
            attention_mask: `[B, S]`, true (or 1) at real tokens.
            cu_seqlens: `[documents + 1]` integers, where documents begin among the `B * S` tokens; None for one a row.
            max_seqlen: length of the longest document [tokens]; not read here.
        """
        batch, length, _ = hidden.shape
        heads = (batch, length, self.num_attention_heads, self.attention_head_size)
        q_BHSD, k_BHSD, v_BHSD = (linear(hidden).view(heads).transpose(1, 2) for linear in (self.query, self.key, self.value))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        if cu_seqlens is not None:
            own = document_mask(cu_seqlens, batch, length, causal=False)
            mask = own if mask is None else own & mask
        dropout_p = self.dropout.p if self.training else 0.0
        out_BHSD = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=dropout_p)
        return out_BHSD.transpose(1, 2).reshape(batch, length, -1)


class BertSelfOutput(nn.Module):
    """Output projection of attention, dropout, residual sum and norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Project `hidden` and add `residual`, both `[B, S, C]`."""
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)


class BertAttention(nn.Module):
    """Attention with its post-norm residual."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertSelfOutput(config)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Attention block over `[B, S, C]`; `attention_mask` `[B, S]` is true at real tokens, documents are as in the attention."""
        return self.output(self.self(hidden, attention_mask, cu_seqlens, max_seqlen), hidden)


class BertIntermediate(nn.Module):
    """First half of the MLP: `gelu(dense(x))`, the exact GELU."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Widen `[B, S, C]` to `[B, S, intermediate_size]`."""
        return F.gelu(self.dense(hidden))


class BertOutput(nn.Module):
    """Second half of the MLP, dropout, residual sum and norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.intermediate_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Narrow `hidden` `[B, S, intermediate_size]` and add `residual` `[B, S, C]`."""
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)


class BertLayer(nn.Module):
    """One post-norm block."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Transform `[B, S, C]`; `attention_mask` `[B, S]` is true at real tokens, documents are as in the attention."""
        hidden = self.attention(hidden, attention_mask, cu_seqlens, max_seqlen)
        return self.output(self.intermediate(hidden), hidden)


class BertEncoder(nn.Module):
    """The stack of blocks."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Apply the blocks in order to `[B, S, C]`."""
        for layer in self.layer:
            hidden = layer(hidden, attention_mask, cu_seqlens, max_seqlen)
        return hidden


class BertModel(nn.Module):
    """Embeddings and encoder: `[B, S]` token ids to `[B, S, C]`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Encode `[B, S]` token ids as `[B, S, C]`; the rest as `BertForMaskedLM` takes it."""
        return self.encoder(self.embeddings(input_ids, position_ids), attention_mask, cu_seqlens, max_seqlen)


class BertPredictionHeadTransform(nn.Module):
    """Dense layer, GELU and norm in front of the decoder."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform `[B, S, C]` in front of the decoder."""
        return self.LayerNorm(F.gelu(self.dense(hidden)))


class BertLMPredictionHead(nn.Module):
    """Logits from the tied decoder; `bias` and `decoder.bias` are one parameter, as in public checkpoints."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.decoder.bias = self.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[B, S, V]` of `[B, S, C]`."""
        return self.decoder(self.transform(hidden))


class BertOnlyMLMHead(nn.Module):
    """Holder that gives the head its public name, `cls.predictions`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[B, S, V]` of `[B, S, C]`."""
        return self.predictions(hidden)


class BertForMaskedLM(nn.Module):
    """BERT with the masked-language head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config)
        self.cls = BertOnlyMLMHead(config)
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw every matrix from a normal distribution of `initializer_range`; biases zero, norms one."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ModelOutput:
        """Logits of every position and, with labels, the loss over the masked ones.

        Args:
            input_ids: `[B, S]` int64 token ids, some replaced by the mask token.
            labels: `[B, S]` int64, the original token where one was masked, -100 elsewhere.
            attention_mask: `[B, S]`, true (or 1) at real tokens; None means no padding.
            position_ids: `[B, S]` integers; without them positions count from 0 in each row.
            cu_seqlens: `[documents + 1]` integers, where documents begin among the `B * S` tokens, and their number: a token sees its own
                document alone. None for one document a row.
            max_seqlen: at least the length of the longest document [tokens].
        """
        logits = self.cls(self.bert(input_ids, attention_mask, position_ids, cu_seqlens, max_seqlen))
        if labels is None:
            return ModelOutput(None, logits)
        return ModelOutput(token_loss(logits, labels), logits)
