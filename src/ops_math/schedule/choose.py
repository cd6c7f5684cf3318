"""Which implementation and configuration runs a problem: a pure function of problem, device, policy and record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ops_math import backends, checks
from ops_math.backends import inductor
from ops_math.schedule.record import Measurement, Record, label
from ops_math.settings import Policy
from ops_math.spec import Cost, Device, Implementation

HERE, LIKE = "fastest measured on this device", "fastest measured on this device on a like problem"
FROZEN = " (frozen: this problem is not in the record)"
ANOTHER_ORDER = "sums in another order than the model's choice, which level 1 keeps"


class Choice(NamedTuple):
    """The answer, with its reason and why the others were not taken."""

    implementation: Implementation
    config: Any
    predicted_us: float
    reason: str
    rejected: tuple[tuple[str, str], ...]
    fallback: str


class Able(NamedTuple):
    """A candidate that can run the problem, with its predicted time [us] and its place in the order of preference."""

    predicted_us: float
    order: int
    candidate: Implementation


def reason_against(candidate: Implementation, problem: Any, device: Device, phase: str, level: int) -> str | None:
    """Why a candidate cannot run this problem here, or None."""
    if candidate.name.startswith("triton"):  # asked before its module is imported, which needs Triton
        missing = backends.triton_unavailable(device)
        if missing:
            return missing
    if candidate.name.startswith("inductor"):
        missing = inductor.unavailable(device)
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
        return f"offers no determinism level {level} for this problem" + _why_not(candidate, problem, device, phase, level)
    return None


def _why_not(candidate: Implementation, problem: Any, device: Device, phase: str, level: int) -> str:
    """What the configuration that offers most says about more."""
    offers = [candidate.offer(problem, c, phase) for c in listed(candidate, problem, device, phase, level)]
    best = max(offers, key=lambda offer: offer.level, default=None)
    return "" if best is None or not best.why else f" ({best.why})"


def listed(candidate: Implementation, problem: Any, device: Device, phase: str, level: int) -> Sequence[Any]:
    """What a module lists, whatever it promises: from level 2 on its `invariant_configs`, where it has any."""
    configs = candidate.optional("invariant_configs", None) if level >= 2 else None
    configs = configs or candidate.optional("configs", None)
    found: Sequence[Any] = configs(problem, device, phase) if configs else (None,)
    return found


def configurations(candidate: Implementation, problem: Any, device: Device, phase: str, level: int) -> Sequence[Any]:
    """The legal configurations at a determinism level, best guess first."""
    found = listed(candidate, problem, device, phase, level)
    return [c for c in found if candidate.offer(problem, c, phase).level >= level] if level else found


def predict_us(candidate: Implementation, problem: Any, cost: Cost, device: Device, phase: str) -> float:
    """Roofline time [us]: the larger of moving the bytes and computing, plus the host's cost of each call."""
    own = candidate.optional("predict_us", None)
    if own:
        return float(own(problem, device, phase))
    passes = candidate.optional("passes", None)
    moving = cost.bytes * (passes(problem, phase) if passes else candidate.optional("PASSES", 1.0)) / (device.bandwidth_gbs * 1e3)
    computing = cost.total_flops / (device.product_tflops * 1e6)
    return max(moving, computing) + device.launch_us * candidate.optional("CALLS", 1)


def on_request(candidate: Implementation) -> str:
    """Why a candidate runs only where it was measured on this machine or forced, empty for the others."""
    return inductor.ON_REQUEST if candidate.name.startswith("inductor") else ""


def order_of_sums(candidate: Implementation, problem: Any, config: Any, phase: str) -> str:
    """What may be exchanged for what at determinism level 1: candidates of one signature give the same bits.

    A module, or the levels of its operator, state it; without that a configuration is like itself alone.
    """
    own = candidate.signature(problem, config, phase)
    return label(candidate.name, config) if own is None else own


def sort_candidates(
    candidates: Sequence[Implementation], problem: Any, cost: Cost, phase: str, device: Device, policy: Policy
) -> tuple[list[Able], list[tuple[str, str]]]:
    """Those that can run the problem with their predictions, and why the others cannot."""
    able: list[Able] = []
    rejected: list[tuple[str, str]] = []
    forced = dict(policy.forced).get(candidates[0].operator)
    for order, candidate in enumerate(candidates):
        why = reason_against(candidate, problem, device, phase, policy.determinism)
        if why is None and forced is not None and candidate.name != forced:
            why = f"{forced} was asked for"
        if why is None:
            able.append(Able(predict_us(candidate, problem, cost, device, phase), order, candidate))
        else:
            rejected.append((candidate.name, why))
    return able, rejected


