"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops_math import checks
from ops_math.ops.rope.problem import RopeProblem
from ops_math.spec import DTYPE_OF, Device, compute_dtype

PASSES = 2.0
CALLS = 10
CHUNK = 131072  # values a thread and chunk: 512 KiB in fp32


def _tables(
    p: RopeProblem, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows for the tokens, without a duplicated half: [B or 1, S, 1, R/2], in the dtype of arithmetic."""
    if position_ids is not None and position_ids.device.type == "cpu" and position_ids.numel():
        low, high = (int(v) for v in position_ids.aminmax())
        checks.positions("rope", low, high, cos.shape[0])

    def rows(table: torch.Tensor) -> torch.Tensor:
        table = table[..., : p.rotary_dim // 2]
        if position_ids is not None:
            table = table[position_ids]
        elif table.dim() == 2:
            table = table[: p.seq]
        return (table if table.dim() == 3 else table.unsqueeze(0)).to(dtype).unsqueeze(2)

    return rows(cos), rows(sin)


def _pairs(p: RopeProblem, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = p.rotary_dim // 2
    return (x[..., 0 : p.rotary_dim : 2], x[..., 1 : p.rotary_dim : 2]) if p.interleaved else (x[..., :half], x[..., half : p.rotary_dim])


def _chunks(p: RopeProblem, x: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors cut along tokens; a table for all sequences is cut like the rest along dimension 1 only."""
    tokens = max(1, CHUNK * torch.get_num_threads() // max(x.shape[0] * x.shape[2] * x.shape[3], 1))
    if x.device.type != "cpu" or 2 * tokens >= p.seq:
        return iter(((x, *others),))
    return zip(*(t.split(tokens, 1) for t in (x, *others)), strict=True)


def invariant_configs(p: RopeProblem, device: Device, phase: str) -> tuple[str, ...]:
    """`apart`: each product and each sum rounded, wherever the element is."""
    return ("apart",)


def _turn(p: RopeProblem, config: str | None, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the pairs of x, written to the columns of out; both in the dtype of arithmetic."""
    (a, b), (first, second) = _pairs(p, x), _pairs(p, out)
    torch.mul(a, cos, out=first)
    torch.mul(b, cos, out=second)
    if config == "apart":
        first -= b * sin
        second += a * sin
        return
    first.addcmul_(b, sin, value=-1)
    second.addcmul_(a, sin)


def _apply(p: RopeProblem, config: str | None, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_rotated: int) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    if num_rotated < x.shape[2]:
        out[:, :, num_rotated:].copy_(x[:, :, num_rotated:])
    if p.rotary_dim < p.head_dim:
        out[:, :, :num_rotated, p.rotary_dim :].copy_(x[:, :, :num_rotated, p.rotary_dim :])
    for x_part, out_part, cos_part, sin_part in _chunks(
        p, x[:, :, :num_rotated, : p.rotary_dim], out[:, :, :num_rotated, : p.rotary_dim], cos, sin
    ):
        if out.dtype == cos.dtype:
            _turn(p, config, x_part.to(cos.dtype), cos_part, sin_part, out_part)
        else:
            wide = torch.empty(x_part.shape, dtype=cos.dtype, device=x.device)
            _turn(p, config, x_part.to(cos.dtype), cos_part, sin_part, wide)
            out_part.copy_(wide)
    return out


def launch_fwd(
    p: RopeProblem,
    config: str | None,
    x: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and k turned; an empty tensor where there is no k."""
    cos, sin = _tables(p, cos, sin, position_ids, compute_dtype(x.dtype))
    return _apply(p, config, x, cos, sin, p.num_rotated), x.new_empty(0) if k is None else _apply(p, config, k, cos, sin, p.kv_heads)


def launch_bwd(
    p: RopeProblem,
    config: str | None,
    dx: torch.Tensor,
    dk: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients turned back: the same with the sines negated."""
    cos, sin = _tables(p, cos, sin, position_ids, compute_dtype(dx.dtype))
    sin = -sin
    return _apply(p, config, dx, cos, sin, p.num_rotated), dx.new_empty(0) if dk is None else _apply(p, config, dk, cos, sin, p.kv_heads)


def launch_inplace(
    p: RopeProblem, config: str | None, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
) -> None:
    """The first heads of x turned where they are, or turned back."""
    cos, sin = _tables(p, cos, sin, position_ids, compute_dtype(x.dtype))
    sin = -sin if p.inverse else sin
    for part, cos_part, sin_part in _chunks(p, x[:, :, : p.num_rotated, : p.rotary_dim], cos, sin):
        wide = part.to(cos.dtype, copy=True)
        if part.dtype == cos.dtype:
            _turn(p, config, wide, cos_part, sin_part, part)
        else:
            turned = torch.empty_like(wide)
            _turn(p, config, wide, cos_part, sin_part, turned)
            part.copy_(turned)
