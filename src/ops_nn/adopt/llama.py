"""Our plain Llama: two lines a layer, sums fused across layers, and a loss whose logits never exist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.adopt import chain, head
from ops_nn.adopt.swap import Swap, class_name
from ops_nn.models.output import ModelOutput


def _layer() -> Any:
    def forward(
        self: Any,
        x: Any,
        position_embeddings: tuple[Tensor, Tensor],
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        defer: bool = False,
    ) -> Any:
        if not om.is_enabled():
            return type(self).forward(self, x, position_embeddings, cu_seqlens, max_seqlen)
        options: dict[str, Any] = {"position_embeddings": position_embeddings, "next_norm": self.post_attention_layernorm}
        if cu_seqlens is not None:
            options["position_embeddings"] = tuple(t.flatten(0, -2) for t in position_embeddings)  # attention sees tokens in one row then
            options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        x = om.residual_attention(x, self.input_layernorm, self.self_attn, **options)
        return om.residual_mlp(x, None, self.mlp, defer=defer)

    return forward


def _model() -> Any:
    def forward(
        self: Any, input_ids: Tensor, position_ids: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        if not om.is_enabled():
            return type(self).forward(self, input_ids, position_ids, cu_seqlens, max_seqlen)
        x = self.embed_tokens(input_ids)
        if cu_seqlens is not None and position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])  # a row of the tables for each token
        options: dict[str, Any] = {"position_embeddings": self.rotary_emb(x, position_ids)}
        if cu_seqlens is not None:
            options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        with om.cast_weights(self):
            x = chain.run(self.layers, x, "defer", to_the_end=True, **options)
        return om.residual_norm(x, self.norm) if isinstance(x, tuple) else self.norm(x)

    return forward


def _causal_lm() -> Any:
    def forward(
        self: Any,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ModelOutput:
        if labels is None or not om.is_enabled() or not om.part_of(self.lm_head).fused:
            return type(self).forward(self, input_ids, labels, position_ids, cu_seqlens, max_seqlen)
        hidden = self.model(input_ids, position_ids, cu_seqlens, max_seqlen)
        return ModelOutput(*head.loss_and_logits(hidden, self.lm_head, labels, self.training))

    return forward


def swaps(path: str, module: nn.Module) -> Swap | None:
    """What to put into a module of this family, or None."""
    kind = class_name(module)
    if kind == "ops_nn.models.llama.LlamaDecoderLayer":
        parts = {name: getattr(module, name) for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")}
        return Swap(path, module, _layer(), "layer", parts)
    if kind == "ops_nn.models.llama.LlamaModel":
        return Swap(path, module, _model(), "residual sums fused with the next layer's norm", {"norm": module.norm})
    if kind == "ops_nn.models.llama.LlamaForCausalLM":
        return Swap(path, module, _causal_lm(), "head and loss", {"lm_head": module.lm_head})
    return None
