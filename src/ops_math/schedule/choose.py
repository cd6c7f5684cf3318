"""Which implementation and configuration runs a problem: a pure function of problem, device, policy and record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ops_math import backends, checks
from ops_math.schedule.record import Record
from ops_math.settings import Policy
from ops_math.spec import Cost, Device, Implementation


class Choice(NamedTuple):
    """The answer, with its reason and why the others were not taken."""

    implementation: Implementation
    config: Any
    predicted_us: float
    reason: str
    rejected: tuple[tuple[str, str], ...]
    fallback: str


def reason_against(candidate: Implementation, problem: Any, device: Device, phase: str, level: int) -> str | None:
    """Why a candidate cannot run this problem here, or None."""
    if candidate.name.startswith("triton"):  # asked before its module is imported, which needs Triton
        missing = backends.triton_unavailable(device)
        if missing:
            return missing
    kinds = candidate.optional("KINDS", None)
    if kinds is not None and device.kind not in kinds:
        return f"runs on {', '.join(kinds)}, not on {device.kind}"
    supports = candidate.optional("supports", None)
    why = supports(problem, device, phase) if supports else None
    if why:
        return why
    if level and not configurations(candidate, problem, device, phase, level):
        return f"offers no determinism level {level} for this problem"
    return None


def configurations(candidate: Implementation, problem: Any, device: Device, phase: str, level: int) -> Sequence[Any]:
    """The legal configurations at a determinism level, best guess first."""
    configs = candidate.optional("configs", None)
    listed = configs(problem, device, phase) if configs else (None,)
    determinism = candidate.optional("determinism", None)
    if level and determinism:
        return [c for c in listed if determinism(problem, c, phase) >= level]
    return listed


def predict_us(candidate: Implementation, problem: Any, cost: Cost, device: Device, phase: str) -> float:
    """Roofline time [us]: the larger of moving the bytes and computing, plus the host's cost of each call."""
    own = candidate.optional("predict_us", None)
    if own:
        return float(own(problem, device, phase))
    moving = cost.bytes * candidate.optional("PASSES", 1.0) / (device.bandwidth_gbs * 1e3)
    computing = cost.total_flops / (device.product_tflops * 1e6)
    return max(moving, computing) + device.launch_us * candidate.optional("CALLS", 1)


def choose(
    candidates: Sequence[Implementation], problem: Any, cost: Cost, dtype: str, phase: str, device: Device, policy: Policy, record: Record
) -> Choice:
    """The fastest candidate that supports the problem: by measurement where the record covers it, else by prediction.

    `candidates` are in order of preference at equal time; the first one is the device's own, and its refusal is a fallback.
    """
    op = candidates[0].operator
    forced = dict(policy.forced).get(op)
    if forced is not None and forced not in {c.name for c in candidates}:
        checks.refuse(op, f"there is no implementation {forced!r}", "Pick one of " + ", ".join(c.name for c in candidates) + ".")
    rejected: list[tuple[str, str]] = []
    able: list[tuple[float, int, Implementation]] = []
    for order, candidate in enumerate(candidates):
        why = reason_against(candidate, problem, device, phase, policy.determinism)
        if why is None and forced is not None and candidate.name != forced:
            rejected.append((candidate.name, f"{forced} was asked for"))
        elif why is None:
            able.append((predict_us(candidate, problem, cost, device, phase), order, candidate))
        else:
            rejected.append((candidate.name, why))
    if not able:
        checks.refuse(
            f"{op} ({phase})", "no implementation can run it: " + "; ".join(f"{n}: {w}" for n, w in rejected), f"The problem was {problem}."
        )
    if forced is not None:
        return _answer(able[0][2], able[0][0], "asked for by force()", rejected, "", problem, device, phase, policy)
    entry = record.lookup(op, phase, device.name, dtype, cost.bytes)
    measured = entry.times_us if entry else {}
    timed = [(measured[c.name], order, c) for _, order, c in able if c.name in measured]
    best = min(timed or able)
    reason = "fastest measured" if timed else ("fastest predicted" if len(able) > 1 else "only candidate")
    for time_us, order, candidate in sorted(timed or able):
        if order != best[1]:
            rejected.append((candidate.name, ("measured" if timed else "predicted") + f" {time_us:.0f} us against {best[0]:.0f} us"))
    fallback = ""
    own = next((c for c in candidates if _is_home(c, device)), None)
    if own is not None and best[2] is not own:
        fallback = dict(rejected).get(own.name, "") if own.name not in {c.name for _, _, c in able} else ""
    return _answer(best[2], best[0], reason, rejected, fallback, problem, device, phase, policy)


def _is_home(candidate: Implementation, device: Device) -> bool:
    """Whether the implementation is the one written for this kind of device."""
    return candidate.name == ("eager" if device.kind == "cpu" else "triton_gpu")


def _answer(
    candidate: Implementation,
    time_us: float,
    reason: str,
    rejected: list[tuple[str, str]],
    fallback: str,
    problem: Any,
    device: Device,
    phase: str,
    policy: Policy,
) -> Choice:
    config = configurations(candidate, problem, device, phase, policy.determinism)[0]
    return Choice(candidate, config, time_us, reason, tuple(rejected), fallback)
