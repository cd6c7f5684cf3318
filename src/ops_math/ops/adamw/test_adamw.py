"""The step against PyTorch's AdamW in float64, its roundings, and the faults that must be seen."""

from __future__ import annotations

import math
import types
from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math.ops.adamw import eager, op_tables, reference
from ops_math.testing import Budget

SHAPES = ((31,), (), (0,), (40, 19), (3, 4, 5), (257,))
STEPS, LR, DECAY = 50, 1e-2, 0.1
IMPLEMENTATIONS = ("eager", "vendor")
EXACT = 1e-12


class Model:
    """Parameters, gradients for every step, and the state of AdamW, all drawn from one seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 1, state: torch.dtype | None = None, nudge: float = 0.0) -> None:
        make = torch.Generator().manual_seed(seed)

        def draw() -> list[torch.Tensor]:
            fresh = [torch.randn(shape, generator=make) for shape in SHAPES]
            noise = [torch.randn(shape, generator=torch.Generator().manual_seed(seed + 77)) for shape in SHAPES]
            return [(f.double() * (1 + nudge * n.double())).to(dtype) for f, n in zip(fresh, noise, strict=True)]

        self.params, self.gradients = draw(), [draw() for _ in range(STEPS)]
        self.exp_avgs = [torch.zeros_like(p, dtype=state) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p, dtype=state) for p in self.params]
        self.steps = [torch.zeros(()) for _ in self.params]

    def group(self, step: int, **options) -> om.AdamWGroup:
        options = {"lr": LR, "weight_decay": DECAY, **options}
        return om.AdamWGroup(self.params, self.gradients[step], self.exp_avgs, self.exp_avg_sqs, self.steps, **options)

    def results(self) -> list[torch.Tensor]:
        return [torch.cat([t.flatten() for t in tensors]) for tensors in (self.params, self.exp_avgs, self.exp_avg_sqs)]


def ours(model: Model, implementation: str | None, *, scales=None, **options) -> list[torch.Tensor]:
    tables = om.AdamWTables()
    if options.pop("amsgrad", False):
        options["max_exp_avg_sqs"] = [torch.zeros_like(p) for p in model.exp_avgs]
    switch = om.enabled(False) if implementation is None else om.force(adamw=implementation)
    with switch:
        for step in range(STEPS):
            om.adamw([model.group(step, **options)], tables=tables, **(scales or {}))
    return model.results()


def theirs(model: Model, **options) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(p) for p in model.params]
    optimizer = torch.optim.AdamW(params, **{"lr": LR, "weight_decay": DECAY, "foreach": False, "fused": False, **options})
    for gradients in model.gradients:
        for p, g in zip(params, gradients, strict=True):
            p.grad = g
        optimizer.step()
    states = [[optimizer.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([t.detach().flatten() for t in tensors]) for tensors in (params, *states)]


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    gaps = [((a.double() - b.double()).abs().max() / b.double().abs().max()).item() for a, b in zip(one, other, strict=True)]
    return math.inf if any(math.isnan(g) for g in gaps) else max(gaps)


def budget() -> Budget:
    """What fp32 may do over 50 steps: PyTorch's own AdamW in fp32 is the yardstick."""
    seeds = (1, 2)
    exact = [theirs(Model(torch.float64, s)) for s in seeds]
    nudged = [theirs(Model(torch.float64, s, nudge=2.0**-24)) for s in seeds]
    return Budget(exact, [theirs(Model(torch.float32, s)) for s in seeds], nudged, ("params", "exp_avg", "exp_avg_sq"))


