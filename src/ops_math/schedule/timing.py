"""Times candidates against each other: interleaved, caches cold, median and noise."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ops_math.schedule.trial import CandidateFailedError, Trial

FLUSHED = {"cuda": 512 << 20, "cpu": 8 << 20}  # bytes written between two calls; on a GPU they also give the host a head start of 0.1 ms
TIE = 0.03  # times closer than this are a tie, whatever their noise: clocks and placement move them as much from run to run
MOST_NOISE = 0.5  # beyond this a measurement is too noisy to call everything a tie
FEWEST, MOST = 7, 60  # rounds


class Timing(NamedTuple):
    """Median time of a call [us], of its host part [us], and the relative half-width of the median's 95 % interval.

    `us` is the larger of device and host: what a call costs where nothing else hides it.
    """

    us: float
    host_us: float
    noise: float


class Stopwatch:
    """Takes the time of single calls on one device.

    On a GPU device time is between two events around the call, and the flush before them keeps the device busy while the host prepares
    the call, so that the gap between launches does not count; host time stands beside it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scratch = torch.zeros(FLUSHED[device.type] // 4, device=device)

    def sample(self, call: Callable[[], Any]) -> tuple[float, float]:
        """(time [us], host time [us]) of one call with cold caches."""
        self._scratch.add_(1.0)
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            us = (time.perf_counter() - start) * 1e6
            return us, us
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        start = time.perf_counter()
        call()
        host = (time.perf_counter() - start) * 1e6
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3, host


def summary(samples: Sequence[tuple[float, float]]) -> Timing:
    """Median and noise of samples."""
    costs = [max(sample) for sample in samples]
    middle = statistics.median(costs)
    spread = 1.4826 * statistics.median(abs(c - middle) for c in costs)  # the standard deviation, were they normal
    noise = 1.96 * 1.2533 * spread / math.sqrt(len(costs)) / middle if middle else 0.0
    return Timing(middle, statistics.median(host for _, host in samples), noise)


def interleave(
    calls: Mapping[str, Callable[[], Any]], trial: Trial, watch: Stopwatch, seconds: float, limit_s: float
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time calls in turns until `seconds` [s] are over: A B C, B C A, ..., so that a change of clock meets all alike.

    Returns: timings, and why a call dropped out on the way.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    failed: dict[str, str] = {}
    end = time.perf_counter() + seconds
    for round_number in range(MOST):
        alive = [name for name in calls if name not in failed]
        turn = round_number % max(len(alive), 1)
        for name in alive[turn:] + alive[:turn]:
            try:
                samples[name].append(trial.run(lambda name=name: watch.sample(calls[name]), limit_s))  # type: ignore[misc]
            except CandidateFailedError as error:
                failed[name] = f"{error}, after {len(samples[name])} calls that were well"
        if round_number + 1 >= FEWEST and time.perf_counter() > end:
            break
    return {name: summary(taken) for name, taken in samples.items() if name not in failed and taken}, failed


def tied(a: Timing, b: Timing) -> bool:
    """Whether two timings cannot be told apart."""
    return abs(a.us - b.us) <= max(TIE, min(a.noise + b.noise, MOST_NOISE)) * min(a.us, b.us)


def decide(timings: Mapping[str, Timing], incumbent: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The winner, and those that tie with it. `timings` are in order of preference.

    The incumbent stays unless one is clearly faster; without one, the first listed of those that tie with the fastest wins.
    """
    fastest = min(timings, key=lambda name: timings[name].us)
    level = [name for name in timings if tied(timings[name], timings[fastest])]
    winner = incumbent if incumbent in level else level[0]
    return winner, tuple(name for name in level if name != winner)
