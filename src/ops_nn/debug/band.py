"""Is this loss curve one of those that another seed could have given? A band of k runs that differ in their seed alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import ops_math as om

FEWEST = 3  # seeds: of two runs the spread is one number


class Judgement(NamedTuple):
    """A curve against a band.

    Attributes:
        distance: mean over steps of the squared deviation from the other runs, in units of their spread; about 1 for one of them.
        rank: how many of all runs, this one included, lie at least as far from the others; 1 says that none lies farther.
        runs: how many runs that were, this one included.
        first_outside: the first step where the loss is below all of the seeds' or above; None where it never is.
    """

    distance: float
    rank: int
    runs: int
    first_outside: int | None

    @property
    def outside(self) -> bool:
        """Whether the curve lies farther from the others than any of them does."""
        return self.rank == 1

    def __str__(self) -> str:
        alarm = f"a curve of another seed is the farthest one time in {self.runs}"
        where = "" if self.first_outside is None else f", first outside the seeds' range at step {self.first_outside}"
        place = "the farthest from the others" if self.outside else f"number {self.rank} from the outside"
        head = f"{'outside' if self.outside else 'inside'} the band: {place} of {self.runs} runs"
        return f"{head} (distance {self.distance:.3g}{where}); {alarm}"


class Band(NamedTuple):
    """Losses of runs that differ in their seed alone: `losses[i][step]`."""

    seeds: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]

    @property
    def low(self) -> tuple[float, ...]:
        """The smallest loss of each step."""
        return tuple(min(step) for step in zip(*self.losses, strict=True))

    @property
    def high(self) -> tuple[float, ...]:
        """The largest loss of each step."""
        return tuple(max(step) for step in zip(*self.losses, strict=True))

    def judge(self, losses: Iterable[float]) -> Judgement:
        """Hold another run's losses against the band.

        Each run, this one and those of the seeds, is measured by its distance from all others. If this run differs from them in its seed
        alone, each is as likely to be the farthest: it is called outside by mistake one time in k + 1. More seeds make that rarer.

        Raises:
            ArgumentError: for another number of steps.
        """
        curve = tuple(float(x) for x in losses)
        if len(curve) != len(self.losses[0]):
            raise om.ArgumentError(
                f"Band.judge: losses must be {len(self.losses[0])} numbers, one a step; got {len(curve)}. "
                "Run as many steps as the seeds did."
            )
        runs = (*self.losses, curve)
        distance, rank = math.inf, 1  # of a loss that is no number
        if all(math.isfinite(x) for x in curve):
            distances = [_distance(run, [other for j, other in enumerate(runs) if j != i]) for i, run in enumerate(runs)]
            distance, rank = distances[-1], sum(not d < distances[-1] for d in distances)
        steps = enumerate(zip(curve, self.low, self.high, strict=True))
        first = next((step for step, (x, low, high) in steps if not low <= x <= high), None)
        return Judgement(distance, rank, len(runs), first)


def _distance(run: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """The mean squared deviation of a run from others, in units of their variance; infinite where they agree and it does not."""
    total, count = 0.0, len(others)
    for step, x in enumerate(run):
        column = [other[step] for other in others]
        mean = math.fsum(column) / count
        variance = math.fsum((y - mean) ** 2 for y in column) / (count - 1)
        off = (x - mean) ** 2
        total += off / variance if variance else (0.0 if off == 0 else math.inf)
    return total / len(run)


def _losses(given: object) -> tuple[float, ...]:
    """What a run returned, as numbers."""
    if not isinstance(given, Iterable):
        raise om.ArgumentError(
            f"loss_band: run must give its losses, one a step; got {type(given).__name__}. Return a list of them, not the last one."
        )
    return tuple(float(x) for x in given)


def loss_band(run: Callable[[int], Iterable[float]], seeds: Iterable[int] = range(5)) -> Band:
    """Train once with each seed and keep the losses.

    Args:
        run: trains with a seed and returns its losses, one a step; it must seed everything that it draws from.
        seeds: at least 3; with k of them `Band.judge` is wrong about a run of another seed one time in k + 1.

    Raises:
        ArgumentError: for fewer seeds, a seed twice, losses that are one number, not finite or none, or runs of different lengths.
    """
    if not callable(run):
        raise om.ArgumentError(f"loss_band: run must be a function of a seed; got {type(run).__name__}. Pass what trains, not its losses.")
    if not isinstance(seeds, Iterable):
        raise om.ArgumentError(f"loss_band: seeds must be at least {FEWEST} different numbers; got {seeds!r}. Pass range({seeds}).")
    chosen = tuple(seeds)
    if len(set(chosen)) < FEWEST or len(set(chosen)) != len(chosen):
        raise om.ArgumentError(f"loss_band: seeds must be at least {FEWEST} different numbers; got {list(chosen)}. Pass range(5).")
    found = tuple(_losses(run(seed)) for seed in chosen)
    diverged = [seed for seed, losses in zip(chosen, found, strict=True) if not all(math.isfinite(x) for x in losses)]
    if diverged:
        raise om.ArgumentError(f"loss_band: run must give finite losses; got others for seed {diverged[0]}. Take a run that trains as A.")
    if len({len(losses) for losses in found}) != 1 or not found[0]:
        raise om.ArgumentError(
            f"loss_band: run must give as many losses for each seed; got {[len(x) for x in found]}. Run a fixed number of steps."
        )
    return Band(chosen, found)
