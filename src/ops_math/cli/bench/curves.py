"""Whether training with our operators gives plain PyTorch's loss curve: not the same numbers, but none that plain PyTorch could not give.

Plain PyTorch is trained several times, from weights that differ by rounding or, where the model drops out, with other masks; what is
trained otherwise must lie as close to one of these runs as they lie to each other, within a factor (`verdict`).
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ops_math import checks
from ops_math.cli.bench import steps as whole_steps
from ops_math.cli.bench import text
from ops_math.cli.bench.contenders import PLAIN, Runner, Setup, variant_of
from ops_math.cli.bench.workloads import FIXED
from ops_math.cli.train.batches import Batch
from ops_math.schedule.ceilings import synchronize
from ops_nn.models import PRESETS, BertConfig

SETUPS = whole_steps.SETUPS | {"bert-tiny": Setup(8, 128, torch.float32, True)}
STEPS, RUNS, WINDOW, POINT = 200, 2, 20, 10
WARMUP_SHARE = 0.2  # of the steps, then the rate is constant
# How many of the weights' elements move by one ulp. In fp32 all: an operator's roundings are as fine as the weights' and there are many.
# In bf16 every twelfth, which is in all as much as one rounding of the weights (1/sqrt(12) ulp): all of them would move the loss of
# llama-tiny (2 x 64, windows of 10) by 1e-2, as much as input gradients of norms that are 1 % wrong, and hide these.
MOVED = {torch.float32: 1.0, torch.bfloat16: 1 / 12}
# With three plain runs, a fourth is as far away as this by chance one time in 18 if all windows move together, one in 10,000 if each
# moves by itself; with two it would be one in 5 and one in 90, with four one in 65 (simulated, normal noise).
FACTOR = 2.0
FEWEST = 2  # plain runs beyond the first
ALPHA = 0.02  # runs of a variant together differ from plain ones where chance would part them so far in at most so many of all ways
PLANTED = "gradients times"
# The inputs of branches beside a residual sum. Behind it, where BERT has its norms, a wrong factor would be the whole gradient's, which
# AdamW does not see.
BRANCHES = ("LlamaRMSNorm", "BertIntermediate")


class Curve(NamedTuple):
    """One run: its variant, which run of it, losses before each step's update [nats per token], and its speed after the first steps."""

    variant: str
    run: str
    losses: tuple[float, ...]
    steps_per_s: float

    def means(self, width: int) -> list[float]:
        """Mean losses of windows of `width` steps; a shorter rest counts to the last window."""
        return windows(self.losses, width)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant}, {self.run}" if self.run else self.variant


class Verdict(NamedTuple):
    """A curve against the plain ones.

    Attributes:
        floor: the greatest distance between two plain runs; a distance of two curves is the greatest over windows, of mean losses.
        distance: from the nearest plain run.
        offset: mean over all steps of the loss less the plain runs' mean loss.
    """

    floor: float
    distance: float
    offset: float

    @property
    def coincides(self) -> bool:
        """Whether the distance is at most `FACTOR` times the floor."""
        return self.distance <= FACTOR * self.floor

    def __str__(self) -> str:
        times = f"{self.distance / self.floor:.2f} of the floor" if self.floor else "and the plain runs are the same to the last bit"
        word = "coincides" if self.coincides else "DIFFERS"
        return f"{word}: {self.distance:.2e} from the nearest plain run, {times} {self.floor:.2e}, mean offset {self.offset:+.1e}"


