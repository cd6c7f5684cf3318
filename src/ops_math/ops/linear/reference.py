"""The definition. M rows, K inputs, N outputs; x_MK, weight_NK, bias_N."""

from __future__ import annotations

import torch


def linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, *, parts: tuple[int, int] = (1, 1), wide: bool = False
) -> torch.Tensor:
    """y = x weight^T + bias."""
    y_MN = x_MK @ weight_NK.transpose(0, 1)
    return y_MN if bias_N is None else y_MN + bias_N
