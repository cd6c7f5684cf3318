"""Broken models are located to the module and the direction, and the cause is named; honest ones are not accused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker, replay_file
from tests.adopt.models import JOBS, llama
from tests.debug.broken import FAULTS, HalfValue, run

BY_TRACE = list(FAULTS)
# What no module does when it runs alone: gradients that a hook changes after the module is done, and weights that are shared.
BY_LOCKSTEP = [
    name
    for name in FAULTS
    if name not in ("gradients accumulated in bf16", "weights tied in one and not in the other", "a first-layer gradient 50 % off")
]


@pytest.mark.parametrize("name", BY_TRACE)
def test_a_broken_model_is_located_by_two_full_traces_and_the_cause_is_named(name, tmp_path):
    fault = FAULTS[name]()
    checker = ConsistencyChecker(mode="full", folder=tmp_path)
    a, b = (run(checker, model, fault.step) for model in (fault.a, fault.b))
    report = checker.compare(b, trace=a)
    assert report.verdict == "different"
    assert (report.first.module, report.first.direction) == (fault.module, fault.direction), str(report)
    assert report.first.cause.kind == fault.cause, str(report)
    assert report.first.tied == ()


@pytest.mark.parametrize("name", BY_TRACE)
def test_a_broken_model_is_located_from_figures_alone(name):
    fault = FAULTS[name]()
    checker = ConsistencyChecker(observe="all")
    a, b = (run(checker, model, fault.step) for model in (fault.a, fault.b))
    report = checker.compare(b, trace=a)
    assert (report.first.module, report.first.direction) == (fault.module, fault.direction), str(report)
    assert all(record.tensor is None for record in a.records.values())
    assert "mode='full'" in report.reproduce


@pytest.mark.parametrize("name", BY_LOCKSTEP)
def test_in_lockstep_the_culprit_stands_alone_and_its_file_reproduces_it(name, tmp_path):
    fault = FAULTS[name]()
    report = ConsistencyChecker(folder=tmp_path).lockstep(fault.a, fault.b, fault.step)
    guilty = {finding.module for finding in report.findings}
    assert report.first.direction == fault.direction, str(report)
    assert report.first.cause.kind == fault.cause, str(report)
    if name == "one layer in bf16":  # alone, each of its parts has bf16 weights, and most refuse an fp32 input
        assert guilty == {f"{fault.module}.{part}_layernorm" for part in ("input", "post_attention")}
        assert len(report.refusals) == 9
    else:
        assert guilty == {fault.module}, str(report)
    replayed = replay_file(report.dumped)
    assert replayed.differs
    assert replayed.notes == ()
    assert {r for line in replayed.lines for r in (line.repeats_a, line.repeats_b)} <= {0.0, None}
    assert replayed.lines[0].repeats_a == replayed.lines[0].repeats_b == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in JOBS if "Hugging" not in name])
def test_an_adopted_model_is_within_rounding_of_the_plain_one(name, dtype):
    job = JOBS[name]()
    model = job.model.to(dtype)
    checker = ConsistencyChecker(mode="full")
    a = run(checker, model, job.loss)
    fused = copy.deepcopy(model)
    adopt(fused)
    report = checker.compare(run(checker, fused, job.loss), trace=a)
    assert report.findings == (), str(report)
    assert report.verdict != "different", str(report)
    assert report.counts["within rounding"] > 5


@pytest.mark.parametrize("mode", ["light", "full"])
@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", ["our BERT", "TransformerEncoder, norm first", "TransformerEncoder, norm last, padded", "our Llama, tied"])
def test_nobody_is_accused_with_small_weights_or_large_ones(name, how, mode):
    # Small: a norm's input gradient cancels. Large, autocast: BERT's stream and its narrow copy each have a gradient.
    for std in (0.02, 0.2):
        job = JOBS[name]()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, p in job.model.named_parameters():
                p.normal_(0.0, std, generator=generator)
                if "norm" in key.lower() and key.endswith("weight"):
                    p.add_(1.0)
        model = job.model.bfloat16() if how == "bf16" else job.model
        fused = copy.deepcopy(model)
        adopt(fused)

        def step(m, job=job):
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                return job.loss(m)

        checker = ConsistencyChecker(mode=mode, observe="all", dump_on_failure=False)
        report = checker.compare(run(checker, fused, step), trace=run(checker, model, step))
        assert report.findings == (), str(report)
        assert "parameter gradient" in {row.key.direction for row in report.rows if row.verdict == "within rounding"}


@pytest.mark.parametrize("defect", ["value", "gradient"])
@pytest.mark.parametrize(
    "where", ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "model.layers.2.post_attention_layernorm", "lm_head"]
)
def test_a_thousandth_too_much_is_located_whatever_the_module(where, defect):
    job = llama(tied=False)
    b = copy.deepcopy(job.model)
    module = b.get_submodule(where)
    if defect == "value":
        module.register_forward_hook(lambda m, args, result: result * 1.001)
    else:
        module.register_full_backward_hook(lambda m, grads, given: tuple(g * 1.001 for g in grads))
    checker = ConsistencyChecker(mode="full", dump_on_failure=False)
    report = checker.compare(run(checker, b, job.loss), trace=run(checker, job.model, job.loss))
    assert report.first.module == where, str(report)
    assert report.first.direction == ("forward" if defect == "value" else "input gradient")
    if defect == "value" or "post" not in where:  # that one shares its tensor with the residual sum, whose gradient is right
        assert (report.first.cause.kind, "1.001 times" in report.first.cause.words) == ("factor", True)
    assert [f.module for f in report.findings] == [where]


def test_the_same_run_twice_is_bitwise():
    job = llama()
    checker = ConsistencyChecker(mode="full")
    a, b = (run(checker, job.model, job.loss) for _ in range(2))
    report = checker.compare(b, trace=a)
    assert report.verdict == "bitwise"
    assert len(report.rows) == len(a.records) > 200
    assert {key.direction for key in a.records} == {
        "parameter",
        "input",
        "forward",
        "output gradient",
        "input gradient",
        "parameter gradient",
    }


def test_modules_that_share_an_input_are_told_apart_in_lockstep_and_named_together_in_traces(tmp_path):
    job = llama()
    b = copy.deepcopy(job.model)
    b.model.layers[1].self_attn.v_proj.__class__ = HalfValue
    checker = ConsistencyChecker(mode="full", folder=tmp_path)
    report = checker.compare(run(checker, b, job.loss), trace=run(checker, job.model, job.loss))
    assert report.first.direction == "input gradient"
    assert {report.first.module, *report.first.tied} == {f"model.layers.1.self_attn.{name}_proj" for name in "qkv"}
    alone = checker.lockstep(job.model, b, job.loss)
    assert [(f.module, f.direction) for f in alone.findings] == [("model.layers.1.self_attn.v_proj", "input gradient")]


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_module_that_returns_what_it_was_given_excuses_nobody(name):
    job = JOBS["our BERT"]()  # its dropout of nothing stands before the first projections
    b = copy.deepcopy(job.model)
    where = f"bert.encoder.layer.0.attention.self.{name}"
    b.get_submodule(where).register_full_backward_hook(lambda m, grads, given: tuple(g * 1.001 for g in grads))
    checker = ConsistencyChecker(mode="full", dump_on_failure=False)
    report = checker.compare(run(checker, b, job.loss), trace=run(checker, job.model, job.loss))
    assert where in (report.first.module, *report.first.tied), str(report)
    assert report.first.direction == "input gradient"


def test_what_moves_as_much_when_a_weight_moves_by_a_unit_is_rounding():
    job = llama()
    checker = ConsistencyChecker(precision=1e-9, mode="full")
    a = run(checker, job.model, job.loss)
    before = [p.detach().clone() for p in job.model.parameters()]
    with checker.nudged(job.model):
        assert not any(torch.equal(p, q) for p, q in zip(job.model.parameters(), before, strict=True))
        noise = run(checker, job.model, job.loss)
    assert all(torch.equal(p, q) for p, q in zip(job.model.parameters(), before, strict=True))
    fused = copy.deepcopy(job.model)
    adopt(fused)
    b = run(checker, fused, job.loss)
    assert checker.compare(b, trace=a).verdict == "different"
    assert checker.compare(b, trace=a, noise=noise).findings == ()


def test_another_batch_is_said_before_all_else():
    job = llama()
    checker = ConsistencyChecker()
    a = run(checker, job.model, job.loss)
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(99))
    b = run(checker, job.model, lambda m: m(ids, ids).loss)
    report = checker.compare(b, trace=a)
    assert report.given.kind == "data"
    assert "first of all: data" in str(report)


def test_inside_a_fused_layer_the_operator_is_named_on_demand():
    job = llama()
    adopt(job.model)
    b = copy.deepcopy(job.model)
    b.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3
    checker = ConsistencyChecker(observe="operators", dump_on_failure=False)
    report = checker.compare(run(checker, b, job.loss), trace=run(checker, job.model, job.loss))
    assert (report.first.module, report.first.direction) == ("model.layers.1", "forward"), str(report)
    assert report.first.key.name == "rms_norm 2.0", str(report)  # the first is input_layernorm's
    assert "operator: rms_norm stands for F.rms_norm, torch.add" in str(report)
    assert report.to_json()["operators"]["attention"] == ["F.scaled_dot_product_attention"]
    assert str(report.first.cause) == "eps: post_attention_layernorm.variance_epsilon is 1e-05 in A and 0.001 in B"


class Scaled(torch.autograd.Function):
    """The identity, whose backward multiplies by a number."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


