"""The definition. M rows, H features, V classes; x_MH, weight_VH, bias_V."""

from __future__ import annotations

from typing import Any

import torch

from ops_math.ops.cross_entropy.reference import cross_entropy


def linear_cross_entropy(
    x_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_M: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    recompute: bool = False,
    **options: Any,
) -> torch.Tensor:
    """The cross entropy of x weight^T + bias."""
    logits_MV = x_MH @ weight_VH.T
    return cross_entropy(logits_MV if bias is None else logits_MV + bias, target_M, **options)
