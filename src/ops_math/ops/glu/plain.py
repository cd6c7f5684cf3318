"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

STANDS_FOR = ("F.silu", "F.gelu", "torch.mul")  # PyTorch's functions that the operator takes the place of


def _unpack(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return gate_up[..., 0::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`F.silu` and a product."""
    return F.silu(gate) * up


def swiglu_packed(gate_up: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """`F.silu` of one half times the other."""
    return swiglu(*_unpack(gate_up, interleaved))


def geglu(gate: torch.Tensor, up: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """`F.gelu` and a product."""
    return F.gelu(gate, approximate=approximate) * up


def geglu_packed(gate_up: torch.Tensor, *, approximate: str = "tanh", interleaved: bool = False) -> torch.Tensor:
    """`F.gelu` of one half times the other."""
    return geglu(*_unpack(gate_up, interleaved), approximate=approximate)
