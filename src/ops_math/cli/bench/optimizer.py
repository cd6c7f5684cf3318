"""The AdamW step against PyTorch's fused and foreach ones: no dispatcher operator, so it has a driver of its own and the same rows."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ops_math import checks
from ops_math.cli.bench import driver
from ops_math.cli.bench.clock import Clock, Timed, race
from ops_math.cli.bench.driver import COPY, Measured, Outcome, Plan, Work
from ops_math.cli.bench.rivals import EACH, OURS, TORCH
from ops_math.schedule.accuracy import oracle_of, verdict
from ops_math.schedule.trial import in_words
from ops_math.spec import DTYPE_OF
from ops_math.stats import stats
from ops_nn.optim import AdamW

NAME, SIZES, PHASE = "adamw", "TENSORSxNUMBERS", "step"
SHAPES, SMALL = ("8x67108864", "300x1048576"), ("8x65536", "100x1024")
FOREACH = "torch foreach"
PASSES = 7  # parameter, gradient and two averages read, all but the gradient written
STEPS = 3  # before numbers are compared: the first one's averages are those of one gradient
LR = 1e-3

Maker = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    OURS: lambda p: AdamW(p, lr=LR),
    TORCH: lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
    FOREACH: lambda p: torch.optim.AdamW(p, lr=LR, foreach=True),
}


def sizes_of(shape: str) -> tuple[int, int]:
    """How many tensors, and how many numbers each has."""
    parts = shape.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        checks.fail("bench", "--shape", f"{SIZES} for {NAME}", repr(shape), "Write it like 8x67108864.")
    return int(parts[0]), int(parts[1])


def work_of(plan: Plan) -> Work:
    """The least traffic of a step [B], and which implementation of ours takes it."""
    tensors, numbers = sizes_of(plan.shape)
    before = _calls()
    stepped(plan, MAKERS[OURS], DTYPE_OF[plan.dtype])
    ran = [name for name, calls in _calls().items() if calls > before.get(name, 0)]
    return Work(PASSES * tensors * numbers * DTYPE_OF[plan.dtype].itemsize, 0, "+".join(ran))


def _calls() -> dict[str, int]:
    found: dict[str, int] = {}
    for row in stats().to_json():
        if row["op"] == NAME:
            found[row["implementation"]] = found.get(row["implementation"], 0) + row["calls"]
    return found


def parameters(plan: Plan, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same parameters with the same gradients for every optimizer, rounded to the plan's dtype first."""
    tensors, numbers = sizes_of(plan.shape)
    generator = torch.Generator(plan.device).manual_seed(0)
    made = []
    for _ in range(tensors):
        value, gradient = (torch.randn(numbers, device=plan.device, generator=generator).to(DTYPE_OF[plan.dtype]).to(dtype) for _ in "pg")
        made.append(value.requires_grad_())
        made[-1].grad = gradient
    return made


def stepped(plan: Plan, make: Maker, dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters after a few steps, in one tensor."""
    p = parameters(plan, dtype)
    optimizer = make(p)
    for _ in range(STEPS):
        optimizer.step()
    return [torch.cat([one.detach() for one in p])]


def measure(plan: Plan, clock: Clock, seconds: float, sessions: int, progress: Callable[[str], None] = lambda words: None) -> Outcome:
    """As `driver.measure`: numbers first, against PyTorch's step in float64, then times in turns with a copy of as many bytes."""
    missing = {name: f"has no {NAME}" for name in plan.names if name not in (TORCH, EACH)}
    outcome = Outcome(plan, {PHASE: []}, missing, {}, {}, "PyTorch's fused step in fp64", {})
    dtype = DTYPE_OF[plan.dtype]
    progress("numbers")
    try:
        work = work_of(plan)
    except RuntimeError as error:
        outcome.failed[OURS] = in_words(error)
        return outcome._replace(measured={})
    held = oracle_of(
        stepped(plan, MAKERS[TORCH], torch.float64), stepped(plan, MAKERS[TORCH], dtype), outcome.checked, narrow=dtype.itemsize == 2
    )
    for name, make in MAKERS.items():
        start = time.perf_counter()
        try:
            bad = verdict(stepped(plan, make, dtype), held)
        except RuntimeError as error:
            outcome.failed[name] = in_words(error)
            continue
        outcome.first_s[name] = round(time.perf_counter() - start, 3)
        if bad is not None:
            outcome.wrong[name] = bad
    del held
    driver.free(plan.device)
    for session in range(sessions):
        progress(f"{PHASE} {session + 1}/{sessions}")
        timed: dict[str, Timed] = {}
        for name in [name for name in MAKERS if name not in outcome.failed]:
            optimizer = MAKERS[name](parameters(plan, dtype))
            optimizer.step()
            timed[name] = Timed(functools.partial(_step, optimizer))
        if plan.device.type != "cpu":
            name, bound = driver.ceiling(plan, work)
            assert name == COPY
            timed[name] = driver.repeated(bound)
        outcome.measured[PHASE].append(Measured(PHASE, race(timed, clock, seconds), work))
        del timed
        driver.free(plan.device)
    return outcome


def _step(optimizer: torch.optim.Optimizer, _: Any) -> None:
    optimizer.step()
