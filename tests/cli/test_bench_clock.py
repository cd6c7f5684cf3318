"""Turns, kernel time by visit, and the GPU's clock on a profiler that is made up."""

import re
import statistics

import pytest
import torch

from ops_math import checks
from ops_math.cli.bench import clock
from ops_math.cli.bench.clock import Event, Sample, Timed


def test_turns_are_a_b_c_c_b_a():
    assert "".join(clock.turns("ABC", 4)) == "ABCCBAABCCBA"


class Constant:
    """A millisecond each."""

    fixed_s = 0.0

    def __init__(self):
        self.orders = []

    def take(self, calls, order):
        self.orders.append(list(order))
        return [Sample(1000.0, 1.0)] * len(order)


@pytest.mark.parametrize(("seconds", "visits"), [(0.0, clock.FEWEST), (0.03001, 10), (1e9, clock.MOST)])
def test_a_race_takes_as_many_visits_as_the_time_allows_and_never_fewer_than_seven(seconds, visits, monkeypatch):
    monkeypatch.setattr(clock.time, "perf_counter", lambda: 0.0)
    constant = Constant()
    found = clock.race({name: Timed(lambda _: None) for name in "ABC"}, constant, seconds)
    assert {len(samples) for samples in found.values()} == {visits}
    assert constant.orders[1][:6] == list("ABCCBA")


def test_what_a_profile_costs_takes_no_visits_away(monkeypatch):
    slow = Constant()
    slow.fixed_s = 0.05
    seconds = iter([0.0, 0.053])
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(seconds))
    found = clock.race({name: Timed(lambda _: None) for name in "ABC"}, slow, 0.12)
    assert 39 <= len(found["A"]) <= 40


def test_the_cpu_clock_prepares_every_visit_anew_and_does_not_time_it():
    made = []

    def prepare():
        made.append(torch.ones(1 << 20).exp())
        return len(made)

    seen = []
    samples = clock.CpuClock(torch.device("cpu")).take({"A": Timed(seen.append, prepare)}, ["A"] * 9)
    assert seen == list(range(1, 10))
    assert statistics.median(sample.us for sample in samples) < 500, "an append takes a microsecond, the exponentials a thousand"


def event(start, end, name="k"):
    return Event(start, end, name)


def test_kernel_time_is_what_runs_between_two_marks_and_what_overlaps_counts_once():
    events = [event(0, 10, "mark"), event(11, 15), event(13, 17), event(20, 21), event(21, 22, "mark")]
    events += [event(23, 29, "prepare"), event(30, 40, "mark"), event(41, 42), event(42, 43, "mark")]
    assert clock.split(events, ["mark"], 2) == [7.0, 1.0]


def test_a_profile_that_lost_marks_is_refused_and_not_misread():
    words = "bench: kernel times: the profile has 3 marks where 4 were made."
    with pytest.raises(checks.UnsupportedError, match=re.escape(words)):
        clock.split([event(0, 1, "mark"), event(2, 3, "mark"), event(4, 5, "mark")], ["mark"], 2)


class NoGpu(clock.GpuClock):
    """The GPU's clock on a CPU: kernels are entries of a list, and the profiler reads that list."""

    def __init__(self, monkeypatch):
        self.now, self.ran = 0.0, []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setitem(clock.FLUSHED, "cuda", 1 << 14)
        super().__init__(torch.device("cpu"))

    def kernel(self, name, us):
        self.ran.append(Event(self.now, self.now + us, name))
        self.now += us + 1.0

    def _profiled(self, work):
        before = len(self.ran)
        original = torch.Tensor.bitwise_xor_
        torch.Tensor.bitwise_xor_ = lambda tensor, other: self.kernel("xor" if tensor is self._scratch else "xor of few", 40.0)
        try:
            work()
        finally:
            torch.Tensor.bitwise_xor_ = original
        return self.ran[before:]


def test_the_gpu_clock_gives_each_visit_its_own_kernels_without_flush_and_preparation(monkeypatch):
    gpu = NoGpu(monkeypatch)
    calls = {
        "A": Timed(lambda _: gpu.kernel("a", 5.0)),
        "B": Timed(lambda _: [gpu.kernel("b1", 3.0), gpu.kernel("b2", 4.0)], lambda: gpu.kernel("forward", 100.0)),
    }
    samples = gpu.take(calls, ["A", "B", "B", "A"])
    assert [sample.us for sample in samples] == [5.0, 7.0, 7.0, 5.0]
    assert all(sample.host_us > 0 for sample in samples)


def test_a_call_that_starts_the_marking_kernel_itself_is_refused(monkeypatch):
    gpu = NoGpu(monkeypatch)
    with pytest.raises(checks.UnsupportedError, match="the profile has 3 marks where 2 were made"):
        gpu.take({"A": Timed(lambda _: gpu.kernel("xor", 1.0))}, ["A"])


def test_a_profiler_that_sees_nothing_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(NoGpu, "_profiled", lambda self, work: [])
    with pytest.raises(checks.UnsupportedError, match="the profiler saw 0 kinds of kernel where one or two ran"):
        NoGpu(monkeypatch)
