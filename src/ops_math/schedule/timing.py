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
HOST_TIE = 0.2  # where the host's part decides: corrected, it still differed by 17 and 25 % between five runs on an H200's host
MOST_NOISE = 0.5  # beyond this a measurement is too noisy to call everything a tie
FEWEST, MOST = 7, 60  # rounds


class Timing(NamedTuple):
    """Median time of a call [us], of its host part [us], and the relative half-width of the median's 95 % interval.

    `us` is the larger of device and host: what a call costs where nothing else hides it. On a GPU the host's part is corrected for how busy
    the host is just then (see `Stopwatch`).
    """

    us: float
    host_us: float
    noise: float
    on_host: bool = False  # whether the host's part is the larger; never on a CPU, where there is no other


class Stopwatch:
    """Takes the time of single calls on one device.

    On a GPU device time is between two events around the call, and the flush before them keeps the device busy while the host prepares
    the call, so that the gap between launches does not count; host time stands beside it. The flush is one launch as well, whose host time
    is taken each time: the machine's other work makes all launches slower alike, by a factor of two between one calibration and the next,
    and what a call takes is therefore counted in such launches.

    Args:
        device: where calls run.
        launch_us: host time [us] of such a launch in a busy queue, from the device's ceilings; without it host times stay as they are.
    """

    def __init__(self, device: torch.device, launch_us: float | None = None) -> None:
        self.device, self._launch_us = device, launch_us
        self._scratch = torch.zeros(FLUSHED[device.type] // 4, device=device)
        self._launches: list[float] = []

    def host_scale(self) -> float:
        """What host times are to be multiplied by."""
        return self._launch_us / statistics.median(self._launches) if self._launch_us and self._launches else 1.0

    def sample(self, call: Callable[[], Any]) -> tuple[float, float]:
        """(time [us], host time [us]) of one call with cold caches."""
        start = time.perf_counter()
        self._scratch.add_(1.0)
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            us = (time.perf_counter() - start) * 1e6
            return us, us
        self._launches.append((time.perf_counter() - start) * 1e6)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        start = time.perf_counter()
        call()
        host = (time.perf_counter() - start) * 1e6
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3, host


def summary(samples: Sequence[tuple[float, float]], host_scale: float = 1.0) -> Timing:
    """Median and noise of samples, whose host times are multiplied by `host_scale`."""
    hosts = [host * host_scale for _, host in samples]
    costs = [max(us, host) for (us, _), host in zip(samples, hosts, strict=True)]
    middle = statistics.median(costs)
    spread = 1.4826 * statistics.median(abs(c - middle) for c in costs)  # the standard deviation, were they normal
    noise = 1.96 * 1.2533 * spread / math.sqrt(len(costs)) / middle if middle else 0.0
    host = statistics.median(hosts)
    return Timing(middle, host, noise, host > statistics.median(us for us, _ in samples))


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
    scale = watch.host_scale()
    return {name: summary(taken, scale) for name, taken in samples.items() if name not in failed and taken}, failed


def tied(a: Timing, b: Timing) -> bool:
    """Whether two timings cannot be told apart."""
    least = HOST_TIE if a.on_host or b.on_host else TIE
    return abs(a.us - b.us) <= max(least, min(a.noise + b.noise, MOST_NOISE)) * min(a.us, b.us)


def decide(timings: Mapping[str, Timing], incumbent: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The winner, and those that tie with it. `timings` are in order of preference.

    The incumbent stays unless one is clearly faster; without one, the first listed of those that tie with the fastest wins.
    """
    fastest = min(timings, key=lambda name: timings[name].us)
    level = [name for name in timings if tied(timings[name], timings[fastest])]
    winner = incumbent if incumbent in level else level[0]
    return winner, tuple(name for name in level if name != winner)
