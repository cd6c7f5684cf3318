"""Are a candidate's numbers right on this device? Asked before it is timed, of the very call that is measured.

This is the last gate, not the proof: conformance (`ops_math.testing`) holds every implementation to the float64 oracle on hostile inputs
beforehand. Here `eager` in float64 is the oracle (its agreement with the reference is proved to 1e-12), `eager` in the storage dtype says
what rounding costs, and a candidate whose error is a multiple of that, or that gives NaN where the oracle does not, is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ops_math.spec import DTYPE_NAME, compute_dtype

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# Factors on the yardstick's own error: twice those of ops_math.testing.budget, which averages over several draws.
FACTOR = {"max": 4.0, "l2": 3.0, "gain": 8.0}
FLOOR = {"max": 1.0, "l2": 0.5, "gain": 3.0}  # in units of the storage dtype: what one rounding at the store does; gains average out
COARSE = {"max": 32.0, "l2": 4.0, "gain": 1.0}  # in units, where only another implementation of the same dtype could be run
# A statistic saved in fp32 by a call on 16-bit numbers (a log-sum-exp) may be off by this: products are summed in another order, and
# exponentials are fast ones (PyTorch's flash attention on a CPU: 1.4e-5). Rounding it to fp16, a fault, is off by four times as much.
SAVED = 2.0**-14
# A scale that calls on 16-bit numbers may be off by, however many elements average out: tensor cores cut what they add where eager's sums
# round it (H200, 2,048 rows a sum: 1.2e-4), and two roundings in a row lean as much (PyTorch's own silu and product: 1.3e-4).
LEAN = 2.0**-12
NUDGE, CONDITIONING = 2.0**-24, 8.0  # inputs moved by one unit of fp32, and how much of what the oracle moves then is allowed
ACCUMULATED = 64 * 2.0**-24  # another order of fp32 sums
LUCK = 8.0  # factor on all of the yardstick's errors where its result is nothing but rounding: how large that is is luck
TINY = 1e-30
PIECE = 1 << 24  # elements compared at a time


class Oracle(NamedTuple):
    """What results are held to. `limits` are by result; `words` name it: `eager in fp64`."""

    results: tuple[torch.Tensor, ...]
    limits: tuple[dict[str, float], ...]
    words: str


def as_results(returned: Any, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The tensors of a launcher's answer; an operator that writes in place has changed its first argument."""
    if returned is None:
        return (args[0],)
    return tuple(returned) if isinstance(returned, tuple | list) else (returned,)


