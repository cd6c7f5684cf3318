"""The definition."""

from __future__ import annotations

import torch


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """y = exp(x - max x) / sum exp(x - max x) along `dim`; the shift changes nothing and is a constant."""
    if x.shape[dim] == 0:
        return x.clone()
    exp = torch.exp(x - x.detach().amax(dim, keepdim=True))
    return exp / exp.sum(dim, keepdim=True)
