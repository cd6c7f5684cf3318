"""The definition. B batch, S tokens, H heads (K of the keys), D head width, R rotary width; q_BSHD, k_BSKD, cos and sin tables."""

from __future__ import annotations

import torch


def _table(table: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor | None, rotary_dim: int | None) -> torch.Tensor:
    """The rows for the tokens of `x`, without a duplicated half: [B or 1, S, 1, R/2] or [S, 1, R/2]."""
    if rotary_dim is None:
        half = table.shape[-1] if table.dim() == 2 and table.shape[-1] * 2 <= x.shape[-1] else table.shape[-1] // 2
    else:
        half = rotary_dim // 2
    table = table[..., :half]
    if position_ids is not None:
        table = table[position_ids]
    elif table.dim() == 2:
        table = table[: x.shape[-3]]
    return table.unsqueeze(-2)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn pairs of the first R columns: (a, b) -> (a cos - b sin, b cos + a sin)."""
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    first, second = a * cos - b * sin, b * cos + a * sin
    joined = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
    return torch.cat((joined, rest), -1)


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
    """Every head of q and k turned by its token's angles."""
    cos, sin = (_table(t, q, position_ids, rotary_dim) for t in (cos, sin))
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


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
    """The heads of q and k in a packed tensor turned, those of v copied."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    qk, v = heads[..., : num_heads + num_kv_heads, :], heads[..., num_heads + num_kv_heads :, :]
    cos, sin = (_table(t, heads, position_ids, rotary_dim) for t in (cos, sin))
    return torch.cat((_turn(qk, cos, sin, interleaved), v), -2).flatten(-2)
