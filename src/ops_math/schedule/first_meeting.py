"""What happens when a problem is met that is not remembered: `calibrate` collects it, and `first_use(seconds)` measures it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ops_math import backends, settings
from ops_math.backends.inductor import ON_REQUEST
from ops_math.schedule import live
from ops_math.schedule.calibrate import ensure_ceilings
from ops_math.schedule.identity import identity_of
from ops_math.schedule.measure import Limits, measure
from ops_math.schedule.store import warn
from ops_math.schedule.trial import CandidateFailedError, DeviceHungError, NotMeasuredError, in_words


def met(operator: live.Operator, phase: str, problem: Any, args: Sequence[Any]) -> None:
    """Told of every problem that is not remembered, before it is chosen for, with the real arguments of the call."""
    if live.LIVE.collector is not None:
        live.LIVE.collector(operator.name, phase, problem, args)
        return
    if not live.LIVE.first_use_seconds or why_not(operator, phase, problem, args[0].device) is not None:
        return
    device = args[0].device
    live.LIVE.tried.add((operator.name, phase, str(problem)))
    progress = live.LIVE.first_use_progress
    try:
        ensure_ceilings({device}, True)
        limits = Limits(live.LIVE.first_use_seconds, max(10 * live.LIVE.first_use_seconds, 10.0), why_not_compiled=ON_REQUEST)
        found = measure(
            operator, phase, args, limits=limits, progress=progress and (lambda words: progress(f"{operator.name} {phase}: {words}"))
        )
    except (NotMeasuredError, CandidateFailedError, DeviceHungError, RuntimeError, MemoryError) as error:
        warn(f"schedule: {operator.name} ({phase}) was not measured: {in_words(error)}. The model chooses. The problem was {problem}.")
        return
    live.add(identity_of(backends.device_of(device)), [found])


def why_not(operator: live.Operator, phase: str, problem: Any, device: torch.device) -> str | None:
    """Why a problem is not measured now, in words, or None."""
    if live.LIVE.frozen:
        return "the schedule is frozen"
    if live.world_size() > 1:
        return "ranks would not measure the same: calibrate does"
    if settings.determinism_level():
        return "level 1 keeps one order of sums"
    if operator.name in dict(settings.policy().forced):
        return "an implementation was forced"
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "nothing can be timed here"
    if (operator.name, phase, str(problem)) in live.LIVE.tried:
        return "it was tried before"
    dtype = operator.file("problem").storage(problem)
    known = live.record_for(backends.device_of(device)).measurement(operator.name, phase, dtype, settings.policy(), problem)[0]
    return None if known is None else "it, or one like it, is in the record"
