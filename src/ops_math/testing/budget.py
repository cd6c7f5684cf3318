"""How wrong may an implementation be? Four statistics of its error e = y - r against the float64 oracle r.

| statistic | formula | what it sees |
|---|---|---|
| max | max abs(e) / max abs(r) | one bad element |
| l2 | norm(e) / norm(r) | a little everywhere |
| gain | abs(<e, r>) / <r, r> | a wrong scale: rounding averages out, a scale does not |
| rows | rms over rows k of <e_k, r_k> / <r_k, r_k> | a wrong scale of each row, e.g. a rounded statistic |

Outputs with enough rows and columns are held to those of `lanes` too, which see a single row or column.

Each is held to a factor times the same statistic of the eager implementation in the same dtype, plus a floor from the rounding of
the store, plus what the oracle itself moves when its inputs move by one unit of the accumulating dtype (conditioning).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ops_math.testing import lanes

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
FACTOR = {"max": 2.0, "l2": 1.5, "gain": 4.0, "rows": 3.0}
# Where results are stored in the dtype of accumulation the orders of sums differ, and faults are a thousand times larger.
FACTOR_WIDE = {"max": 4.0, "l2": 4.0, "gain": 4.0, "rows": 4.0}
FACTOR_FEW = 4.0  # outputs with too few elements for an average
FEW = 64
ROW = 16  # shortest row that is worth a statistic of its own
WORST = ("max", "row", "column")  # of these the largest of several draws counts, of the others the rms
# Two roundings to a narrow dtype, one after the other, do not average out to nothing: silu(g) * u in bf16 leans by 0.044 units over 2.6e5
# elements. A wrong scale of 0.1 % is 0.26 units of bf16.
LEAN = 0.06
TINY = 1e-30
# An output this much smaller than the call's largest is a sum that cancels exactly; what remains is rounding noise of the summands, so
# only its size is held, to CANCELLED or eight units of its dtype, whichever is larger, of the call's largest output.
VANISHING = 1e-9
CANCELLED = 2.0**-12


class Broken(NamedTuple):
    """A limit that was passed."""

    output: str
    statistic: str
    value: float
    limit: float

    @property
    def share(self) -> float:
        """The error as a share of its limit; NaN where one of them is."""
        return self.value / self.limit if self.limit else (0.0 if not self.value else math.inf)

    def __str__(self) -> str:
        return f"{self.output}: {self.statistic} error {self.value:.3g} passes its limit {self.limit:.3g}"


def _error(y: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Error and oracle in float64, with equal infinities taken out and unequal ones kept infinite."""
    y, r = y.double(), r.double()
    endless = torch.isinf(r)
    e = torch.where(endless & (y == r), torch.zeros_like(r), y - r)
    return e, torch.where(endless, torch.zeros_like(r), r)


def statistics(y: torch.Tensor, r: torch.Tensor) -> dict[str, float]:
    """The statistics of `y` against the oracle `r`; only `max` for outputs of fewer than 64 elements."""
    e, r = _error(y, r)
    top = e.abs().max().item() / max(r.abs().max().item(), TINY)
    if r.numel() < FEW:
        return {"max": top}
    power = max(r.square().sum().item(), TINY**2)
    found = {"max": top, "l2": e.norm().item() / math.sqrt(power), "gain": abs((e * r).sum().item()) / power}
    if _has_rows(r):
        e_MN, r_MN = e.reshape(-1, r.shape[-1]), r.reshape(-1, r.shape[-1])
        power_M = r_MN.square().sum(1)
        ratio_M = (e_MN * r_MN).sum(1) / (power_M + 0.05 * power_M.mean() + TINY**2)
        found["rows"] = ratio_M.square().mean().sqrt().item()
    return found


def _size(r: torch.Tensor) -> float:
    return _error(r, r)[1].abs().max().item() if r.numel() else 0.0


def _largest(oracle: Sequence[torch.Tensor]) -> float:
    """The largest finite value among all outputs and gradients of a call."""
    return max([*(_size(r) for r in oracle), TINY])


def _has_rows(r: torch.Tensor) -> bool:
    return r.dim() > 1 and r.shape[-1] >= ROW and r.numel() > r.shape[-1]


def _spread(v: torch.Tensor) -> torch.Tensor:
    """1 / sqrt of the effective number of terms in <v, v>: how well independent roundings average out."""
    return v.pow(4).sum(-1).sqrt() / v.square().sum(-1).clamp_min(TINY**2)


