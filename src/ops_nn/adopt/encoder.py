"""torch.nn.TransformerEncoderLayer: two lines, norm first or last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.adopt.swap import Swap, own_class


def _layer() -> Any:
    def forward(
        self: Any, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        # In evaluation without gradients PyTorch has one kernel for the whole layer, and may pass nested tensors.
        if not om.is_enabled() or src.is_nested or not (self.training or torch.is_grad_enabled()):
            return type(self).forward(self, src, src_mask, src_key_padding_mask, is_causal)
        masks: dict[str, Any] = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask, "is_causal": is_causal}
        if self.norm_first:
            pair = om.residual_attention(src, self.norm1, self, next_norm=self.norm2, **masks)
            return om.residual_mlp(pair, None, self)
        x = om.residual_attention(src, self.norm1, self, norm_first=False, narrow=True, **masks)
        return om.residual_mlp(x, self.norm2, self, norm_first=False)

    return forward


def swaps(path: str, module: nn.Module) -> Swap | None:
    """What to put into a module of this family, or None."""
    if own_class(module) is nn.TransformerEncoderLayer:
        return Swap(path, module, _layer(), "layer", {"norm1": module.norm1, "norm2": module.norm2, "": module})
    return None
