"""Tables of the rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of position times frequency, for `om.rope` and for attention modules (Su et al., RoFormer, 2021).

    The frequency of pair i is theta^(-2 i / rotary_dim) [radians per position]. Tables are fp32 whatever the model's dtype, since
    a bf16 angle is off by radians at position 2048. Nothing enters the state dict.

    Args:
        head_dim: width of a head, or of its part that is turned.
        theta: base of the frequencies.
        device: where the frequencies are.
    """

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float = 10_000.0, device: torch.device | str | None = None) -> None:
        super().__init__()
        if head_dim % 2 or head_dim < 2:
            raise ValueError(
                f"RotaryEmbedding: head_dim must be even and positive (pairs are turned); got {head_dim}. Choose an even width."
            )
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("inv_freq", self._frequencies().to(device), persistent=False)

    def _frequencies(self) -> Tensor:
        return self.theta ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:  # a conversion of the whole model rounds them: make them anew
            self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [S, head_dim], or [B, S, head_dim] with `position_ids`, fp32, the second half a copy of the first.

        Args:
            x: [B, S, C]; gives length and device only.
            position_ids: [B, S] integers; without them positions count from 0.
        """
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = position_ids[..., None].float() * self.inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        """Options, for `print(model)`."""
        return f"{self.head_dim}, theta={self.theta}"
