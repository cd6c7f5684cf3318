"""Ratios of interleaved times, their noise, and whether one run is slower than another beyond the noise of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

Sessions = Sequence[Sequence[float]]  # ratios visit by visit, for each time that everything was set up anew

NORMAL = 1.4826  # from the median absolute deviation to the standard deviation, were the samples normal
MEDIAN = 1.2533  # a median's standard error over a mean's
FLOOR = 0.05  # slower by less is never called a regression: clocks and placement move times as much from day to day
ERRORS = 4.0  # standard errors: with two sessions or three, one comparison in about a hundred is further out by chance
BLIND = 0.25  # where more than this is allowed, a row is too noisy to be held to anything


class Spread(NamedTuple):
    """A median, and the relative half-width of its 95 % interval."""

    middle: float
    noise: float


def spread(samples: Sequence[float]) -> Spread:
    """Median and noise."""
    middle = statistics.median(samples)
    return Spread(middle, 1.96 * standard_error(samples) / middle if middle else 0.0)


def standard_error(samples: Sequence[float]) -> float:
    """Of the median, from the median absolute deviation, so that a few visits that something disturbed do not count."""
    middle = statistics.median(samples)
    return MEDIAN * NORMAL * statistics.median(abs(sample - middle) for sample in samples) / math.sqrt(len(samples))


class Comparison(NamedTuple):
    """Two runs of one row.

    Attributes:
        change: how much slower the second is, relative; negative where it is faster.
        allowed: how much slower it may seem before it counts: the floor, and the noise of both runs.
    """

    change: float
    allowed: float

    @property
    def regressed(self) -> bool:
        """Whether it is slower beyond doubt."""
        return self.change > self.allowed

    @property
    def blind(self) -> bool:
        """Whether the noise would hide a slowdown that matters."""
        return not self.regressed and self.allowed > BLIND


def compare(before: Sessions, now: Sessions) -> Comparison:
    """Compare two runs by the logarithms of their ratios.

    The noise has two parts: that of the visits of one session, and that from session to session, which visits do not show (where
    tensors lie, which clock the device settled on). The second is pooled over both runs.
    """
    runs = [[[math.log(ratio) for ratio in session] for session in run] for run in (before, now)]
    middles = [[statistics.median(session) for session in run] for run in runs]
    within = [statistics.mean(standard_error(session) ** 2 for session in run) / len(run) for run in runs]
    deviations = [(m - statistics.mean(run)) ** 2 for run in middles for m in run]
    freedom = len(deviations) - 2
    between = sum(deviations) / freedom * sum(1 / len(run) for run in middles) if freedom else 0.0
    change = statistics.mean(middles[1]) - statistics.mean(middles[0])
    allowed = math.log1p(FLOOR) + ERRORS * math.sqrt(max(sum(within), between))
    return Comparison(math.expm1(change), math.expm1(allowed))
