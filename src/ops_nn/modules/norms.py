"""Norms over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ops_math as om


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset).

    Args:
        hidden_size: width of the last dimension.
        eps: added to the mean square.
        weight_offset: added to the weight; 1.0 for Gemma's (1 + w), whose weight starts at zero.
        device, dtype: of the weight.

    Parameters: weight [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - weight_offset, device=device, dtype=dtype))
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] normalised, as `om.rms_norm`."""
        return om.rms_norm(x, self.weight, eps=self.eps, weight_offset=self.weight_offset)

    def extra_repr(self) -> str:
        """Width and options, for `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}" + (f", weight_offset={self.weight_offset}" if self.weight_offset else "")


class LayerNorm(nn.Module):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        hidden_size: width of the last dimension.
        eps: added to the variance.
        bias: whether there is one.
        device, dtype: of the parameters.

    Parameters: weight [hidden_size], bias [hidden_size].
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] normalised, as `om.layer_norm`."""
        return om.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        """Width and eps, for `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