def windows(losses: Sequence[float], width: int) -> list[float]:
    """Mean losses of windows of `width` steps; a shorter rest counts to the last window."""
    count = max(1, len(losses) // width)
    return [statistics.fmean(losses[i * width : (i + 1) * width if i + 1 < count else None]) for i in range(count)]


def distance(a: Curve, b: Curve, width: int = WINDOW) -> float:
    """The greatest difference of two curves over windows; infinite where a loss is no number."""
    both = zip(a.means(width), b.means(width), strict=True)
    return max(abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf for x, y in both)


def verdict(plain: Sequence[Curve], other: Curve, width: int = WINDOW) -> Verdict:
    """Hold a curve to those of plain PyTorch.

    Raises: ArgumentError for too few plain runs, or one whose loss is no number.
    """
    if len(plain) <= FEWEST or not all(math.isfinite(x) for one in plain for x in one.losses):
        needs = f"at least {FEWEST + 1} of plain PyTorch with finite losses"
        checks.fail("bench curves", "runs", needs, f"{len(plain)} runs", "Take more runs, or a lower rate.")
    floor = max(distance(a, b, width) for i, a in enumerate(plain) for b in plain[:i])
    ordinary = statistics.fmean(statistics.fmean(one.losses) for one in plain)
    return Verdict(floor, min(distance(other, one, width) for one in plain), statistics.fmean(other.losses) - ordinary)


class Together(NamedTuple):
    """Several runs of a variant against several plain ones.

    Attributes:
        gap: the greatest difference over windows between the mean of the ones and of the others [nats per token].
        chance: the share of all ways to divide the runs in two such groups in which the gap is at least as great.
        ways: how many there are.
    """

    gap: float
    chance: float
    ways: int

    @property
    def coincides(self) -> bool:
        """Whether chance would part plain runs as far in more than `ALPHA` of all ways."""
        return self.chance > ALPHA

    def __str__(self) -> str:
        word = "coincide" if self.coincides else "DIFFER"
        apart = f"{self.gap:.2e} between the means, as much or more in {self.chance:.1%} of {self.ways} ways to divide the runs"
        return f"{word} together: {apart}"


def together(plain: Sequence[Curve], others: Sequence[Curve], width: int = WINDOW) -> Together:
    """Hold several runs of a variant to those of plain PyTorch: an exact permutation test of the greatest gap between their means.

    Where one run is told from the noise of a few by a factor (`verdict`), this says how probable it is. A loss that is no number is a
    gap that no other way to divide the runs has.
    """
    table = [curve.means(width) for curve in (*plain, *others)]
    ways = list(itertools.combinations(range(len(table)), len(others)))
    if not all(math.isfinite(x) for row in table for x in row):
        return Together(math.inf, 0.0, len(ways))

    def gap(chosen: Sequence[int]) -> float:
        rest = [i for i in range(len(table)) if i not in chosen]
        return max(abs(statistics.fmean(column[i] for i in chosen) - statistics.fmean(column[i] for i in rest)) for column in columns)

    columns = list(zip(*table, strict=True))
    observed = gap(range(len(plain), len(table)))
    least = observed - 8 * math.ulp(max(abs(x) for row in table for x in row))  # means of the same runs may be rounded otherwise
    return Together(observed, sum(gap(chosen) >= least for chosen in ways) / len(ways), len(ways))


def least_chance(plain: int, others: int) -> float:
    """The smallest chance that so many runs can have: groups of one size can be swapped."""
    return (2 if plain == others else 1) / math.comb(plain + others, others)


@torch.no_grad()
def perturb(model: nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Move elements of matrices up or down by one ulp; vectors stay, since bf16 ones (norms) would never move back.

    Args:
        model: in `dtype`, or in fp32 where it runs under autocast.
        seed: of which elements, and whether up or down.
        dtype: in which it computes, whose ulp it is.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            seed += 1_000_003
            generator = torch.Generator(parameter.device).manual_seed(seed)
            drawn = torch.rand(parameter.shape, generator=generator, device=parameter.device)
            rounded = parameter.to(dtype)
            moved = torch.nextafter(rounded, torch.where(drawn < MOVED[dtype] / 2, torch.inf, -torch.inf).to(dtype))
            parameter.add_(torch.where(drawn < MOVED[dtype], moved.to(parameter.dtype) - rounded.to(parameter.dtype), 0.0))


class _Scaled(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def plant(model: nn.Module, factor: float) -> None:
    """Multiply the input gradients of a plain model's branches by a factor: a fault, to see whether it would be found."""
    found = [module for module in model.modules() if type(module).__name__ in BRANCHES]
    assert found, "no branch to plant a fault in"
    for module in found:
        module.register_forward_pre_hook(lambda _, given: (_Scaled.apply(given[0], factor), *given[1:]))


def rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then constant."""
    return peak * min(1.0, (step + 1) / max(1.0, WARMUP_SHARE * steps))


def train(runner: Runner, batches: Sequence[Batch], peak: float, run: str = "", seed: int = 0) -> Curve:
    """Train on one batch after the other; losses stay on the device until the end.

    Args:
        runner: a model with its optimizer, whose inputs are overwritten.
        batches: of all steps, on the runner's device.
        peak: learning rate after the warm-up.
        run: what the run is called.
        seed: of PyTorch's generators, from which masks come.
    """
    device, count = torch.device(runner.device), len(batches)
    torch.manual_seed(seed)
    losses = torch.full((count,), torch.nan, device=device)
    settled, start = min(10, count // 2), 0.0
    runner.inputs = {name: tensor.clone() for name, tensor in runner.inputs.items()}  # inputs and labels may be one tensor
    for i, batch in enumerate(batches):
        if i == settled:
            synchronize(device)
            start = time.perf_counter()
        for name, tensor in batch.named().items():  # into the same memory, which a graph reads
            runner.inputs[name].copy_(tensor)
        for group in runner.optimizer.param_groups:
            now = rate(i, count, peak)
            group["lr"] = group["lr"].fill_(now) if isinstance(group["lr"], torch.Tensor) else now
        losses[i].copy_(runner.step().detach())
    synchronize(device)
    return Curve(runner.variant, run, tuple(losses.tolist()), (count - settled) / (time.perf_counter() - start))


class Asked(NamedTuple):
    """What to train: a preset in a setup, with how many steps, plain runs beyond the first, and which peak rate; `planted` is the factor
    of a fault in one more plain run, None for no such run; without `dropout` no model drops; each variant is trained `again` so many times,
    from weights or with masks that differ likewise."""

    model: str
    setup: Setup
    variants: tuple[str, ...]
    device: str
    steps: int = STEPS
    runs: int = RUNS
    peak: float | None = None
    planted: float | None = None
    dropout: bool = True
    again: int = 0
    seed: int = 0

    @property
    def lr(self) -> float:
        """The peak rate, by default the preset's."""
        return PRESETS[self.model].learning_rate if self.peak is None else self.peak

    @property
    def drops(self) -> bool:
        """Whether runs differ by dropout masks anyway."""
        config = PRESETS[self.model].config
        return self.dropout and isinstance(config, BertConfig) and max(config.hidden_dropout, config.attention_dropout) > 0

    @property
    def computes(self) -> torch.dtype:
        """The dtype of products."""
        return torch.bfloat16 if self.setup.autocast else self.setup.dtype

    @property
    def noise(self) -> str:
        """How plain runs differ, in words."""
        return "other masks" if self.drops else f"one ulp in {MOVED[self.computes]:.3g} of the matrices' elements"


def check(asked: Asked) -> None:
    """Refuse what cannot be judged, before anything is trained.

    Raises: ArgumentError for too few runs or steps, or a variant that is plain or works on batches of another kind.
    """
    for name, value, least in (("--runs", asked.runs, FEWEST), ("--steps", asked.steps, 2)):
        if value < least:
            checks.fail("bench curves", name, f"at least {least}", str(value), "Of fewer the spread says nothing.")
    chance = least_chance(asked.runs + 1, asked.again + 1)
    if asked.again and chance > ALPHA:
        needs = f"so many that chance can be less than {ALPHA:.0%}"
        got = f"{asked.runs + 1} plain runs and {asked.again + 1} of a variant, where it is {chance:.1%} at least"
        checks.fail("bench curves", "--again", needs, got, "Take --runs 4 --again 3.")
    for variant in asked.variants:
        if variant == PLAIN or variant_of(variant).work != FIXED:
            checks.fail("bench curves", "--variants", "other than plain, on full sequences", repr(variant), "Name e.g. packed+adamw.")


def measure(asked: Asked, tokens: text.Tokens) -> Iterator[Curve]:
    """Train plain PyTorch, each variant, plain PyTorch and variants again and again, and with the planted fault, one after the other.

    The same weights, but for the perturbation, and the same batches for all; memory is freed between runs.
    """
    check(asked)
    made = text.batches(tokens, PRESETS[asked.model], asked.setup.batch, asked.setup.seq, asked.steps, asked.seed)
    device = torch.device(asked.device)
    batches = [batch.to(device) for batch in made]

    def one(variant: str, run: str = "", number: int = 0, prepare: Callable[[nn.Module], None] | None = None) -> Curve:
        whole_steps.free()
        runner = Runner(asked.model, variant, *asked.setup, asked.device, asked.seed)
        if not asked.dropout:
            whole_steps.without_dropout(runner.model)
        if prepare is not None:
            prepare(runner.model)
        return train(runner, batches, asked.lr, run, asked.seed + number)

    yield one(PLAIN)
    for variant in asked.variants:
        yield one(variant)
    for variant, times in ((PLAIN, asked.runs), *((variant, asked.again) for variant in asked.variants)):
        for number in range(1, times + 1):
            if asked.drops:
                yield one(variant, f"other masks {number}", number)
            else:
                yield one(variant, f"weights moved {number}", number, lambda model, k=number: perturb(model, k, asked.computes))  # type: ignore[misc]
    if asked.planted is not None:
        factor = asked.planted
        yield one(PLAIN, f"{PLANTED} {factor:g}", asked.runs + 1 if asked.drops else 0, lambda model: plant(model, factor))
