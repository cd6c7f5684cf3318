"""Statistics of single lanes: each row and each column of an output has a scale of its own, and one of them alone may be wrong.

| statistic | formula | what it sees |
|---|---|---|
| columns | rms over columns k of <e_k, r_k> / <r_k, r_k> | a weight, bias or table rounded once more: the same error in every row |
| row | largest abs(<e_k, r_k>) / <r_k, r_k> over rows k | one row off by a percent among thousands |
| column | the same over columns | one lane of a weight, one partial sum that is missing |

They are kept apart from those of `budget`, which `om.debug` also uses on single calls: these need several rows and several draws.
"""

from __future__ import annotations

import torch

LEAST = 16  # rows, and elements of a row, below which a lane's own scale is mostly rounding
UNIT_FP32 = 2.0**-24
# The worst lane of a few hundred is a matter of luck: twice the yardstick's worst over three draws is 4.4 standard deviations and more.
FACTOR = {"columns": 3.0, "row": 2.0, "column": 2.0}
FACTOR_WIDE = {"columns": 4.0, "row": 4.0, "column": 4.0}


def has_lanes(r: torch.Tensor) -> bool:
    """Whether an output has rows and columns enough."""
    return r.dim() > 1 and r.shape[-1] >= LEAST and r.numel() // r.shape[-1] >= LEAST


def _ratios(e_MN: torch.Tensor, r_MN: torch.Tensor, dim: int) -> torch.Tensor:
    power = r_MN.square().sum(dim)
    return (e_MN * r_MN).sum(dim) / (power + 0.05 * power.mean() + 1e-60)


def _spread(v_MN: torch.Tensor, dim: int) -> torch.Tensor:
    """What one random rounding leaves in a lane's ratio, in roundings: 1 / sqrt of its effective number of terms, damped as ratios are."""
    power = v_MN.square().sum(dim)
    return v_MN.pow(4).sum(dim).sqrt() / (power + 0.05 * power.mean() + 1e-60)


def statistics(e: torch.Tensor, r: torch.Tensor) -> dict[str, float]:
    """The three statistics of an error `e` in float64 against the oracle `r`; none where there are too few lanes."""
    if not has_lanes(r):
        return {}
    e_MN, r_MN = e.reshape(-1, r.shape[-1]), r.reshape(-1, r.shape[-1])
    row, column = _ratios(e_MN, r_MN, 1).abs(), _ratios(e_MN, r_MN, 0).abs()
    return {"columns": column.square().mean().sqrt().item(), "row": row.max().item(), "column": column.max().item()}


def floors(r: torch.Tensor, unit: float) -> dict[str, float]:
    """What rounding at the store alone can do: one rounding has an rms of 0.42 units, and the worst of many lanes is four times that."""
    if not has_lanes(r):
        return {}
    r_MN = r.reshape(-1, r.shape[-1])
    row, column = _spread(r_MN, 1), _spread(r_MN, 0)
    summing = 4 * min(unit, UNIT_FP32)
    return {
        "columns": 0.5 * unit * column.square().mean().sqrt().item() + summing,
        "row": 1.5 * unit * row.max().item() + summing,
        "column": 1.5 * unit * column.max().item() + summing,
    }
