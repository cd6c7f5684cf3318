"""Times calls in turns: A B C, C B A, ..., caches cold. On a GPU a call's time is that of its kernels, from the profiler, and its host
time stands beside it."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ops_math import checks
from ops_math.schedule.timing import FLUSHED, Stopwatch

FEWEST, MOST = 7, 60  # visits of each call


class Timed(NamedTuple):
    """A call to time: `run` is given what `prepare` returns, which is made anew for every visit and does not count."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


Calls = Mapping[str, Timed]


class Sample(NamedTuple):
    """One visit: time [us] of the kernels (on a CPU of the call), and of its host part [us]."""

    us: float
    host_us: float


class Clock(Protocol):
    """Takes the time of calls in the order in which they are named. Each time it is asked costs `fixed_s` [s] besides the calls."""

    fixed_s: float

    def take(self, calls: Calls, order: Sequence[str]) -> list[Sample]:
        """A sample for each name in the order."""
        ...


class CpuClock:
    """Wall time of a call."""

    fixed_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device)

    def take(self, calls: Calls, order: Sequence[str]) -> list[Sample]:
        """A sample for each name in the order."""
        return [Sample(*self._watch.sample(functools.partial(calls[name].run, calls[name].prepare()))) for name in order]


class GpuClock:
    """Kernel time from one profile of the whole order, host time from a run without the profiler, which slows the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = torch.zeros(FLUSHED["cuda"] // 4, device=device, dtype=torch.int32)
        self._end = self._scratch[: 1 << 10]
        self._marks = self._names_of_marks()
        start = time.perf_counter()
        self._profiled(self._flush)
        self.fixed_s = time.perf_counter() - start

    def _flush(self) -> None:
        """Write a buffer larger than the L2 cache. Its kernel, of a kind that no operator starts, marks where a visit begins and ends."""
        self._scratch.bitwise_xor_(1)

    def _profiled(self, work: Callable[[], None]) -> list[Event]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            work()
            torch.cuda.synchronize(self._device)
        on_device = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return sorted(Event(e.time_range.start, e.time_range.end, e.name) for e in on_device)

    def _finish(self) -> None:
        self._end.bitwise_xor_(1)

    def _names_of_marks(self) -> frozenset[str]:
        """What the two marks are called: one kernel, or two where PyTorch has another for few elements."""
        self._flush()
        names = frozenset(event.name for mark in (self._flush, self._finish) for event in self._profiled(mark))
        if not 1 <= len(names) <= 2:
            words = f"the profiler saw {len(names)} kinds of kernel where one or two ran"
            checks.refuse("bench: kernel times", words, "See whether it is allowed to profile this GPU")
        return names

    def take(self, calls: Calls, order: Sequence[str]) -> list[Sample]:
        """A sample for each name in the order."""
        hosts = []
        for name in order:
            prepared = calls[name].prepare()
            self._flush()
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            calls[name].run(prepared)
            hosts.append((time.perf_counter() - start) * 1e6)
            del prepared

        def visit_all() -> None:
            for name in order:
                prepared = calls[name].prepare()
                self._flush()
                calls[name].run(prepared)
                torch.cuda.synchronize(self._device)
                self._finish()
                del prepared

        kernels = split(self._profiled(visit_all), self._marks, len(order))
        return [Sample(us, host) for us, host in zip(kernels, hosts, strict=True)]


class Event(NamedTuple):
    """Something that ran on the device: from when to when [us], and its name."""

    start: float
    end: float
    name: str


def split(events: Sequence[Event], marks: Collection[str], visits: int) -> list[float]:
    """Time [us] in which at least one kernel ran, visit by visit.

    Args:
        events: sorted by start.
        marks: names of the kernels that begin and end a visit; their own time does not count, nor what runs between visits.
        visits: how many there were.

    Raises: UnsupportedError where the profile has another number of them: it lost events, or a call starts such a kernel itself.
    """
    found: list[float] = []
    inside, seen, until = False, 0, 0.0
    for event in events:
        if event.name in marks:
            inside, seen, until = not inside, seen + 1, event.end
            found += [0.0] * inside
        elif inside:
            found[-1] += max(0.0, event.end - max(event.start, until))
            until = max(until, event.end)
    if seen != 2 * visits:
        words = f"the profile has {seen} marks where {2 * visits} were made"
        checks.refuse("bench: kernel times", words, "Give it fewer --seconds; a call that starts such a kernel itself cannot be timed")
    return found


def turns(names: Sequence[str], rounds: int) -> list[str]:
    """A B C C B A A B C ...: a drift of the clock meets all alike."""
    both = itertools.cycle([list(names), list(names)[::-1]])
    return [name for order in itertools.islice(both, rounds) for name in order]


def race(calls: Calls, clock: Clock, seconds: float) -> dict[str, list[Sample]]:
    """Samples of every call, taken in turns for about `seconds` [s], at least seven of each. The n-th samples of all belong together."""
    start = time.perf_counter()
    first = clock.take(calls, turns(list(calls), 1))
    spent = max(time.perf_counter() - start - clock.fixed_s, sum(sample.us for sample in first) / 1e6)
    rounds = min(max(int(seconds / spent) if spent else MOST, FEWEST), MOST)
    order = turns(list(calls), rounds)
    found: dict[str, list[Sample]] = {name: [] for name in calls}
    for name, sample in zip(order, clock.take(calls, order), strict=True):
        found[name].append(sample)
    return found


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return GpuClock(device) if device.type == "cuda" else CpuClock(device)
