"""The gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ops_math as om


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, GLU Variants Improve Transformer, 2020).

    Args:
        hidden_size: width of input and output.
        intermediate_size: width of gate and up.
        bias: whether the products have biases.
        device, dtype: of the parameters.

    Parameters: gate_proj.weight and up_proj.weight [intermediate_size, hidden_size], down_proj.weight [hidden_size, intermediate_size],
    and biases, as in public Llama checkpoints.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] to [..., hidden_size]."""
        return self.down_proj(om.swiglu(self.gate_proj(x), self.up_proj(x)))
