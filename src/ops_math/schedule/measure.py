"""Measures one call: every candidate with its configurations, right before fast, within a budget of time.

PyTorch's own implementation is tried first and always timed to the end, so a measured choice is not slower than it beyond noise.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ops_math import backends, settings
from ops_math.schedule import accuracy
from ops_math.schedule.ceilings import synchronize
from ops_math.schedule.choose import Able, configurations, on_request, reason_against, sort_candidates
from ops_math.schedule.identity import source_of
from ops_math.schedule.levels import Levels, chosen_for
from ops_math.schedule.live import Operator, record_for
from ops_math.schedule.record import Measurement, Record, bucket, label, policy_text
from ops_math.schedule.timing import Stopwatch, Timing, decide, interleave, summary
from ops_math.schedule.trial import CandidateFailedError, NotMeasuredError, Trial
from ops_math.settings import Policy
from ops_math.spec import Implementation

SLOWER = 10.0  # a candidate predicted this many times slower than the best is not tried, unless it is PyTorch's own
FINALISTS = 6
NEAR = 1.5  # finalists are within this of the fastest first impression
FINEST = "eager in fp64"
IMPRESSION = 3  # samples of it
TRIALS_SHARE = 0.6  # of the budget may go into first impressions of further configurations


class Limits(NamedTuple):
    """How much measuring one call may take: `seconds` in all (compilation and the oracle not counted), `trial_seconds` for one run of a
    candidate, compilation included, and `memory_gib` beyond a candidate's results on a GPU (None: what there is). `why_not_compiled`
    says why candidates that compile C++ for seconds are not tried, and is empty where they are."""

    seconds: float = 2.0
    trial_seconds: float = 30.0
    memory_gib: float | None = None
    why_not_compiled: str = ""


class Pair(NamedTuple):
    """A candidate with one configuration."""

    name: str
    candidate: Implementation
    config: Any


class Bench:
    """One call on its device: arguments, candidates, and the thread that they run on."""

    def __init__(self, operator: Operator, phase: str, args: Sequence[Any], limits: Limits, policy: Policy) -> None:
        self.operator, self.phase, self.args, self.limits, self.policy = operator, phase, list(args), limits, policy
        entered = operator.phases[phase]
        self.problem, self.problem_of, self.num_tensors = entered.problem_of(*args), entered.problem_of, entered.num_tensors
        self.levels: Levels | None = operator.implementations()[0].levels
        self.stands_for = chosen_for(self.levels, self.problem, policy.determinism, policy.token_block)
        self.torch_device = args[0].device
        self.device = backends.device_of(self.torch_device)
        self.room: accuracy.Oracle | None = None
        self.trial = Trial(self.torch_device)
        synchronize(self.torch_device)  # the trial's thread has a stream of its own, and the arguments must be there

    def launcher(self, pair: Pair) -> Callable[..., Any]:
        """What a step would call: from level 2 on piece by piece where the promise needs it."""
        launcher = pair.candidate.launcher(self.phase)
        if self.policy.determinism < 2 or self.levels is None:
            return launcher
        return self.levels.launcher(pair.candidate.name, self.phase, launcher, self.policy.token_block)

    def launch(self, pair: Pair) -> tuple[torch.Tensor, ...]:
        """Run a candidate once, as a step would."""
        return self.run(self.launcher(pair), pair.config)

    def plainly(self, pair: Pair, problem: Any = None, args: Sequence[Any] | None = None) -> tuple[torch.Tensor, ...]:
        """Run one for what its results show, whatever the level."""
        return self.run(pair.candidate.launcher(self.phase), pair.config, problem, args)

    def run(
        self, launcher: Callable[..., Any], config: Any, problem: Any = None, args: Sequence[Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Call a launcher; an operator that writes in place gets a copy to write into."""
        given = list(self.args if args is None else args)
        if self.phase == "inplace":
            given[0] = given[0].clone()
        returned = launcher(self.problem if problem is None else problem, config, *given[: self.num_tensors])
        return accuracy.as_results(returned, given)

    def call(self, pair: Pair) -> Callable[[], Any]:
        """What is timed: the launcher alone."""
        given = self.args[: self.num_tensors]
        if self.phase == "inplace":
            given = [given[0].clone(), *given[1:]]
        return functools.partial(self.launcher(pair), self.problem, pair.config, *given)

    def oracle(self, able: list[Able]) -> accuracy.Oracle:
        """What results are held to: `eager` in float64, in float32 where that does not fit, else PyTorch's own in the same dtype."""
        eager = next((i for i in self.operator.implementations() if i.name == "eager"), None)
        if eager is not None and reason_against(eager, self.problem, self.device, self.phase, 0) is not None:
            eager = None  # what it promises of its bits does not matter here
        failed: list[str] = []
        if eager is not None:
            config = configurations(eager, self.problem, self.device, self.phase, 0)[0]
            for dtype, name in ((torch.float64, "fp64"), (torch.float32, "fp32")):
                wide = accuracy.widened(self.args, dtype)
                problem = self.problem_of(*wide)
                if problem == self.problem and dtype != torch.float64:
                    continue
                try:
                    widest = Pair("eager", eager, configurations(eager, problem, self.device, self.phase, 0)[0])
                    results = self.trial.run(functools.partial(self.plainly, widest, problem, wide), self.limits.trial_seconds)
                    yardstick = self.trial.run(functools.partial(self.plainly, Pair("eager", eager, config)), self.limits.trial_seconds)
                    return accuracy.oracle_of(results, yardstick, f"eager in {name}", accuracy.is_narrow(self.args))
                except CandidateFailedError as error:
                    failed.append(f"eager in {name} {error}")  # narrower, then coarser; the oracle's name tells which it was
        for pair in self.pairs(sorted(able, key=lambda one: not _from_pytorch(one, able)))[:2]:
            try:
                results = self.trial.run(functools.partial(self.launch, pair), self.limits.trial_seconds)
                return accuracy.coarse_oracle(results, f"{pair.name} in the same dtype", accuracy.is_narrow(self.args))
            except CandidateFailedError as error:
                failed.append(f"{pair.name} {error}")
        raise NotMeasuredError("nothing could be run that results could be held to: " + "; ".join(failed))

    def conditioned(self, oracle: accuracy.Oracle) -> accuracy.Oracle:
        """The oracle with room for the problem's conditioning, worked out when a candidate first needs it; only in float64."""
        if self.room is None:
            self.room = oracle
            eager = next((i for i in self.operator.implementations() if i.name == "eager"), None)
            if eager is not None and oracle.words == FINEST:
                args = accuracy.nudged(self.args)
                problem = self.problem_of(*args)
                pair = Pair("eager", eager, configurations(eager, problem, self.device, self.phase, 0)[0])
                self.room = accuracy.conditioned(oracle, self.plainly(pair, problem, args))
        return self.room

    def pairs(self, able: Sequence[Able]) -> list[Pair]:
        """The first configuration of each, then the others."""
        listed = [
            (one.candidate, configurations(one.candidate, self.stands_for, self.device, self.phase, self.policy.determinism))
            for one in able
        ]
        deepest = max((len(configs) for _, configs in listed), default=0)
        return [Pair(label(c.name, cs[n]), c, cs[n]) for n in range(deepest) for c, cs in listed if n < len(cs)]


