"""Measures one call: every subject checked, then timed in turns with the others, phase by phase."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ops_math import backends, catalog, checks
from ops_math.cli.bench import calls, rivals
from ops_math.cli.bench.clock import Clock, Sample, Timed, race
from ops_math.cli.bench.rivals import OURS, TORCH, Subject, called
from ops_math.cli.bench.spread import spread
from ops_math.dispatch import choice_name
from ops_math.schedule.accuracy import Oracle, coarse_oracle, conditioned, nudged, oracle_of, verdict
from ops_math.schedule.trial import in_words
from ops_math.spec import DTYPE_OF, Call
from ops_math.testing.capture import watch
from ops_math.testing.inputs import as_leaves

COPY, PRODUCT = "copy_", "product"
CLOCK = "the clock"
PLAIN = "plain PyTorch"  # where a call of ours meets no operator of ours
CEILINGS = (COPY, PRODUCT)
PRODUCT_WIDTH = 8192
LEAST_COPY = 1 << 12  # numbers


class Work(NamedTuple):
    """What a phase must move [B] and compute at least, and which implementation of ours does it."""

    bytes: int
    products: int
    implementation: str


class Plan(NamedTuple):
    """One call to measure. `dtype` is a short name; `names` are the rivals, `compiled` adds ours under torch.compile."""

    function: str
    shape: str
    keywords: dict[str, Any]
    dtype: str
    device: torch.device
    names: tuple[str, ...]
    compiled: bool = False

    @property
    def label(self) -> str:
        """`rms_norm 16384x4096 bf16`."""
        return f"{self.function} {calls.label(self.shape, self.keywords)} {self.dtype}"


class Measured(NamedTuple):
    """A phase of a plan in one session: samples by subject (on a GPU `copy_` or `product` among them), and what had to be done."""

    phase: str
    samples: dict[str, list[Sample]]
    work: Work


class Outcome(NamedTuple):
    """All sessions of a plan.

    Attributes:
        plan: what was measured.
        measured: by phase, a list of sessions.
        missing: why a rival was not measured.
        failed: why a subject dropped out: it raised.
        wrong: what is wrong with a subject's numbers; it was timed all the same.
        checked: what numbers were held to, in words.
        first_s: seconds that each subject's first call took, compilation included.
    """

    plan: Plan
    measured: dict[str, list[Measured]]
    missing: dict[str, str]
    failed: dict[str, str]
    wrong: dict[str, str]
    checked: str
    first_s: dict[str, float]


class Ready:
    """One subject with its arguments: calls of each phase, and results of one run."""

    def __init__(self, subject: Subject, call: Call, frozen: Sequence[int | str], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.subject = subject
        self.call, leaves = as_leaves(call, frozen, change)
        self.leaves = list(leaves.values())
        self.forward = called(subject, functools.partial(subject.fn, *self.call.args, **self.call.kwargs))

    def outputs(self, out: Any) -> list[torch.Tensor]:
        """The outputs that a gradient goes into."""
        return [o for o in (out if isinstance(out, tuple | list) else (out,)) if isinstance(o, torch.Tensor) and o.requires_grad]

    def backward(self, outs: list[torch.Tensor], fed: list[torch.Tensor] | None) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the leaves."""
        return called(self.subject, torch.autograd.grad)(outs, self.leaves, fed, allow_unused=True)

    def once(self, fed: list[torch.Tensor] | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One run: the outputs' gradients that were fed back, and outputs and gradients of the inputs."""
        outs = self.outputs(self.forward())
        fed = [torch.randn_like(o) for o in outs] if fed is None else [f.to(o.dtype) for f, o in zip(fed, outs, strict=True)]
        grads = self.backward(outs, fed)
        found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, self.leaves, strict=True)]
        return fed, [o.detach().clone() for o in outs] + found

    def phase(self, phase: str) -> Timed:
        """What is timed."""
        if phase == "fwd":
            return Timed(lambda _: self.forward())
        if phase == "both":
            return Timed(lambda _: self.backward(self.outputs(self.forward()), None))
        fed = [torch.randn_like(o) for o in self.outputs(self.forward())]
        return Timed(lambda outs: self.backward(outs, fed), lambda: self.outputs(self.forward()))


