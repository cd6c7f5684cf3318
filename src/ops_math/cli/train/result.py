"""From recorded steps to the numbers and the sentence at the end."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from ops_math.cli.train.config import COMPILED, LABELS, OPS_MATH, PLAIN, TrainConfig
from ops_math.cli.train.memory import Measurement

# Compilation, first touches of memory and clocks that rise belong to no step.
UNTIMED = 3
# Two medians closer than this are called equal: a machine at rest repeats itself no better.
SAME_TIME = 0.01
# Two one-ulp disturbances of llama-tiny part from the same run up to 2.2 times as far as each other (fp32 and bf16, 60 and 24
# steps); a gradient that is 1 % wrong parts thousands of times as far.
SAME_AS_NOISE, LIKE_NOISE = 3.0, 10.0
SAME_MEMORY = 0.01


@dataclass(frozen=True)
class VariantResult:
    """What one run did. Times in seconds, losses in nats per token; None stands for "not measured".

    Attributes:
        name: the variant.
        label: its name for people.
        unavailable: why it did not run, or "".
        losses: before each step's update.
        step_times: of each step [s].
        timed: those of `step_times` that count.
        median, p25, p75: of `timed` [s].
        tokens_per_s: from the median.
        validation_loss: on held-out text, after the last step.
        measurement: memory and calls, from a process of its own.
        largest_difference: from the plain run's losses, over all steps.
        window_difference: the same over the steps of the noise floor.
    """

    name: str
    label: str
    unavailable: str = ""
    losses: list[float] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    timed: list[float] = field(default_factory=list)
    median: float | None = None
    p25: float | None = None
    p75: float | None = None
    tokens_per_s: float | None = None
    validation_loss: float | None = None
    measurement: Measurement | None = None
    largest_difference: float | None = None
    window_difference: float | None = None


@dataclass(frozen=True)
class Ratio:
    """Median of step-by-step ratios and its 95 % interval, None with fewer than 6 steps."""

    median: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Result:
    """Everything that the table, the report and `--json` show.

    Attributes:
        config: the run's configuration.
        steps_done: steps made; fewer than asked after Ctrl-C.
        stopped: why it ended early, or "".
        variants: one for each run, in order.
        noise_losses: losses of the plain run from weights moved by one ulp.
        noise_floor: their largest difference from the plain run's.
        ratios: step time relative to plain PyTorch, by variant.
        verdict: the one sentence.
        data: source and token counts.
        environment: versions and hardware.
        operators: what ops-math ran and why, a dictionary for each.
        adopted: what was put into the model, in words.
        report: where the report is, or None.
        checkpoint: where the checkpoint is, or None.
        unwritten: of report and checkpoint, why one could not be written, in words.
    """

    config: TrainConfig
    steps_done: int
    stopped: str
    variants: list[VariantResult]
    noise_losses: list[float]
    noise_floor: float | None
    ratios: dict[str, Ratio]
    verdict: str
    data: dict[str, Any]
    environment: dict[str, str]
    operators: list[dict[str, Any]]
    adopted: list[str]
    report: str | None = None
    checkpoint: str | None = None
    unwritten: tuple[str, ...] = ()

    def variant(self, name: str) -> VariantResult | None:
        """One variant that ran, or None."""
        return next((v for v in self.variants if v.name == name and not v.unavailable), None)


def timed_steps(count: int, starts: list[int]) -> list[int]:
    """Numbers of the steps whose times count: not the first three after each start, as long as others remain."""
    skipped = {start + i for start in starts for i in range(UNTIMED)}
    kept = [step for step in range(count) if step not in skipped]
    return kept or list(range(count))[-1:]


def largest_difference(a: list[float], b: list[float]) -> float | None:
    """Largest absolute difference over the steps that both have; infinite where only one is a number."""
    pairs = list(zip(a, b, strict=False))
    return max((difference(x, y) for x, y in pairs), default=None)


def difference(x: float, y: float) -> float:
    """`|x - y|`; 0 for two numbers that are alike, also both NaN, and infinity where just one is a number."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf


def summarise(
    name: str,
    losses: list[float],
    step_times: list[float],
    starts: list[int],
    config: TrainConfig,
    plain_losses: list[float] | None,
    window: int,
    validation_loss: float | None,
    measurement: Measurement | None,
) -> VariantResult:
    """The numbers of one run; `window` is the number of steps that the noise floor covers."""
    timed = [step_times[step] for step in timed_steps(len(step_times), starts)]
    median = statistics.median(timed) if timed else None
    p25, p75 = _quartiles(timed)
    return VariantResult(
        name=name,
        label=LABELS[name],
        losses=losses,
        step_times=step_times,
        timed=timed,
        median=median,
        p25=p25,
        p75=p75,
        tokens_per_s=None if median is None else config.tokens_per_step / median,
        validation_loss=validation_loss,
        measurement=measurement,
        largest_difference=None if plain_losses is None else largest_difference(losses, plain_losses),
        window_difference=None if plain_losses is None or not window else largest_difference(losses[:window], plain_losses[:window]),
    )


