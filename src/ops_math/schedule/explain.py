"""Why: what each candidate of a problem was predicted and measured to take, which one runs, and why the others do not."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math import settings
from ops_math.schedule.choose import choose, configurations, predict_us, reason_against
from ops_math.schedule.levels import chosen_for
from ops_math.schedule.live import Operator, record_for
from ops_math.schedule.record import Record, label
from ops_math.settings import Policy
from ops_math.spec import Device


class Row(NamedTuple):
    """One candidate. Times [us] are None where they are not known; `configs` counts its legal configurations; `words` say why it runs
    or does not."""

    implementation: str
    config: str
    configs: int
    predicted_us: float | None
    measured_us: float | None
    host_us: float | None
    noise: float | None
    runs: bool
    words: str


class Explanation(NamedTuple):
    """The answer to one problem. `bytes` [B] is the least traffic, `floor_us` [us] what the device's ceilings allow at best, `flops` counts
    operations. `refused` are configurations that were tried and not timed."""

    op: str
    phase: str
    problem: str
    device: Device
    bytes: int
    flops: int
    floor_us: float
    reason: str
    measured: str
    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]


def explain(
    operator: Operator, phase: str, problem: Any, device: Device, *, policy: Policy | None = None, record: Record | None = None
) -> Explanation:
    """What the scheduler knows and decides about one problem; nothing is run.

    Args:
        operator: the catalogue entry.
        phase: `fwd`, `bwd` or `inplace`.
        problem: its problem.
        device: a device of this machine, or one of `backends.NAMED` that it does not have.
        policy, record: by default those in force.

    Raises: UnsupportedError where nothing can run it, as a call would.
    """
    policy = policy or settings.policy()._replace(determinism=settings.determinism_level())
    posed = problem
    problem = chosen_for(operator.implementations()[0].levels, problem, policy.determinism, policy.token_block)
    record = record_for(device) if record is None else record
    storage, cost = operator.file("problem").storage(problem), operator.cost(problem, phase)
    on = record.on(device, storage)
    choice = choose(operator.implementations(), problem, cost, storage, phase, device, policy, record, posed)
    found, exactly = record.measurement(operator.name, phase, storage, policy, problem)
    shipped = record.lookup(operator.name, phase, device.name, storage, cost.bytes)
    rows = []
    for candidate in operator.implementations():
        runs = candidate is choice.implementation
        why = choice.reason if runs else dict(choice.rejected).get(candidate.name, "")
        if reason_against(candidate, problem, on, phase, policy.determinism) is not None:
            rows.append(Row(candidate.name, "", 0, None, None, None, None, runs, why))
            continue
        configs = configurations(candidate, problem, on, phase, policy.determinism)
        shown = choice.config if runs else configs[0]
        name = label(candidate.name, shown)
        if found is not None and not runs:  # its fastest configuration is what lost
            timed = [(found.times_us[n], n) for n in (label(candidate.name, c) for c in configs) if n in found.times_us]
            name = min(timed)[1] if timed else name
        times = found.times_us.get(name) if found is not None else (shipped.times_us.get(candidate.name) if shipped else None)
        host, noise = (found.host_us.get(name), found.noise.get(name)) if found is not None else (None, None)
        predicted = predict_us(candidate, problem, cost, on, phase)
        rows.append(Row(candidate.name, name.partition(":")[2], len(configs), predicted, times, host, noise, runs, why))
    source = f"here, {found.when[:10]}, numbers held to {found.checked}" if found is not None else (shipped.source if shipped else "")
    if found is not None and not any(row.measured_us for row in rows):
        source = f"here, {found.when[:10]}, but none of the candidates that can run"
    elif found is not None and not exactly:
        source += f", on a like problem: {found.problem}"
    floor = max(cost.bytes / (on.bandwidth_gbs * 1e3), cost.total_flops / (on.product_tflops * 1e6))
    refused = tuple(found.refused.items()) if found is not None else ()
    return Explanation(
        operator.name, phase, str(problem), on, cost.bytes, cost.total_flops, floor, choice.reason, source, tuple(rows), refused
    )  # fmt: skip
