"""Our plain BERT: two lines a layer, and a masked-language loss over the labelled tokens alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import ops_math as om
from ops_nn.adopt import chain, head
from ops_nn.adopt.swap import Swap, class_name
from ops_nn.models.output import ModelOutput


def _layer() -> Any:
    def forward(
        self: Any,
        hidden: Any,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        narrow: bool = False,
    ) -> Any:
        if not om.is_enabled():
            return type(self).forward(self, hidden, attention_mask, cu_seqlens, max_seqlen)
        options: dict[str, Any] = {"attention_mask": attention_mask}
        if cu_seqlens is not None:
            options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        x = om.residual_attention(hidden, None, self.attention, norm_first=False, narrow=True, **options)
        return om.residual_mlp(x, None, self, norm_first=False, narrow=narrow)

    return forward


def _encoder() -> Any:
    def forward(
        self: Any, hidden: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        if not om.is_enabled():
            return type(self).forward(self, hidden, attention_mask, cu_seqlens, max_seqlen)
        options = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        with om.cast_weights(self):
            return chain.run(self.layer, hidden, "narrow", to_the_end=False, **options)

    return forward


def _masked_lm() -> Any:
    def forward(
        self: Any,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> ModelOutput:
        if labels is None or not self.training or not om.is_enabled() or head.why_not_masked(self.cls):
            return type(self).forward(self, input_ids, labels, attention_mask, position_ids, cu_seqlens, max_seqlen)
        rows = head.labelled_rows(labels)
        hidden = self.bert(input_ids, attention_mask, position_ids, cu_seqlens, max_seqlen)
        return ModelOutput(head.masked_loss(hidden, self.cls.predictions, labels, rows), None)

    return forward


def swaps(path: str, module: nn.Module) -> Swap | None:
    """What to put into a module of this family, or None."""
    kind = class_name(module)
    if kind == "ops_nn.models.bert.BertLayer":
        return Swap(path, module, _layer(), "layer", {"attention": module.attention, "": module})
    if kind == "ops_nn.models.bert.BertEncoder":
        return Swap(path, module, _encoder(), "weights cast together, casts fused with norms", {})
    if kind == "ops_nn.models.bert.BertForMaskedLM":
        return Swap(path, module, _masked_lm(), "head and loss over labelled tokens", {"cls": module.cls}, head.why_not_masked(module.cls))  # type: ignore[arg-type]
    return None
