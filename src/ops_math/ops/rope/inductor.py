"""The operator as one pass for each tensor, compiled for the CPU: what `eager` does in four."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ops_math.backends import inductor
from ops_math.layout import dense
from ops_math.ops.rope.problem import RopeProblem
from ops_math.spec import DTYPE_OF, Device, compute_dtype

PASSES = 1.2
CALLS = 4
WHY = "heads to be turned", "compiled code walks tensors that lie side by side"


def supports(p: RopeProblem, device: Device, phase: str) -> str | None:
    """Whole heads of two halves, out of place."""
    if phase == "inplace":
        return "does not write in place"
    if p.num_rotated != p.heads:
        return "does not copy the values of a packed projection"
    if p.interleaved:
        return "compiles interleaved pairs to scalar code"
    if p.positions:
        return "looks nothing up by position"
    return None if p.batch and p.seq and p.heads and p.rotary_dim else "does not take empty tensors"


def _turn(p: RopeProblem, back: bool, cos: torch.Tensor, sin: torch.Tensor, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the halves of each head; back with the sines negated."""
    half, made = p.rotary_dim // 2, []
    for x in heads:
        wide = x.to(compute_dtype(x.dtype))
        cos_S, sin_S = (t[..., :half].to(wide.dtype).unsqueeze(-2) for t in (cos, sin))
        sin_S = -sin_S if back else sin_S
        a, b = wide[..., :half], wide[..., half : p.rotary_dim]
        made.append(torch.cat((a * cos_S - b * sin_S, b * cos_S + a * sin_S, wide[..., p.rotary_dim :]), -1).to(DTYPE_OF[p.out]))
    return tuple(made)


def _launch(
    p: RopeProblem, back: bool, x: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> Sequence[torch.Tensor]:
    tables = [dense(t[: p.seq] if t.dim() == 2 else t, "tables of rope", WHY[1]) for t in (cos, sin)]
    heads = [dense(t, *WHY) for t in (x, k) if t is not None]
    tensors = [*tables, *heads]
    lengths = [tuple(range(t.dim() - 1)) for t in tables] + [(0, 1)] * len(heads)
    general = p._replace(batch=-1, seq=-1, table_batch=-1)
    made = inductor.call(("rope", back, general), functools.partial(_turn, general, back), tensors, lengths)
    return made[0], made[1] if k is not None else x.new_empty(0)


def launch_fwd(
    p: RopeProblem, config: None, x: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_ids: None
) -> Sequence[torch.Tensor]:
    """x and k turned; an empty tensor where there is no k."""
    return _launch(p, False, x, k, cos, sin)


def launch_bwd(
    p: RopeProblem, config: None, dx: torch.Tensor, dk: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, position_ids: None
) -> Sequence[torch.Tensor]:
    """The gradients turned back."""
    return _launch(p, True, dx, dk, cos, sin)