def widened(args: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The arguments with every floating tensor and every dtype in `dtype`."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.dtype in DTYPE_NAME else value
        return dtype if isinstance(value, torch.dtype) and value in DTYPE_NAME else value

    return [wide(value) for value in args]


def statistics(y: torch.Tensor, r: torch.Tensor) -> dict[str, float]:
    """Errors of `y` against `r`, relative: of the largest element, in the l2 norm, and of the scale. NaN where `y` has one of its own.

    Both are read piece by piece, so that a float64 copy of gigabytes is never made.
    """
    top = largest = squares = power = product = 0.0
    for y_part, r_part in zip(y.reshape(-1).split(PIECE), r.reshape(-1).split(PIECE), strict=True):
        a, b = y_part.double(), r_part.double()
        known = torch.isfinite(b)
        e = torch.where(known, a - b, torch.where((a == b) | (torch.isnan(a) & torch.isnan(b)), 0.0, torch.nan))
        b = torch.where(known, b, 0.0)
        figures = torch.stack((e.abs().max(), b.abs().max(), e.square().sum(), b.square().sum(), (e * b).sum())).tolist()
        if not all(math.isfinite(f) for f in figures):
            return dict.fromkeys(FACTOR, math.nan)
        top, largest = max(top, figures[0]), max(largest, figures[1])
        squares, power, product = squares + figures[2], power + figures[3], product + figures[4]
    power = max(power, TINY**2)
    return {"max": top / max(largest, TINY), "l2": math.sqrt(squares / power), "gain": abs(product) / power}


def nudged(args: Sequence[Any]) -> list[Any]:
    """The arguments in float64, every element moved by one unit of fp32 up or down."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAME:
            return value
        generator = torch.Generator(value.device).manual_seed(7)
        sign = torch.randint(0, 2, value.shape, generator=generator, device=value.device) * 2 - 1
        return value * (1 + NUDGE * sign)

    return [moved(value) for value in widened(args, torch.float64)]


def is_narrow(args: Sequence[Any]) -> bool:
    """Whether a floating tensor among the arguments has 16 bits."""
    return any(isinstance(a, torch.Tensor) and UNIT.get(a.dtype, 0.0) > UNIT[torch.float32] for a in args)


def averaging(r: torch.Tensor) -> float:
    """1 / sqrt of the effective number of terms in <r, r>: how well independent roundings average out."""
    fourth = square = 0.0
    for part in r.reshape(-1).split(PIECE):
        powers = torch.where(torch.isfinite(part), part, 0.0).double().square()
        fourth, square = fourth + float(powers.square().sum()), square + float(powers.sum())
    return math.sqrt(fourth) / max(square, TINY**2)


def oracle_of(wide: Sequence[torch.Tensor], yardstick: Sequence[torch.Tensor], words: str, narrow: bool = False) -> Oracle:
    """An oracle from results in a wider dtype and the yardstick's in the storage dtype; `narrow` where the arguments have 16 bits."""
    limits: list[dict[str, float]] = []
    for r, y in zip(wide, yardstick, strict=True):
        if r.numel() == 0 or r.dtype not in DTYPE_NAME:
            limits.append({})
            continue
        unit, own = max(UNIT[y.dtype], SAVED * narrow), statistics(y, r)
        own = {k: 0.0 if math.isnan(v) else v for k, v in own.items()}  # the yardstick overflowed where float64 did not
        floor, luck = {**FLOOR, "gain": FLOOR["gain"] * averaging(r)}, LUCK if own["l2"] > 1.0 else 1.0
        summed = ACCUMULATED * (compute_dtype(y.dtype) != torch.float64)
        limit = {k: luck * FACTOR[k] * own[k] + floor[k] * unit + summed for k in FACTOR}
        limits.append({**limit, "gain": max(limit["gain"], LEAN * narrow)})
    return Oracle(tuple(wide), tuple(limits), words)


def conditioned(oracle: Oracle, moved: Sequence[torch.Tensor]) -> Oracle:
    """The oracle with room for what its own results move when its inputs do (`nudged`): sums that cancel are all rounding."""
    limits = []
    for limit, r, m in zip(oracle.limits, oracle.results, moved, strict=True):
        own = statistics(m, r) if limit else {}
        limits.append({k: v + CONDITIONING * (0.0 if math.isnan(own[k]) else own[k]) for k, v in limit.items()})
    return oracle._replace(limits=tuple(limits))


def coarse_oracle(results: Sequence[torch.Tensor], words: str, narrow: bool = False) -> Oracle:
    """An oracle from another implementation in the same dtype, for calls that are too large for a wider one."""
    units = (max(UNIT[r.dtype], SAVED * narrow) if r.dtype in UNIT and r.numel() else 0.0 for r in results)
    limits = tuple({k: COARSE[k] * max(unit, ACCUMULATED) for k in COARSE} if unit else {} for unit in units)
    return Oracle(tuple(results), limits, words)


def verdict(results: Sequence[torch.Tensor], oracle: Oracle) -> str | None:
    """Why these results are wrong, in words, or None."""
    if len(results) != len(oracle.results):
        return f"gives {len(results)} results where {oracle.words} gives {len(oracle.results)}"
    for place, (y, r, limit) in enumerate(zip(results, oracle.results, oracle.limits, strict=True)):
        if y.shape != r.shape:
            return f"result {place} has shape {list(y.shape)} where {oracle.words} gives {list(r.shape)}"
        if not limit:
            continue
        seen = statistics(y, r)
        if any(math.isnan(v) for v in seen.values()):
            return f"result {place} has NaN or an infinity where {oracle.words} has none"
        for name, value in seen.items():
            if value > limit[name]:
                return f"result {place} is wrong: its {name} error against {oracle.words} is {value:.2g}, and {limit[name]:.2g} is allowed"
    return None