def floors(r: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """What rounding at the store alone can do: one rounding has an rms of 0.42 units of the value."""
    _, r = _error(r, r)
    unit = UNIT[dtype]
    summing = 4 * UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    if r.numel() < FEW:
        return {"max": 2 * unit}
    lean = LEAN * unit if unit > UNIT[torch.float32] else 0.0
    found = {"max": 0.5 * unit, "l2": 0.25 * unit, "gain": 1.5 * unit * _spread(r.reshape(-1)).item() + summing + lean}
    if _has_rows(r):
        found["rows"] = 0.5 * unit * _spread(r.reshape(-1, r.shape[-1])).square().mean().sqrt().item() + summing
    return found


def _all_statistics(y: torch.Tensor, r: torch.Tensor) -> dict[str, float]:
    """Those of the output as a whole, and those of its lanes."""
    return {**statistics(y, r), **lanes.statistics(*_error(y, r))}


def _all_floors(r: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    return {**floors(r, dtype), **lanes.floors(_error(r, r)[1], UNIT[dtype])}


def _rms(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {k: math.sqrt(sum(x[k] ** 2 for x in rows) / len(rows)) for k in rows[0]}


def _top(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {k: max(x[k] for x in rows) for k in rows[0]}


class Budget:
    """Limits for every output, learned from several seeds of one case.

    Args:
        oracles: for each seed the outputs and gradients in float64.
        eagers: the same from the eager implementation in the dtype under test.
        nudged: the same from the oracle on inputs moved by one unit of the accumulating dtype.
        names: labels of the outputs.
        looser: factors that multiply a statistic's limit; a case that uses one gives its reason.
    """

    def __init__(
        self,
        oracles: Sequence[Sequence[torch.Tensor]],
        eagers: Sequence[Sequence[torch.Tensor]],
        nudged: Sequence[Sequence[torch.Tensor]],
        names: Sequence[str],
        looser: dict[str, float] | None = None,
    ) -> None:
        self.names = tuple(names)
        self.limits: list[dict[str, float]] = []
        for i in range(len(self.names)):
            r, e, n = ([seed[i] for seed in runs] for runs in (oracles, eagers, nudged))
            if not r[0].numel():
                self.limits.append({})
            elif all(_size(one) < VANISHING * _largest(whole) for one, whole in zip(r, oracles, strict=True)):
                self.limits.append({"size": max(CANCELLED, 8 * UNIT[e[0].dtype])})
            else:
                self.limits.append(self._limit(r, e, n, looser or {}))

    @staticmethod
    def _limit(r: list[torch.Tensor], e: list[torch.Tensor], n: list[torch.Tensor], looser: dict[str, float]) -> dict[str, float]:
        dtype = e[0].dtype
        eager = [_all_statistics(a, b) for a, b in zip(e, r, strict=True)]
        moved = _rms([_all_statistics(a, b) for a, b in zip(n, r, strict=True)])
        floor = _top([_all_floors(b, dtype) for b in r])
        few = len(floor) == 1
        wide = UNIT[dtype] <= UNIT[torch.float32]
        factor = {**FACTOR_WIDE, **lanes.FACTOR_WIDE} if wide else {**FACTOR, **lanes.FACTOR}
        top = _top(eager)
        base = {**_rms(eager), **{k: top[k] for k in WORST if k in top}}
        return {k: looser.get(k, 1.0) * ((FACTOR_FEW if few else factor[k]) * base[k] + floor[k] + 8 * moved[k]) for k in floor}

    def errors(self, values: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor]) -> list[Broken]:
        """Every statistic of these outputs with its limit, whether it passes it or not; a wrong shape stands for all of an output's."""
        found = []
        for name, y, r, limit in zip(self.names, values, oracle, self.limits, strict=True):
            if y.shape != r.shape:
                found.append(Broken(name, "shape", float(y.dim()), float("nan")))
                continue
            if "size" in limit:
                seen = {"size": y.abs().max().item() / _largest(oracle)}
            else:
                seen = _all_statistics(y, r) if limit else {}
            found += [Broken(name, k, seen[k], limit[k]) for k in limit]
        return found

    def broken(self, values: Sequence[torch.Tensor], oracle: Sequence[torch.Tensor]) -> list[Broken]:
        """Every limit that these outputs pass. NaN passes all."""
        return [one for one in self.errors(values, oracle) if not one.value <= one.limit]