def same(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    return t


def ready(subject: Subject, plan: Plan, call: Call) -> Ready:
    """A subject with its arguments: the common ones, or copies where it may write into them."""
    return Ready(subject, call, calls.CALLS[plan.function].frozen, torch.clone if subject.own_inputs else same)


def work_of(plan: Plan, call: Call) -> dict[str, Work]:
    """What each phase must do, from the problems that our operators meet."""
    ours = ready(Subject(OURS, catalog.public_functions()[plan.function].public[plan.function]), plan, call)
    outs: list[torch.Tensor] = []
    seen = {"fwd": watch(lambda: outs.extend(ours.outputs(ours.forward()))).calls}
    seen["bwd"] = watch(lambda: torch.autograd.grad(outs, ours.leaves, [torch.ones_like(o) for o in outs], allow_unused=True)).calls
    seen["both"] = seen["fwd"] + seen["bwd"]
    device, operators, found = backends.device_of(plan.device), catalog.operators(), {}
    for phase, made in seen.items():
        posed = [(operators[c.operator], c.phase, operators[c.operator].phases[c.phase].problem_of(*c.args)) for c in made]
        costs = [operator.cost(problem, name) for operator, name, problem in posed]
        names = dict.fromkeys(choice_name(operator.choice(problem, name, device)) for operator, name, problem in posed)
        products = sum(count for cost in costs for term, count in cost.flops if "product" in term)
        found[phase] = Work(sum(cost.bytes for cost in costs), products, "+".join(names) or PLAIN)
    return found


def ceiling(plan: Plan, work: Work) -> tuple[str, Callable[[], Any]]:
    """What bounds a phase on this device: a copy of as many bytes, or a matrix product."""
    dtype = DTYPE_OF[plan.dtype]
    if work.products:
        a = torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, device=plan.device).to(dtype)
        return PRODUCT, functools.partial(torch.mm, a, a)
    source = torch.ones(max(work.bytes // 2 // dtype.itemsize, LEAST_COPY), device=plan.device, dtype=dtype)
    return COPY, functools.partial(torch.empty_like(source).copy_, source)


def repeated(call: Callable[[], Any]) -> Timed:
    """A call that needs no preparation."""
    return Timed(lambda _: call())


def oracle(plan: Plan, call: Call, plain: Subject) -> tuple[list[torch.Tensor], Oracle]:
    """The gradients that are fed back, and what numbers are held to: plain PyTorch in float64, or in its own dtype for want of memory."""
    fed, yardstick = ready(plain, plan, call).once()
    frozen, narrow = calls.CALLS[plan.function].frozen, DTYPE_OF[plan.dtype].itemsize == 2
    try:
        wide, moved = (Ready(plain, call, frozen, change).once(fed)[1] for change in (torch.Tensor.double, _nudged))
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        free(plan.device)
        return fed, coarse_oracle(yardstick, "plain PyTorch in the same dtype", narrow)
    return fed, conditioned(oracle_of(wide, yardstick, "plain PyTorch in fp64", narrow), moved)


def _nudged(t: torch.Tensor) -> torch.Tensor:
    """In float64, moved by as much as fp32 cannot tell."""
    return cast(torch.Tensor, nudged([t])[0])


def measure(plan: Plan, clock: Clock, seconds: float, sessions: int, progress: Callable[[str], None] = lambda words: None) -> Outcome:
    """Check every subject of a plan, then time each phase in turns.

    Args:
        plan: the call.
        clock: of the plan's device.
        seconds: for each phase and session [s].
        sessions: how often inputs are drawn and subjects set up anew.
        progress: is told in a few words what is being done.
    """
    entry = calls.CALLS[plan.function]
    if plan.compiled or "compile" in plan.names:
        torch.compiler.reset()  # after eight shapes of one function the compiler gives up on it and runs it eagerly, without a word
    everyone, missing = rivals.subjects(plan.function, plan.names, plan.compiled)
    outcome = Outcome(plan, {phase: [] for phase in entry.phases}, missing, {}, {}, "", {})
    try:
        call = calls.call_of(plan.function, plan.shape, plan.dtype, plan.device, plan.keywords)
        work = work_of(plan, call)
    except TypeError as error:
        checks.fail("bench", "--with", f"a keyword of {plan.function}", str(error), "See its page in the documentation.")
    except RuntimeError as error:
        outcome.failed[OURS] = in_words(error)  # it fails the command, and the other calls are still measured
        free(plan.device)
        return outcome._replace(measured={})
    progress("numbers")
    words = _check(plan, call, everyone, outcome)
    for session in range(sessions):
        call = calls.call_of(plan.function, plan.shape, plan.dtype, plan.device, plan.keywords) if session else call
        able = [subject for subject in everyone if subject.name not in outcome.failed]
        for phase in entry.phases:
            progress(f"{phase} {session + 1}/{sessions}")
            try:
                measured = _session(plan, call, able, phase, work[phase], clock, seconds, outcome.failed)
            except checks.UnsupportedError as error:
                outcome.failed[CLOCK] = f"{phase}: {error}"
                measured = Measured(phase, {}, work[phase])
            outcome.measured[phase].append(measured)
            free(plan.device)
    return outcome._replace(checked=words)


def _check(plan: Plan, call: Call, everyone: list[Subject], outcome: Outcome) -> str:
    """Run every subject once: who raises drops out, and what is wrong with whose numbers is kept."""
    fed, held, words = None, None, "a draw, not compared"
    if not calls.CALLS[plan.function].random:
        try:
            fed, held = oracle(plan, call, next(subject for subject in everyone if subject.name == TORCH))
            words = held.words
        except Exception as error:  # noqa: BLE001 (plain PyTorch may fail like any rival; that nothing was compared is said in each row)
            words = f"not compared: plain PyTorch failed, {in_words(error)}"
            free(plan.device)
    for subject in everyone:
        start = time.perf_counter()
        try:
            _, results = ready(subject, plan, call).once(fed)
        except Exception as error:  # noqa: BLE001 (a rival may raise anything; it is named in the table, and ours fails the command)
            outcome.failed[subject.name] = in_words(error)
            free(plan.device)
            continue
        outcome.first_s[subject.name] = round(time.perf_counter() - start, 3)
        bad = None if held is None else verdict(results, held)
        if bad is not None:
            outcome.wrong[subject.name] = bad
    free(plan.device)
    return words


def _session(
    plan: Plan, call: Call, able: list[Subject], phase: str, work: Work, clock: Clock, seconds: float, failed: dict[str, str]
) -> Measured:
    """One phase of all subjects in turns, on a GPU with the ceiling among them."""
    timed: dict[str, Timed] = {}
    for subject in able:
        try:
            run = ready(subject, plan, call).phase(phase)
            for _ in range(2):
                run.run(run.prepare())
        except Exception as error:  # noqa: BLE001 (as above: named, and left out)
            failed[subject.name] = f"{phase}: {in_words(error)}"
            free(plan.device)
            continue
        timed[subject.name] = run
    if plan.device.type != "cpu":  # there only ratios to plain PyTorch are worth something
        name, bound = ceiling(plan, work)
        bound()
        timed[name] = repeated(bound)
    return Measured(phase, race(timed, clock, seconds), work)


def free(device: torch.device) -> None:
    """Give a GPU's memory back."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def ratios(measured: Measured, of: str, to: str, host: bool = False) -> list[float]:
    """Times of one subject over another's, visit by visit."""
    pairs = zip(measured.samples[of], measured.samples[to], strict=True)
    return [(a.host_us / b.host_us if host else a.us / b.us) for a, b in pairs]


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """A row for each phase and subject, as `benchmarks/results` keeps them. On a CPU there are ratios to plain PyTorch and no times."""
    return [_row(outcome, sessions, name) for sessions in outcome.measured.values() for name in _timed(sessions) if name not in CEILINGS]


def _timed(sessions: list[Measured]) -> list[str]:
    """Subjects that every session has."""
    return [name for name in sessions[0].samples if all(name in one.samples for one in sessions)] if sessions else []


def _row(outcome: Outcome, sessions: list[Measured], name: str) -> dict[str, Any]:
    plan, work = outcome.plan, sessions[0].work
    row: dict[str, Any] = {
        "benchmark": "operator", "op": plan.function, "shape": calls.label(plan.shape, plan.keywords), "dtype": plan.dtype,
        "phase": sessions[0].phase, "variant": name, "implementation": work.implementation if name == OURS else None,
        "visits": sum(len(one.samples[name]) for one in sessions), "sessions": len(sessions),
        "first_call_s": outcome.first_s.get(name), "wrong": outcome.wrong.get(name), "checked_against": outcome.checked,
    }  # fmt: skip
    if TORCH in _timed(sessions):
        to_torch = spread([ratio for one in sessions for ratio in ratios(one, name, TORCH)])
        row |= {"ratio_to_torch": round(to_torch.middle, 4), "noise": round(to_torch.noise, 4)}
    if plan.device.type == "cpu":
        return row
    bound = next(one for one in CEILINGS if one in sessions[0].samples)
    us = statistics.median(sample.us for one in sessions for sample in one.samples[name])
    over = statistics.median(ratio for one in sessions for ratio in ratios(one, name, bound))
    row |= {"kernel_us": us, "host_us": statistics.median(sample.host_us for one in sessions for sample in one.samples[name])}
    if not (work.bytes or work.products):
        return row  # least traffic is known of our operators only
    if bound == COPY:
        return row | {"gbs": work.bytes / us / 1e3, "bytes": work.bytes, "share": 1 / over}
    return row | {"tflops": work.products / us / 1e6, "share": work.products / (2 * PRODUCT_WIDTH**3) / over}


def kept(outcome: Outcome, facts: dict[str, Any]) -> dict[str, Any]:
    """What a baseline keeps of our own rows: ratios to a peer in the same run, by session.

    On a GPU the peer of kernel time is the copy or product, and that of host time plain PyTorch; on a CPU it is plain PyTorch.
    """
    found = {}
    for phase, sessions in outcome.measured.items():
        names = _timed(sessions)
        for name in names:
            if not name.startswith(OURS):
                continue
            metrics = {}
            on_cpu = outcome.plan.device.type == "cpu"
            peers = {"time": TORCH} if on_cpu else {"kernel time": next(c for c in CEILINGS if c in names), "host time": TORCH}
            for metric, peer in peers.items():
                if peer in names:
                    metrics[f"{metric} over that of {peer}"] = [
                        [round(r, 5) for r in ratios(one, name, peer, metric == "host time")] for one in sessions
                    ]
            key = f"{outcome.plan.label} {phase} {name}"
            found[key] = {"op": outcome.plan.function, "call": outcome.plan.label, "metrics": metrics, "facts": facts}
    return found


def most_numbers(device: torch.device, dtype: str) -> int:
    """How many rows times columns a random shape may have: a sixty-fourth of the free memory, since several subjects hold about as many
    tensors; on a CPU 4 Mi, which takes milliseconds."""
    if device.type == "cpu":
        return 1 << 22
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return max(1, math.floor(free_bytes / 64 / DTYPE_OF[dtype].itemsize))
