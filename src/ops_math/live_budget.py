"""How wrong one live call may be, from three other runs of it: plain PyTorch in its dtype, float64, and float64 on nudged inputs.

The statistics and factors are those of `testing.budget`, which learns its limits from several seeds. Here there is one call, so where
plain PyTorch's error happens to average out to nothing, what an error of its size would leave takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_NUDGE = 2.0**-24
_EXACT = 1e-11  # float64 has no wider replay: ours is held to plain PyTorch itself, relative to the call's largest result
_BESIDE_NARROW = 2.0**-15  # what a statistic in fp32 may err beside 16-bit inputs: PyTorch's own CPU kernels have an exp of 20 bits

Worst = tuple[float, str, float, float, float]


def nudged(t: torch.Tensor) -> torch.Tensor:
    """Float64, each element moved by one unit of fp32 up or down."""
    generator = torch.Generator().manual_seed(7)
    sign = torch.randint(0, 2, t.shape, generator=generator).to(torch.float64).to(t.device) * 2 - 1
    return t.double() * (1 + _NUDGE * sign)


def judge(
    ours: Sequence[torch.Tensor],
    plain: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    moved: Sequence[torch.Tensor],
    tolerance: float,
    narrow: bool,
) -> list[Worst]:
    """For each result its worst statistic: share of the limit, name, value, plain PyTorch's value, limit.

    Args:
        ours, plain, exact, moved: the results of the four runs.
        tolerance: multiplies every limit.
        narrow: whether an input has 16 bits.
    """
    from ops_math.testing import budget

    kept = [_finite(*(t.detach() for t in run)) for run in zip(ours, plain, exact, moved, strict=True)]
    largest = max([*(r.double().abs().max().item() for _, _, r, _ in kept if r.numel()), budget.TINY])
    found = []
    for y, p, r, m in kept:
        if not r.numel():
            found.append((0.0, "", 0.0, 0.0, 0.0))
            continue
        seen, reference, limit = _limits(y, p, r, m, largest)
        if narrow and y.dtype == torch.float32:
            limit = {k: v + _BESIDE_NARROW for k, v in limit.items()}
        shares = [(seen[k] / (tolerance * v), k, seen[k], reference[k], tolerance * v) for k, v in limit.items()]
        found.append(max(shares, key=lambda s: (s[0] != s[0], s[0])))
    return found


def _limits(
    y: torch.Tensor, p: torch.Tensor, r: torch.Tensor, m: torch.Tensor, largest: float
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Statistics of ours and of plain PyTorch, and the limits."""
    from ops_math.testing import budget

    if y.dtype == torch.float64:
        size = max(p.abs().max().item(), budget.TINY)
        return {"max": (y - p).abs().max().item() / size}, {"max": 0.0}, {"max": _EXACT * largest / size}
    if r.double().abs().max().item() < budget.VANISHING * largest:
        sizes = [{"size": t.double().abs().max().item() / largest} for t in (y, p)]
        return sizes[0], sizes[1], {"size": max(budget.CANCELLED, 8 * budget.UNIT[y.dtype])}
    floor, seen, reference, movement = budget.floors(r, y.dtype), *(budget.statistics(t, r) for t in (y, p, m))
    base = dict(reference)
    if len(floor) == 1:
        factor = {"max": budget.FACTOR_FEW}
    else:
        factor = budget.FACTOR_WIDE if budget.UNIT[y.dtype] <= budget.UNIT[torch.float32] else budget.FACTOR
        size = max(seen["l2"], base["l2"])  # where ours is too large in size, l2 says so
        base["gain"] = max(base["gain"], size * _averaged(r.reshape(-1)))
        if "rows" in base:
            base["rows"] = max(base["rows"], size * _averaged(r.reshape(-1, r.shape[-1])))
    return seen, reference, {k: factor[k] * base[k] + floor[k] + 8 * movement[k] for k in floor}


def _averaged(r: torch.Tensor) -> float:
    """What independent errors leave of their size in <e, r> / <r, r>, over the last dimension; the rms over rows."""
    r = r.double()
    share = r.pow(4).sum(-1).sqrt() / r.square().sum(-1).clamp_min(1e-300)
    return float(share.square().mean().sqrt())


def _finite(y: torch.Tensor, p: torch.Tensor, r: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In the dtype of ours; where plain PyTorch is not finite either, there is nothing to compare."""
    if y.shape != p.shape:
        return torch.full_like(p, float("nan")), p, r, m
    p = p.to(y.dtype)
    both = ~torch.isfinite(p) & ~torch.isfinite(y)
    return tuple(t.masked_fill(both, 0.0) for t in (y, p, r, m))
