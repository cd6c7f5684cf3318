"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_math.rng import Rng, honoured, keep_mask

STANDS_FOR = ("F.layer_norm", "torch.add", "F.dropout")  # PyTorch's functions that the operator takes the place of


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 1e-5) -> torch.Tensor:
    """`F.layer_norm`."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    x_bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    narrow_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """Additions, `F.dropout` (with an Rng its mask) and `F.layer_norm`."""
    if x_bias is not None:
        x = x + x_bias.to(x.dtype)
    if dropout_p and rng is not None:
        rows = torch.arange(x.shape[:-1].numel(), device=x.device)
        x = x * keep_mask(rng.state, rows, 0, x.shape[-1], dropout_p).view(x.shape) * (1 / (1 - honoured(dropout_p)))
    elif dropout_p:
        x = F.dropout(x, dropout_p)
    total = x + residual
    y = layer_norm(total, weight, bias, eps=eps)
    y = y if out_dtype is None else y.to(out_dtype)
    return (y, total) if narrow_dtype is None else (y, total, y.to(narrow_dtype, copy=True))
