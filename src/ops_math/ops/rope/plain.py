"""As one writes it in plain PyTorch: what runs when the library is switched off."""

from __future__ import annotations

import torch

STANDS_FOR = ("torch.mul", "torch.cat", "torch.add")  # PyTorch's functions that the operator takes the place of


def _tables(
    table: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int | None, interleaved: bool
) -> torch.Tensor:
    """Rows for the tokens of x, each angle for both columns of its pair, in the dtype of x."""
    if rotary_dim is None:
        rotary_dim = 2 * table.shape[-1] if table.dim() == 2 and 2 * table.shape[-1] <= x.shape[-1] else table.shape[-1]
    table = table[..., : rotary_dim // 2]
    if position_ids is not None:
        table = table[position_ids]
    elif table.dim() == 2:
        table = table[: x.shape[-3]]
    table = table.repeat_interleave(2, dim=-1) if interleaved else torch.cat((table, table), dim=-1)
    return table.unsqueeze(-2).to(x.dtype)


def _rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def _apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return x * cos + _rotate_half(x, interleaved) * sin
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((turned * cos + _rotate_half(turned, interleaved) * sin, rest), dim=-1)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products with the tables and a concatenation for each of q and k."""
    cos, sin = (_tables(t, q, position_ids, rotary_dim, interleaved) for t in (cos, sin))
    return _apply(q, cos, sin, interleaved), _apply(k, cos, sin, interleaved)


def rope_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    interleaved: bool = False,
    position_ids: torch.Tensor | None = None,
    rotary_dim: int | None = None,
) -> torch.Tensor:
    """Split, turn q and k, concatenate again."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    q, k = rope(q, k, cos, sin, interleaved=interleaved, position_ids=position_ids, rotary_dim=rotary_dim)
    return torch.cat((q, k, v), dim=-2).flatten(-2)