def _from_pytorch(one: Able, able: Sequence[Able]) -> bool:
    """Whether it is PyTorch's own: its native operator, or plain functions where it has none."""
    names = {other.candidate.name for other in able}
    return one.candidate.name == ("vendor" if "vendor" in names else "eager")


def worth_trying(able: Sequence[Able]) -> tuple[list[Able], dict[str, str]]:
    """PyTorch's own first, then the others that are not predicted to be far slower, and why the rest is left out."""
    best = min(one.predicted_us for one in able)
    own = [one for one in able if _from_pytorch(one, able)]
    others = [one for one in able if not _from_pytorch(one, able) and one.predicted_us <= SLOWER * best]
    left = [one for one in able if one not in own and one not in others]
    return own + others, {
        one.candidate.name: f"not tried: predicted {one.predicted_us / best:.0f} times slower than the best" for one in left
    }


def measure(
    operator: Operator,
    phase: str,
    args: Sequence[Any],
    *,
    limits: Limits | None = None,
    policy: Policy | None = None,
    record: Record | None = None,
    progress: Callable[[str], None] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Measurement:
    """Time the candidates of one call on its device, each checked before it is timed.

    Args:
        operator: the catalogue entry.
        phase: `fwd`, `bwd` or `inplace`.
        args: the arguments of the dispatcher operator, tensors on the device; they are not changed.
        limits: time [s] and memory [GiB]; by default 2 s.
        policy: by default the one in force. Nothing that was forced counts. From determinism level 2 on candidates are those of the level,
            run as it runs them, and the measurement is of the problem that the choice is made for, which has no rows of its own.
        record: whose ceilings predict, and whose winner is the incumbent; by default the process's own.
        progress: is told in a few words what is being done.
        left_out: labels of candidates that are not to be run, with the reason.

    Returns: the measurement; it is not recorded.

    Raises: NotMeasuredError where fewer than one candidate can be timed; DeviceHungError where the device stops answering.
    """
    limits = limits or Limits()
    policy = (policy or settings.policy()._replace(determinism=settings.determinism_level()))._replace(forced=())
    bench = Bench(operator, phase, args, limits, policy)
    record = record_for(bench.device) if record is None else record
    posed = bench.stands_for
    dtype = operator.file("problem").storage(posed)
    cost = operator.cost(posed, phase)
    able, _ = sort_candidates(operator.implementations(), posed, cost, phase, record.on(bench.device, dtype), policy)
    if not able:
        raise NotMeasuredError("no implementation can run it")
    tried, refused = worth_trying(able)
    refused |= left_out or {}
    if limits.why_not_compiled:
        refused |= {pair.name: limits.why_not_compiled for pair in bench.pairs([one for one in tried if on_request(one.candidate)])}
    say = progress or (lambda words: None)
    try:
        with torch.no_grad():
            say("oracle")
            oracle = bench.oracle(able)
            watch = Stopwatch(bench.torch_device, record.on(bench.device, dtype).launch_us)
            first = _first_impressions(bench, tried, oracle, watch, refused, say)
            own = {pair.name for pair in bench.pairs([one for one in tried if _from_pytorch(one, able)])}
            finals = _final(bench, first, own, watch, refused, say)
    finally:
        bench.trial.close()
    if not finals:
        raise NotMeasuredError("; ".join(f"{name}: {why}" for name, why in refused.items()))
    before, exactly = record.measurement(operator.name, phase, dtype, policy, posed)
    preferred = [pair.name for one in able for pair in bench.pairs([one])]
    winner, ties = decide({n: finals[n] for n in preferred if n in finals}, before.winner if before is not None and exactly else None)
    taken = {n: finals[n] if n in finals else first[n][1] for n in preferred if n in first and n not in refused}
    return Measurement(
        operator.name, phase, str(posed), bucket(posed), dtype, policy_text(policy), source_of(able[0].candidate),
        {name: round(t.us, 2) for name, t in taken.items()}, {name: round(t.noise, 4) for name, t in taken.items()},
        {name: round(t.host_us, 2) for name, t in taken.items()}, winner, ties, refused, oracle.words,
        datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
    )  # fmt: skip


def _first_impressions(
    bench: Bench, tried: list[Able], oracle: accuracy.Oracle, watch: Stopwatch, refused: dict[str, str], say: Callable[[str], None]
) -> dict[str, tuple[Pair, Timing]]:
    """Check every candidate's numbers and take its time roughly; further configurations only while there is time."""
    found: dict[str, tuple[Pair, Timing]] = {}
    seen: set[str] = set()
    spent = 0.0
    for pair in bench.pairs(tried):
        if pair.name in refused or (pair.candidate.name in seen and spent > TRIALS_SHARE * bench.limits.seconds):
            continue
        seen.add(pair.candidate.name)
        say(pair.name)
        try:
            bad = bench.trial.run(functools.partial(_checked, bench, pair, oracle), bench.limits.trial_seconds)
            if bad is not None:
                refused[pair.name] = bad
                continue
            start = time.perf_counter()
            call = bench.call(pair)
            taken = [bench.trial.run(functools.partial(watch.sample, call), bench.limits.trial_seconds) for _ in range(IMPRESSION)]
            spent += time.perf_counter() - start
        except CandidateFailedError as error:
            refused[pair.name] = str(error)
            if bench.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        found[pair.name] = pair, summary(taken, watch.host_scale())
    return found


def _checked(bench: Bench, pair: Pair, oracle: accuracy.Oracle) -> str | None:
    """Run a candidate once; what is wrong with its numbers or its use of memory, or None."""
    limit = bench.limits.memory_gib
    watched = bench.torch_device.type == "cuda" and limit is not None
    if watched:
        torch.cuda.reset_peak_memory_stats(bench.torch_device)
        base = torch.cuda.memory_allocated(bench.torch_device)
    results = bench.launch(pair)
    if watched and limit is not None:
        own = sum(r.numel() * r.element_size() for r in results)
        extra = (torch.cuda.max_memory_allocated(bench.torch_device) - base - own) / 2**30
        if extra > limit:
            return f"takes {extra:.2f} GiB beyond its results, and {limit:g} are allowed"
    bad = accuracy.verdict(results, oracle)
    return bad if bad is None else accuracy.verdict(results, bench.conditioned(oracle))


def _final(
    bench: Bench,
    first: dict[str, tuple[Pair, Timing]],
    always: set[str],
    watch: Stopwatch,
    refused: dict[str, str],
    say: Callable[[str], None],
) -> dict[str, Timing]:
    """Time the best against each other in turns, PyTorch's own among them; only they can win."""
    if not first:
        return {}
    order = sorted(first, key=lambda name: first[name][1].us)
    finalists = [name for name in order if first[name][1].us <= NEAR * first[order[0]][1].us][:FINALISTS]
    calls = {name: bench.call(first[name][0]) for name in dict.fromkeys(finalists + [name for name in order if name in always][:1])}
    say(f"{len(calls)} in turns")
    timings, failed = interleave(calls, bench.trial, watch, (1 - TRIALS_SHARE) * bench.limits.seconds, bench.limits.trial_seconds)
    refused.update(failed)
    return timings