class WithCodeBetween(nn.Module):
    """Two products with code of its own between them, of which the backward is wrong where `factor` is not 1."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.start, self.a, self.b, self.factor = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 4), factor

    def forward(self, ids):
        return self.b(Scaled.apply(self.a(self.start(ids)), self.factor).relu())


@pytest.mark.parametrize("mode", ["light", "full"])
@pytest.mark.parametrize("factor", [0.5, 1.01, 2.0])
def test_a_wrong_backward_of_the_code_between_modules_is_located(factor, mode, tmp_path):
    checker = ConsistencyChecker(mode=mode, observe="all", folder=tmp_path)
    a, b = (run(checker, WithCodeBetween(k), lambda m: m(torch.arange(6)).square().mean()) for k in (1.0, factor))
    report = checker.compare(b, trace=a)
    assert report.verdict == "different", str(report)
    assert (report.first.module, report.first.direction, report.first.cause.kind) == ("a", "output gradient", "code between modules")
    assert f"{factor:.4g} times A's" in report.first.cause.words
    assert [f.module for f in report.findings] == ["a"]
    if mode == "full":
        assert replay_file(report.dumped).differs or "not run again" in str(replay_file(report.dumped))


@pytest.mark.parametrize("mode", ["light", "full"])
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda y: 2 * y.square().mean(), "2 times A's"),
        (lambda y: y.square().sum(), "24 times A's"),
        (lambda y: (y - 1).square().mean(), "another loss"),
    ],
)
def test_another_loss_behind_the_model_is_said_and_is_no_rounding(loss, words, mode):
    checker = ConsistencyChecker(mode=mode)
    a, b = (run(checker, WithCodeBetween(1.0), lambda m, f=f: f(m(torch.arange(6)))) for f in (lambda y: y.square().mean(), loss))
    report = checker.compare(b, trace=a)
    assert report.verdict == "different", str(report)
    assert report.given.kind == "loss"
    assert words in report.given.words
    assert report.findings == ()