def _quartiles(values: list[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (None, None)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def ratio(times: list[float], baseline: list[float]) -> Ratio | None:
    """Median of `times[i] / baseline[i]` with a distribution-free 95 % interval (order statistics), or None without steps."""
    ratios = sorted(a / b for a, b in zip(times, baseline, strict=True))
    if not ratios:
        return None
    rank = interval_rank(len(ratios))
    if rank == 0:
        return Ratio(statistics.median(ratios), None, None)
    return Ratio(statistics.median(ratios), ratios[rank - 1], ratios[-rank])


def interval_rank(count: int) -> int:
    """Largest k such that the k-th smallest and k-th largest of `count` draws hold the median with 95 %; 0 for fewer than 6."""
    below, rank = 0.0, 0
    for k in range(count // 2):
        below += math.comb(count, k) * 0.5**count
        if below > 0.025:
            break
        rank = k + 1
    return rank


def verdict(variants: list[VariantResult], ratios: dict[str, Ratio], noise_floor: float | None, config: TrainConfig) -> str:
    """What happened, in one sentence, whichever way it went."""
    ran = {v.name: v for v in variants if not v.unavailable and v.losses}
    if OPS_MATH not in ran:
        reasons = [v.unavailable for v in variants if v.name == OPS_MATH and v.unavailable]
        return f"There is no verdict: ops-math {reasons[0] if reasons else 'made no step'}."
    ours = ran[OPS_MATH]
    broken = [v.label for v in ran.values() if not all(math.isfinite(loss) for loss in v.losses)]
    if broken:
        return f"The loss stopped being a number in {' and '.join(broken)}: lower --lr or choose another --dtype."
    if PLAIN not in ran:
        time = f"{ours.median:.3g} s a step, {ours.tokens_per_s:,.0f} tokens/s" if ours.median and ours.tokens_per_s else "no step timed"
        first, last = ours.losses[0], ours.losses[-1]
        return f"ops-math took {config.model} from a loss of {first:.3f} to {last:.3f} in {len(ours.losses)} steps ({time})."
    plain = ran[PLAIN]
    parts = [
        time_phrase(ratios.get(OPS_MATH)),
        memory_phrase(ours.measurement, plain.measurement),
        loss_phrase(ours, noise_floor, config.dropout),
    ]
    sentence = "ops-math " + ", ".join(part for part in parts if part)
    if COMPILED in ratios and OPS_MATH in ratios:
        sentence += "; " + compiled_phrase(ratios[COMPILED].median, ratios[OPS_MATH].median)
    return sentence + "."


def time_phrase(found: Ratio | None) -> str:
    """Speed against plain PyTorch."""
    if found is None or found.low is None or found.high is None:
        return "made too few steps to say whether it is faster"
    interval = f"{found.median:.3f} of its step time, 95 % interval {found.low:.3f} to {found.high:.3f}"
    if found.low <= 1.0 <= found.high or abs(found.median - 1.0) < SAME_TIME:
        return f"is as fast as plain PyTorch within noise ({interval})"
    if found.median < 1.0:
        return f"is {1.0 / found.median:.2f} times as fast as plain PyTorch ({interval})"
    return f"is slower than plain PyTorch ({interval})"


def memory_phrase(ours: Measurement | None, plain: Measurement | None) -> str:
    """Peak memory against plain PyTorch."""
    if ours is None or plain is None or ours.error or plain.error:
        return "its peak memory was not measured"
    change = ours.peak_bytes / plain.peak_bytes - 1.0
    if abs(change) < SAME_MEMORY:
        return "needs the same memory at its peak"
    return f"needs {abs(change):.0%} {'less' if change < 0 else 'more'} memory at its peak".replace("%", " %")


def loss_phrase(ours: VariantResult, noise_floor: float | None, dropout: bool) -> str:
    """Agreement of the loss curves; with dropout they differ by their masks as well."""
    found = ours.window_difference
    if found is None or noise_floor is None:
        return f"and its loss differs by at most {ours.largest_difference:.1e} (no noise floor was measured)"
    chance = "other dropout masks make it differ" if dropout else "rounding makes it differ"
    if found == 0.0:
        return "and its loss is the same to the last bit"
    if found <= LIKE_NOISE * noise_floor:
        much = "no more than" if found <= SAME_AS_NOISE * noise_floor else "about as much as"
        return f"and its loss differs by {much} {chance} ({found:.1e}, noise floor {noise_floor:.1e})"
    times = (
        f"{found / noise_floor:.0f} times the noise floor of {noise_floor:.1e}"
        if noise_floor
        else "while one ulp in the weights moved nothing"
    )
    return f"but its loss differs by {found:.1e}, {times}: find out why before you trust it"


def compiled_phrase(compiled: float, ours: float) -> str:
    """Where torch.compile stands."""
    if abs(compiled / ours - 1.0) < SAME_TIME:
        return f"torch.compile is as fast ({compiled:.3f})"
    return f"torch.compile is {'faster' if compiled < ours else 'slower'} ({compiled:.3f})"
