"""The definition. M rows, N columns; gate_MN, up_MN, and packed_M2N, which holds both."""

from __future__ import annotations

import math

import torch


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _unpack(packed_M2N: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return packed_M2N[..., 0::2], packed_M2N[..., 1::2]
    half = packed_M2N.shape[-1] // 2
    return packed_M2N[..., :half], packed_M2N[..., half:]


def swiglu(gate_MN: torch.Tensor, up_MN: torch.Tensor) -> torch.Tensor:
    """y = silu(gate) up, silu(x) = x / (1 + exp(-x))."""
    return _silu(gate_MN) * up_MN


def swiglu_packed(gate_up_M2N: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """swiglu of the two halves, or of columns 0, 2, ... and 1, 3, ..."""
    return swiglu(*_unpack(gate_up_M2N, interleaved))


def geglu(gate_MN: torch.Tensor, up_MN: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
    """y = gelu(gate) up, gelu(x) = x Phi(x)."""
    return _gelu(gate_MN, approximate) * up_MN


def geglu_packed(gate_up_M2N: torch.Tensor, *, approximate: str = "tanh", interleaved: bool = False) -> torch.Tensor:
    """geglu of the two halves, or of columns 0, 2, ... and 1, 3, ..."""
    return geglu(*_unpack(gate_up_M2N, interleaved), approximate=approximate)
