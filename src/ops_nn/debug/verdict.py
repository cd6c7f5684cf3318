"""How far two tensors are apart, and whether rounding explains it.

Rounding is counted in fp32: a `precision` of 1e-6 is 17 units of it (a unit is 2^-24), which sums in another order stay below. A 16-bit
tensor is computed in fp32 and rounded when it is stored, so a quarter as many of its own units are added: 1.6 % in bf16, 0.2 % in fp16. In
fp64 the same number of fp64's units counts. Errors are relative l2 distances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ops_math.testing.budget import UNIT
from ops_nn.debug.figures import sketched_alike
from ops_nn.debug.trace import Record

BITWISE, ROUNDING, DIFFERENT = "bitwise", "within rounding", "different"
# By how much a module may amplify an error that it was given, beyond which the rest is its own.
GROWTH = 8.0
# The same of code between modules in the backward, and of what is behind the model: a confident loss amplifies by its logits.
GROWTH_BETWEEN = 32.0
# A noise floor is one draw of it.
FLOOR_FACTOR = 4.0
STORED_SHARE = 0.25


class Difference(NamedTuple):
    """How far B is from A.

    Attributes:
        bitwise: same dtype, shape and bits.
        l2: relative l2 distance; an estimate from sketches in light mode; infinite where only one has NaN, or shapes differ.
        max: largest relative distance of an element, relative to A's largest; of the samples in light mode.
        limit: up to here rounding explains it.
        exact: whether it was computed from the tensors.
    """

    bitwise: bool
    l2: float
    max: float
    limit: float
    exact: bool


def limit(dtype: torch.dtype, precision: float) -> float:
    """The relative error that rounding explains in a dtype."""
    unit = UNIT.get(dtype)
    if unit is None:
        return 0.0
    ratio = unit / UNIT[torch.float32]
    return precision * (ratio if ratio <= 1 else 1 + STORED_SHARE * ratio)


def wider(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype that rounds less: where one run is in bf16 and the other is not, bf16 is the difference."""
    return min(a, b, key=lambda d: UNIT.get(d, 0.0))


def difference(a: Record, b: Record, precision: float, autocast: str = "") -> Difference:
    """How far B's tensor is from A's.

    Args:
        a, b: the records.
        precision: as `ConsistencyChecker` takes it.
        autocast: the dtype in which both runs computed under autocast, which rounds values that are stored in fp32 too.
    """
    dtypes = [a.torch_dtype, b.torch_dtype]
    most = limit(wider(*dtypes), precision)
    if autocast and torch.float32 in dtypes and all(d in UNIT for d in dtypes):
        most = max(most, limit(getattr(torch, autocast), precision))
    if a.shape != b.shape:
        return Difference(False, math.inf, math.inf, most, True)
    if a.dtype == b.dtype and a.figures.fingerprint == b.figures.fingerprint:
        return Difference(True, 0.0, 0.0, most, True)
    if a.tensor is not None and b.tensor is not None:
        return Difference(False, *distance(a.tensor, b.tensor), most, True)
    top = max(a.figures.max, 1e-300)
    pairs = zip(a.figures.samples, b.figures.samples, strict=True)
    worst = max((abs(x - y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)), default=0.0)
    alike = sketched_alike(math.prod(a.shape), *dtypes)
    return Difference(False, a.figures.distance(b.figures, alike), max(worst, abs(a.figures.max - b.figures.max)) / top, most, False)


def distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Relative distance in l2 and of the worst element; infinite where only one is finite."""
    x, y = a.detach().double(), b.detach().double()
    ends = ~torch.isfinite(x)
    if not torch.equal(ends, ~torch.isfinite(y)) or not torch.equal(x.nan_to_num(7.0)[ends], y.nan_to_num(7.0)[ends]):
        return math.inf, math.inf
    x, y = x.masked_fill(ends, 0.0), y.masked_fill(ends, 0.0)
    if not x.numel():
        return 0.0, 0.0
    size, top = max(x.norm().item(), 1e-300), max(x.abs().max().item(), 1e-300)
    return (x - y).norm().item() / size, (x - y).abs().max().item() / top