def choose(
    candidates: Sequence[Implementation], problem: Any, cost: Cost, dtype: str, phase: str, device: Device, policy: Policy, record: Record,
    posed: Any = None,
) -> Choice:  # fmt: skip
    """The fastest candidate that supports the problem: by measurement where the record covers it, else by prediction.

    What was measured on this machine outweighs what was shipped, which outweighs the model. `candidates` are in order of preference at
    equal time; the first one is the device's own, and its refusal is a fallback. `posed` is the call's own problem where the choice is made
    for another that stands for it (determinism level 2), for what is said about it.

    Raises: UnsupportedError where nothing can run it, where what was forced cannot, and where a strict freeze() meets a problem that is
    not in the record.
    """
    op = candidates[0].operator
    forced = dict(policy.forced).get(op)
    if forced is not None and forced not in {c.name for c in candidates}:
        checks.refuse(op, f"there is no implementation {forced!r}", "Pick one of " + ", ".join(c.name for c in candidates) + ".")
    device = record.on(device, dtype)
    able, rejected = sort_candidates(candidates, problem, cost, phase, device, policy)
    if not able:
        do = f"The problem was {posed or problem}. {_way_out(op, forced, policy.determinism)}"
        checks.refuse(f"{op} ({phase})", "no implementation can run it: " + "; ".join(f"{n}: {w}" for n, w in rejected), do)
    asked = _Question(problem, phase, device, policy, able, rejected)
    if forced is not None:
        return asked.answer(able[0], asked.first_config(able[0]), able[0].predicted_us, "asked for by force()", [], "")
    fallback = _fallback(candidates, able, rejected, device)
    modelled = asked.by_model(record.lookup(op, phase, device.name, dtype, cost.bytes), fallback)
    measurement, exactly = record.measurement(op, phase, dtype, policy, problem)
    measured = asked.by_measurement(measurement, exactly, modelled) if measurement is not None else None
    if measured is not None:
        return measured
    if record.frozen and modelled.reason == "fastest predicted":
        if record.frozen == "refuse":
            do = f"Calibrate it before freeze(strict=True). The problem was {posed or problem}."
            checks.refuse(f"{op} ({phase})", "the schedule is frozen and has no measurement of this problem", do)
        modelled = modelled._replace(reason=modelled.reason + FROZEN)
    if record.silent and modelled.reason.startswith("fastest predicted"):
        modelled = modelled._replace(reason=f"{modelled.reason} ({record.silent})")
    return modelled


def _way_out(op: str, forced: str | None, level: int) -> str:
    """What to do where nothing can run a call."""
    if forced is not None:
        return f"Leave {op} out of force(), or change what the reasons name."
    if level:
        return f"Ask for a lower level than {level}, with determinism() around this call, or change what the reasons name."
    return "Change what the reasons name, or use ops_math.enabled(False)."


def _fallback(candidates: Sequence[Implementation], able: list[Able], rejected: list[tuple[str, str]], device: Device) -> str:
    """Why the implementation that was written for this kind of device cannot run, empty where it can."""
    own = next((c for c in candidates if c.name == ("eager" if device.kind == "cpu" else "triton_gpu")), None)
    return dict(rejected).get(own.name, "") if own is not None and all(a.candidate is not own for a in able) else ""


class _Question(NamedTuple):
    """What is asked, with those that can run it."""

    problem: Any
    phase: str
    device: Device
    policy: Policy
    able: list[Able]
    rejected: list[tuple[str, str]]

    def configs(self, one: Able) -> Sequence[Any]:
        return configurations(one.candidate, self.problem, self.device, self.phase, self.policy.determinism)

    def first_config(self, one: Able) -> Any:
        return self.configs(one)[0]

    def answer(self, one: Able, config: Any, time_us: float, reason: str, others: list[tuple[str, str]], fallback: str) -> Choice:
        return Choice(one.candidate, config, time_us, reason, (*self.rejected, *others), fallback)

    def by_model(self, entry: Any, fallback: str) -> Choice:
        """By the shipped measurements where they cover the problem, else by the roofline."""
        times = entry.times_us if entry else {}
        offered = [one for one in self.able if not on_request(one.candidate)]
        timed = [one._replace(predicted_us=times[one.candidate.name]) for one in offered if one.candidate.name in times]
        ranked = sorted(timed or offered, key=lambda one: one[:2])
        best, how = ranked[0], "measured" if timed else "predicted"
        others = [(one.candidate.name, f"{how} {one.predicted_us:.0f} us against {best.predicted_us:.0f} us") for one in ranked[1:]]
        others += [(one.candidate.name, on_request(one.candidate)) for one in self.able if one not in offered]
        reason = f"fastest {how}" if timed or len(offered) > 1 else "only candidate"
        return self.answer(best, self.first_config(best), best.predicted_us, reason, others, fallback)

    def by_measurement(self, found: Measurement, exactly: bool, modelled: Choice) -> Choice | None:
        """By the machine's own measurement: its winner where that is legal here, else the fastest that is; None where none is."""
        legal = {label(one.candidate.name, c): (one, c) for one in self.able for c in self.configs(one)}
        if self.policy.determinism:
            kept = order_of_sums(modelled.implementation, self.problem, modelled.config, self.phase)
            legal = {k: v for k, v in legal.items() if order_of_sums(v[0].candidate, self.problem, v[1], self.phase) == kept}
        timed = [(found.times_us[name], legal[name][0].order, name) for name in legal if name in found.times_us]
        if not timed:
            return None
        name = found.winner if found.winner in legal else min(timed)[2]
        one, config = legal[name]
        others = [(a.candidate.name, self._against(a, found, name)) for a in self.able if a.candidate is not one.candidate]
        return self.answer(one, config, found.times_us[name], HERE if exactly else LIKE, others, modelled.fallback)

    def _against(self, one: Able, found: Measurement, winner: str) -> str:
        """Why a measured candidate did not win."""
        names = [label(one.candidate.name, c) for c in self.configs(one)]
        timed = [(found.times_us[n], n) for n in names if n in found.times_us]
        if not timed:
            return next((found.refused[n] for n in (*names, one.candidate.name) if n in found.refused), "was not measured")
        time_us, name = min(timed)
        if self.policy.determinism and name != winner and time_us < found.times_us[winner]:
            return ANOTHER_ORDER
        tie = ", a tie" if name in found.ties else ""
        return f"measured {time_us:.1f} us against {found.times_us[winner]:.1f} us{tie}"
