"""Liger's operators in our plain models, as its own patches put them into Hugging Face's: a rival for whole steps."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ops_math.cli.bench import rivals
from ops_nn.models import IGNORE_INDEX, ModelOutput

# What is put into a Llama and into a BERT (which has a GELU that Liger lacks): by class, a name in Liger's functional module.
NEEDED = ("liger_rms_norm", "liger_layer_norm", "liger_swiglu", "liger_rope", "liger_fused_linear_cross_entropy")


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rivals.liger("liger_rms_norm")(x, self.weight, self.variance_epsilon)


def _layer_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rivals.liger("liger_layer_norm")(x, self.weight, self.bias, self.eps)


def _mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(rivals.liger("liger_swiglu")(self.gate_proj(x), self.up_proj(x)))


def _attention(self: Any, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    batch, length, _ = x.shape
    q, k, v = (p(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    cos, sin = (t.unsqueeze(0) if t.dim() == 2 else t for t in position_embeddings)
    q, k = rivals.liger("liger_rope")(q, k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads)
    return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def _loss(hidden: torch.Tensor, head: Any, labels: torch.Tensor) -> torch.Tensor:
    found = rivals.liger("liger_fused_linear_cross_entropy")(
        hidden.flatten(0, 1), head.weight, labels.flatten(), bias=head.bias, ignore_index=IGNORE_INDEX
    )
    return found[0] if isinstance(found, tuple) else found


def _causal_lm(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
    return ModelOutput(_loss(self.model(input_ids), self.lm_head, labels), None)


def _masked_lm(self: Any, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> ModelOutput:
    predictions = self.cls.predictions
    return ModelOutput(_loss(predictions.transform(self.bert(input_ids, attention_mask)), predictions.decoder, labels), None)


FORWARDS: dict[str, Callable[..., Any]] = {
    "LlamaRMSNorm": _rms_norm,
    "LlamaMLP": _mlp,
    "LlamaAttention": _attention,
    "LlamaForCausalLM": _causal_lm,
    "LayerNorm": _layer_norm,
    "BertForMaskedLM": _masked_lm,
}


def installed() -> None:
    """Raise AbsentError where Liger is not installed, cannot be imported, or lacks an operator that is needed."""
    for name in NEEDED:
        rivals.liger(name)


def put_in(model: nn.Module) -> list[str]:
    """Put Liger's operators into one of our plain models, in place; returns the names of the modules that were changed.

    Llama: RMSNorm, rotary embedding, SwiGLU, loss without whole logits. BERT: LayerNorm and the loss.

    Raises: AbsentError as `installed`.
    """
    installed()
    changed = []
    for path, module in model.named_modules():
        forward = FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)
            changed.append(path)
    return changed
