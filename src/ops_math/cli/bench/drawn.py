"""Shapes nobody tuned for: memory-bound operators at sizes drawn from a seed, in the time that is given.

A shape and an operator are one visit of a few turns: forward and backward of ours and of each rival, and copies of as many bytes as each
phase must move, all in one profile. That is rougher than `ops-math bench --random`, and two hundred calls fit into minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ops_math import checks
from ops_math.cli.bench import calls, driver, rivals, standing
from ops_math.cli.bench.clock import Clock, Timed, turns
from ops_math.schedule.accuracy import coarse_oracle, verdict
from ops_math.schedule.trial import in_words

PHASES = ("fwd", "bwd")
ROUNDS = 5  # visits of each call
MOST = {"cpu": 1 << 18, "cuda": 1 << 29}  # rows times columns: beyond, numbers are checked for longer than they are timed
HELD_TO = "plain PyTorch in the same dtype"


class Drawn(NamedTuple):
    """What a run found: rows, how many calls were asked for and how many were reached, why a subject is missing or dropped out."""

    rows: list[dict[str, Any]]
    asked: int
    reached: int
    missing: dict[str, str]
    failed: dict[str, str]


def functions() -> list[str]:
    """Public functions of rows and columns: those that move bytes and multiply no matrices."""
    return [name for name, entry in calls.CALLS.items() if entry.takes_rows]


def plans(count: int, seed: int, device: torch.device, dtype: str, names: tuple[str, ...], wanted: Sequence[str]) -> list[driver.Plan]:
    """Every shape with every function, in an order drawn from the seed, so that a run cut short has met all kinds."""
    most = min(driver.most_numbers(device, dtype), MOST[device.type])
    posed = [(function, shape) for function in wanted for shape in calls.random_shapes(function, count, seed, most)]
    random.Random(seed).shuffle(posed)
    return [driver.Plan(function, shape, {}, dtype, device, names) for function, shape in posed]


def visit(plan: driver.Plan, clock: Clock, rounds: int = ROUNDS) -> driver.Outcome:
    """Check every subject of a plan once, then time both phases of all in turns."""
    if "compile" in plan.names:
        torch.compiler.reset()  # after eight shapes of one function the compiler gives up on it and runs it eagerly, without a word
    everyone, missing = rivals.subjects(plan.function, plan.names, False)
    outcome = driver.Outcome(plan, {}, missing, {}, {}, HELD_TO, {})
    call = calls.call_of(plan.function, plan.shape, plan.dtype, plan.device, plan.keywords)
    work = driver.work_of(plan, call)
    timed = {f"{phase} {name}": one for name, phase, one in _able(plan, call, everyone, outcome)}
    if plan.device.type != "cpu":
        for phase in PHASES:
            name, bound = driver.ceiling(plan, work[phase])
            bound()
            timed[f"{phase} {name}"] = driver.repeated(bound)
    order = turns(list(timed), rounds)
    samples: dict[str, list[Any]] = {name: [] for name in timed}
    for name, sample in zip(order, clock.take(timed, order), strict=True):
        samples[name].append(sample)
    for phase in PHASES:
        own = {name.removeprefix(f"{phase} "): taken for name, taken in samples.items() if name.startswith(f"{phase} ")}
        outcome.measured[phase] = [driver.Measured(phase, own, work[phase])]
    return outcome


def _able(plan: driver.Plan, call: Any, everyone: list[Any], outcome: driver.Outcome) -> Iterator[tuple[str, str, Timed]]:
    """The phases of those that run; whose numbers are wrong is kept."""
    plain = next(subject for subject in everyone if subject.name == rivals.TORCH)
    fed, yardstick = driver.ready(plain, plan, call).once()
    held = None if calls.CALLS[plan.function].random else coarse_oracle(yardstick, HELD_TO, plan.dtype in ("bf16", "fp16"))
    for subject in everyone:
        try:
            start = time.perf_counter()
            one = driver.ready(subject, plan, call)
            bad = None if held is None else verdict(one.once(fed)[1], held)
            phases = [(phase, one.phase(phase)) for phase in PHASES]
            for _, timed in phases:
                timed.run(timed.prepare())
            outcome.first_s[subject.name] = round(time.perf_counter() - start, 3)
        except Exception as error:  # noqa: BLE001 (a rival may raise anything; it is named, and ours fails the command)
            outcome.failed[subject.name] = in_words(error)
            continue
        if bad is not None:
            outcome.wrong[subject.name] = bad
        yield from ((subject.name, phase, timed) for phase, timed in phases)


def run(posed: list[driver.Plan], clock: Clock, seconds: float, told: Callable[[dict[str, Any]], None]) -> Drawn:
    """Visit plans until the time is over.

    Args:
        posed: from `plans`.
        clock: of their device.
        seconds: after which no further call is begun [s].
        told: is given each row.
    """
    found = Drawn([], len(posed), 0, {}, {})
    end = time.perf_counter() + seconds
    for plan in posed:
        if time.perf_counter() > end:
            break
        try:
            outcome = visit(plan, clock)
        except (RuntimeError, checks.UnsupportedError) as error:
            found.failed[f"{rivals.OURS} in {plan.label}"] = in_words(error)
            outcome = None
        driver.free(plan.device)
        found = found._replace(reached=found.reached + 1)
        if outcome is None:
            continue
        rows = driver.rows_of(outcome)
        found.rows.extend(rows)
        found.missing.update(outcome.missing)
        found.failed.update({f"{name} in {plan.label}": why for name, why in outcome.failed.items()})
        for row in rows:
            told(row)
    return found


def words(found: Drawn) -> list[str]:
    """How the run ends: what was not reached, who is missing, whose numbers are wrong, where a rival wins, and the worst."""
    lines = [f"{found.reached} of {found.asked} calls were reached in the time given"]
    lines += [f"not measured: {name}: {why}" for name, why in found.missing.items()]
    lines += [f"dropped out: {name}: {why}" for name, why in found.failed.items()]
    lines += [f"wrong numbers: {row['variant']} in {standing.where(row)}: {row['wrong']}" for row in found.rows if row["wrong"]]
    lost = standing.lost(found.rows)
    lines.append(f"{len(lost)} of {len(standing.groups(found.rows))} calls in which a rival is faster" + (":" if lost else ""))
    return [*lines, *(f"  {one}" for one in lost), standing.worst_words(found.rows)]


def ours_failed(found: Drawn) -> bool:
    """Whether an operator of ours raised, or gave wrong numbers."""
    own = [name for name in found.failed if name.startswith(rivals.OURS)]
    return bool(own) or any(row["wrong"] for row in found.rows if row["variant"] == rivals.OURS)
