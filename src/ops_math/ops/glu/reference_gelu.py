"""The definition. M rows, N columns; x_MN, bias_N."""

from __future__ import annotations

import math

import torch


def gelu(x_MN: torch.Tensor, bias_N: torch.Tensor | None = None, *, approximate: str = "none") -> torch.Tensor:
    """y = gelu(x + bias), gelu(z) = z Phi(z)."""
    z_MN = x_MN if bias_N is None else x_MN + bias_N
    if approximate == "tanh":
        return 0.5 * z_MN * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z_MN + 0.044715 * z_MN**3)))
    return 0.5 * z_MN * (1.0 + torch.erf(z_MN / math.sqrt(2.0)))
