"""What is wrong with an array of numbers, in words a person can act on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ops_math.testing.budget import UNIT
from ops_math.testing.measure import SEEDS

if TYPE_CHECKING:
    from ops_math.testing.subject import CallJudge

SAME_SCALE = 0.97  # share of the error that one common factor must explain to be called a scale


def in_words(y: torch.Tensor, r: torch.Tensor) -> str:
    """How `y` differs from what it should be, `r` in float64: NaN, sign, scale, place, or size."""
    if y.shape != r.shape:
        return f"has shape {list(y.shape)} instead of {list(r.shape)}"
    y, unit = y.double(), UNIT.get(y.dtype, 2.0**-53)
    lost = ~torch.isfinite(y) & torch.isfinite(r)
    if bool(lost.any()):
        return f"is {_of(lost)} not finite{_place(lost)}"
    if r.numel() == 1:
        return f"is {y.item():.6g} instead of {r.item():.6g}"
    e, r = torch.where(y == r, torch.zeros_like(r), y - r), r.nan_to_num(0, 0, 0)
    power = r.square().sum().item()
    if not bool(y.any()) and power:
        return "is zero everywhere: no gradient arrives, or nothing was written"
    factor = 1 + (e * r).sum().item() / power if power else math.nan
    rest = (e - (factor - 1) * r).norm().item()
    whole = e.norm().item()
    if power and rest < (1 - SAME_SCALE) ** 0.5 * whole:
        if abs(factor + 1) < 0.01:
            return "has the opposite sign"
        return f"is {factor:.4g} times what it should be, everywhere alike"
    wrong = e.abs() > 8 * unit * r.abs() + 2 * unit * r.abs().max() * 0.05
    if not bool(wrong.any()) or wrong.float().mean() > 0.9:
        return f"is off by {whole / max(math.sqrt(power), 1e-300):.2g} of its size{_by_lanes(e, r)}"
    return f"is wrong in {_of(wrong)}{_place(wrong)}, by up to {e.abs().max().item():.3g}"


def _of(mask: torch.Tensor) -> str:
    return f"in {int(mask.sum())} of {mask.numel()} elements".removeprefix("in ")


def _place(mask: torch.Tensor) -> str:
    """Where the elements lie: all in the last rows, in the last columns, in a run of rows or columns."""
    if mask.dim() == 0 or mask.numel() < 2:
        return ""
    m_MN = mask.reshape(-1, mask.shape[-1]) if mask.dim() > 1 else mask.reshape(1, -1)
    found = []
    for name, lanes in (("row", m_MN.any(1)), ("column", m_MN.any(0))):
        at = lanes.nonzero().flatten().tolist()
        if len(lanes) > 1 and len(at) < len(lanes):
            first, last, end = at[0], at[-1], len(lanes) - 1
            if first == last == end:
                found.append(f"the last {name} ({end})")
            elif first == last:
                found.append(f"{name} {first} alone")
            elif last - first + 1 == len(at):
                found.append(f"{name}s {first} to {last}" + (", the last ones" if last == end else ""))
    return ", all in " + " and ".join(found) if found else ""


def _by_lanes(e: torch.Tensor, r: torch.Tensor) -> str:
    """Whether the error is a factor of each row, or of each column."""
    if r.dim() < 2 or not r.numel():
        return ""
    e_MN, r_MN = e.reshape(-1, r.shape[-1]), r.reshape(-1, r.shape[-1])
    for dim, name in ((1, "row"), (0, "column")):
        power = r_MN.square().sum(dim, keepdim=True)
        ratio = (e_MN * r_MN).sum(dim, keepdim=True) / (power + 1e-300)
        if r_MN.shape[dim] > 3 and (e_MN - ratio * r_MN).norm() < 0.3 * e_MN.norm():
            worst = int(ratio.abs().argmax())
            return f", by a factor of its own in each {name} ({1 + ratio.flatten()[worst].item():.4g} in {name} {worst})"
    return ""


def one_gradient_for_all(judge: CallJudge, output: str) -> bool:
    """Whether a gradient that is wrong is right once all rows have the output gradient of the first."""

    def first_everywhere(t: torch.Tensor) -> torch.Tensor:
        return t[:1].expand(t.shape).contiguous() if t.dim() and t.shape[0] > 1 else t

    seed = SEEDS[0]
    seen = judge.run(seed, change_gradient=first_everywhere)
    oracle = judge.run(
        seed,
        judge.subject.reference,
        change=lambda t: t.double(),
        differentiable=judge.differentiable,
        change_gradient=first_everywhere,
    )
    same = all(torch.equal(a, b) for a, b in zip(judge.oracles[seed].values, oracle.values, strict=True))
    return not same and all(b.output != output for b in judge.budget.broken(seen.values, oracle.values))