OPTIONS = [{}, {"weight_decay": 0.0}, {"maximize": True}, {"amsgrad": True}, {"eps": 1e-3}, {"lr": torch.tensor(3e-3, dtype=torch.float64)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
def test_fifty_steps_in_float64_are_those_of_pytorch(implementation, options):
    assert largest_difference(ours(Model(torch.float64), implementation, **options), theirs(Model(torch.float64), **options)) < EXACT


def test_the_reference_is_pytorchs_definition():
    model = Model(torch.float64)
    for t in range(STEPS):
        for i, p in enumerate(model.params):
            lists = (model.params, model.exp_avgs, model.exp_avg_sqs)
            state = (p, model.gradients[t][i], model.exp_avgs[i], model.exp_avg_sqs[i])
            for tensors, new in zip(lists, reference.adamw(*state, t + 1, LR, weight_decay=DECAY), strict=True):
                tensors[i] = new
    assert largest_difference(model.results(), theirs(Model(torch.float64))) < EXACT


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fifty_steps_in_fp32_are_within_the_budget(implementation):
    assert budget().broken(ours(Model(torch.float32), implementation), theirs(Model(torch.float64))) == []


FAULTS = {
    "a bias correction of the first step for ever": ("(lr / (1 - group.beta1**t))", "(lr / (1 - group.beta1 + 0 * t))"),
    "no correction of the square": ("(1 - group.beta2**t).rsqrt()", "(1 - 0 * t)"),
    "eps inside the root": (
        "largest.sqrt() * (1 - group.beta2**t).rsqrt().to(compute) + group.eps",
        "(largest / (1 - group.beta2**t).to(compute) + group.eps).sqrt()",
    ),
    "decay after the step": (
        "before - (decay * before + size * (m / denominator))",
        "(before - size * (m / denominator)) * (1 - decay)",
    ),
    "decay in the gradient": ("    m, v = group", "    g = g + group.weight_decay * source.to(compute)\n    m, v = group"),
    "a stale step count": ("t = step.double()", "t = (step.double() - 1).clamp_min(1)"),
    "a step count that does not move": ("    step.add_(", "    torch.empty(()).add_("),
    "beta1 for the square": ("(1 - group.beta2) * (g * g - v)", "(1 - group.beta1) * (g * g - v)"),
    "beta2 for the mean": ("(1 - group.beta1) * (g - m)", "(1 - group.beta2) * (g - m)"),
    "the old mean in the step": ("size * (m / denominator)", "size * (group.exp_avgs[i].to(compute) / denominator)"),
    "a learning rate off by a ten-thousandth": ("(lr / (1 - group", "(1.0001 * lr / (1 - group"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_step_is_seen_in_float64_and_by_the_budget_in_fp32(fault, monkeypatch):
    old, new = FAULTS[fault]
    source = Path(eager.__file__).read_text()
    assert source.count(old) == 1
    planted = types.ModuleType("planted")
    exec(compile(source.replace(old, new), eager.__file__, "exec"), planted.__dict__)
    target = next(i for i in op_tables.IMPLEMENTATIONS if i.name == "eager")
    monkeypatch.setitem(target.replaced, "step", planted.launch_step)
    exact = theirs(Model(torch.float64))
    assert not largest_difference(ours(Model(torch.float64), "eager"), exact) < EXACT
    assert budget().broken(ours(Model(torch.float32), "eager"), exact)


@pytest.mark.parametrize("implementation", ["eager", None])
def test_scales_multiply_the_gradients_and_leave_them_as_they_are(implementation):
    scaled, plain = Model(torch.float64), Model(torch.float64)
    for gradients in plain.gradients:
        torch._foreach_mul_(gradients, 0.25)
    scales = {"grad_scale": torch.tensor(2.0), "clip": torch.tensor(0.5)}
    before = [g.clone() for g in scaled.gradients[0]]
    found = ours(scaled, implementation, scales=scales)
    assert largest_difference(found, theirs(plain)) < EXACT
    if implementation is not None:
        assert all(torch.equal(a, b) for a, b in zip(before, scaled.gradients[0], strict=True))


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_found_infinity_leaves_everything_as_it_was(implementation, dtype):
    model = Model(dtype)
    ours(model, "eager")
    before = [*model.results(), *map(torch.clone, model.steps)]
    model.gradients[0][0].fill_(math.inf)
    switch = om.enabled(False) if implementation is None else om.force(adamw=implementation)
    with switch:
        om.adamw([model.group(0)], found_inf=torch.tensor(1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, [*model.results(), *model.steps], strict=True))
        om.adamw([model.group(1)], found_inf=torch.tensor(0.0))
    assert model.steps[0].item() == STEPS + 1


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("implementation", "state"),
    [("eager", torch.float32), ("eager", None), (None, torch.float32)],  # without wide averages PyTorch's own rounds after each operation
)
def test_a_step_of_narrow_parameters_is_that_of_float64_rounded_once(dtype, state, implementation, master):
    model, exact = Model(dtype, state=state), Model(dtype)
    options = {"masters": [p.float() for p in model.params]} if master else {}
    with om.enabled(False) if implementation is None else om.force(adamw=implementation):
        om.adamw([model.group(0, **options)])
    unit = torch.finfo(dtype).eps / 2
    for i, p in enumerate(exact.params):
        zero = torch.zeros_like(p, dtype=torch.float64)
        expected, m, v = reference.adamw(p.double(), exact.gradients[0][i].double(), zero, zero, 1, LR, weight_decay=DECAY)
        slack = 2.0**-22 * (expected.abs() + 4 * LR)  # a few roundings of fp32, of the result and of the update
        assert ((model.params[i] - expected).abs() <= unit * expected.abs() + slack).all()
        narrow = unit if state is None else 0.0
        assert ((model.exp_avgs[i] - m).abs() <= (narrow + 2.0**-22) * m.abs() + 2.0**-24).all()
        assert ((model.exp_avg_sqs[i] - v).abs() <= (narrow + 2.0**-22) * v.abs() + 2.0**-24).all()
        if master:
            assert torch.equal(options["masters"][i].to(dtype), model.params[i])
            assert ((options["masters"][i] - expected).abs() <= slack).all()


def test_stochastic_rounding_keeps_the_mean_to_within_a_binomial_bound():
    count, value = 1 << 20, 1 + 0.3 * 2.0**-7  # 0.3 of the way from 1 to the next bf16
    words = eager.uniform_words(om.Rng(5).state, 3, torch.tensor(9.0), torch.empty(count))
    for shift in (0, 16):
        rounded = eager.stochastically(torch.full((count,), value), words >> shift).float()
        assert set(rounded.unique().tolist()) == {1.0, 1 + 2.0**-7}
        share = int(torch.tensor(value).view(torch.int32) & 0xFFFF) / 2**16
        up = int((rounded > 1).sum())
        assert abs(up - share * count) < 5 * math.sqrt(count * share * (1 - share))  # five sigma: one run in two million is outside
        assert abs(round(count * 0.5) - share * count) > 5 * math.sqrt(count * 0.25)  # the bound can fail: rounding by a coin is outside
    both = (eager.stochastically(torch.full((count,), value), w).float() > 1 for w in (words, words >> 16))
    together = int((next(both) & next(both)).sum())
    assert abs(together - 0.3**2 * count) < 6 * math.sqrt(count * 0.09 * 0.91)  # the two stores of one word are independent


def test_stochastic_rounding_keeps_what_is_not_finite_and_what_needs_no_rounding():
    worst = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    ones = torch.full((3,), 0xFFFF)
    assert eager.stochastically(worst, ones).isnan().all()
    exact = torch.tensor([math.inf, -math.inf, 1.0, -0.0, 0.0, 3.140625])
    assert torch.equal(eager.stochastically(exact, torch.full((6,), 0xFFFF)).float(), exact)


@pytest.mark.parametrize("implementation", ["eager", None])
def test_small_updates_of_bf16_are_lost_to_nearest_and_kept_on_average_by_stochastic_rounding_and_by_a_master(implementation):
    """A step of 2^-12 on a parameter of 1 is a sixteenth of the distance to the bf16 below, 2^-8."""
    count, steps, lr = 4096, 16, 2.0**-12
    found = {}
    with om.enabled(False) if implementation is None else om.force(adamw=implementation):
        for name in ("nearest", "stochastic", "master"):
            p, g = torch.ones(count, dtype=torch.bfloat16), torch.ones(count, dtype=torch.bfloat16)
            state = [torch.zeros(count), torch.zeros(count), torch.zeros(())]
            extra = {"masters": [p.float()]} if name == "master" else {}
            group = om.AdamWGroup([p], [g], *([s] for s in state), lr=lr, weight_decay=0.0, **extra)
            for _ in range(steps):
                om.adamw([group], rng=om.Rng(1) if name == "stochastic" else None)
            found[name] = p.double().mean().item()
    assert found["nearest"] == 1.0
    assert found["master"] == 1.0 - steps * lr
    # Each step moves by 2^-8 with a chance of 1/16: a binomial of 16 trials; five sigma of the mean of 4,096.
    sigma = 2.0**-8 * math.sqrt(steps / 16 * 15 / 16 / count)
    assert abs(found["stochastic"] - (1.0 - steps * lr)) < 5 * sigma


def test_a_narrow_mean_square_stands_still_to_nearest_and_decays_by_stochastic_rounding():
    p, g = torch.ones(4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    means = {}
    for rng in (None, om.Rng(2)):
        v = torch.full((4096,), 0.75, dtype=torch.bfloat16)
        group = om.AdamWGroup([p.clone()], [g], [torch.zeros_like(p)], [v], [torch.zeros(())])
        with om.force(adamw="eager"):
            for _ in range(100):
                om.adamw([group], rng=rng)
        means[rng is None] = v.double().mean().item()
    assert means[True] == 0.75
    assert abs(means[False] - 0.75 * 0.999**100) < 5 * 2.0**-8 * math.sqrt(100 * 0.25 / 4096)


def test_random_words_depend_on_number_and_step_and_not_on_the_lists():
    def run(places: list[int], numbers: list[int] | None) -> list[torch.Tensor]:
        model = Model(torch.bfloat16)
        group = model.group(0)._replace(numbers=range(len(SHAPES)) if numbers is None else numbers).some(places)
        om.adamw([group], rng=om.Rng(4))
        return list(group.params)

    together, apart = run([0, 3, 5], None), [*run([0], None), *run([3], None), *run([5], None)]
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    assert not torch.equal(together[1], run([3], [0, 1, 2, 9, 4, 5])[0])


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
def test_gradients_laid_out_otherwise_and_parameters_with_gaps_are_stepped_alike(implementation):
    om.reset_stats()
    base = torch.randn(6, 8, dtype=torch.float64)
    grad = torch.randn(6, 8, dtype=torch.float64)
    makes = {
        "transposed gradient": (base.clone(), grad.t().contiguous().t()),
        "transposed both": (base.t().contiguous().t(), grad.t().contiguous().t()),
        "transposed parameter": (base.t().contiguous().t(), grad.clone()),
        "gaps": (torch.cat([base, base], 1)[:, :8], grad.clone()),
    }
    expected = reference.adamw(base, grad, torch.zeros_like(base), torch.zeros_like(base), 1)
    for name, (p, g) in makes.items():
        if name == "gaps" and implementation == "vendor":
            continue
        state = [torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())]
        with om.enabled(False) if implementation is None else om.force(adamw=implementation):
            om.adamw([om.AdamWGroup([p], [g], *([s] for s in state))])
        assert largest_difference([p, *state[:2]], list(expected)) < EXACT, name
    copies = [row.calls for row in om.stats().rows if row.implementation == "copy"]
    assert copies == ([2] if implementation == "vendor" else [])


def test_what_the_vendor_cannot_do_is_refused_in_words_when_asked_for_and_done_by_another_when_not():
    model = Model(torch.bfloat16, state=torch.float32)
    with om.force(adamw="vendor"), pytest.raises(om.UnsupportedError, match="needs one dtype, these are bf16, bf16 and fp32"):
        om.adamw([model.group(0)])
    om.reset_stats()
    om.adamw([model.group(0)])
    assert [row.implementation for row in om.stats().rows] == ["eager"]
    om.reset_stats()
    om.adamw([Model(torch.float32).group(0)])
    assert [row.implementation for row in om.stats().rows] == ["vendor"]


def test_autograd_learns_that_a_parameter_was_written():
    for implementation in IMPLEMENTATIONS:
        model = Model(torch.float32)
        before = model.params[0]._version
        with om.force(adamw=implementation):
            om.adamw([model.group(0)])
        assert model.params[0]._version > before


REFUSED = [
    ({"grads": []}, "adamw: grads must be a list of 6 tensors, one for each of params; got 0 tensors. Pass parallel lists."),
    (
        {"steps": [torch.zeros((), dtype=torch.int64)] * 6},
        "adamw: steps must be floating point (fp32, bf16, fp16 or fp64); got int64. Convert it: steps.to(torch.float32).",
    ),
    ({"steps": [torch.zeros((), dtype=torch.float64)] * 6}, "adamw: steps must be fp32; got fp64. Convert it: steps.float()."),
    (
        {"exp_avgs": [torch.zeros(s, dtype=torch.bfloat16) for s in SHAPES]},
        "adamw: exp_avg_sqs must be bf16, as exp_avgs is; got fp32. Convert one: exp_avg_sqs.to(exp_avgs.dtype).",
    ),
    (
        {"grads": [torch.zeros(2)] * 6},
        "adamw: grads must be of shape [31], as params is; got shape [2]. Expand it first if you mean broadcasting.",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_lists_that_do_not_belong_together_are_refused_in_words(change, sentence):
    with pytest.raises(om.ArgumentError) as error:
        om.adamw([Model(torch.float32).group(0)._replace(**change)])
    assert str(error.value) == sentence


def test_an_rng_that_is_none_is_refused_in_words():
    with pytest.raises(om.ArgumentError) as error:
        om.adamw([], rng=5)
    assert str(error.value) == "adamw: rng must be an ops_math.Rng or None; got int. Make one with ops_math.Rng(seed, device)."
