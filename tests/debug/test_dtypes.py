"""Models in two dtypes: traces say what to do, and lockstep knows what the dtype explains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker
from tests.adopt.models import JOBS

NAMES = {"llama": ("our Llama, tied", "model.layers.1.mlp.down_proj"), "bert": ("our BERT", "bert.encoder.layer.1.output.dense")}
DTYPES = [torch.bfloat16, torch.float16]


def job_of(which: str):
    job = JOBS[NAMES[which][0]]()
    for module in job.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return job


def traced(checker, model, job):
    model.zero_grad()
    with checker.trace(model) as trace:
        job.loss(model).backward()
    return trace


@pytest.mark.parametrize("mode", ["light", "full"])
def test_traces_of_two_dtypes_are_different_and_say_what_to_do(mode):
    job = job_of("llama")
    other = copy.deepcopy(job.model).to(torch.bfloat16)
    checker = ConsistencyChecker(mode=mode, dump_on_failure=False)
    a, b, cast = (traced(checker, model, job) for model in (job.model, other, copy.deepcopy(job.model).to(torch.bfloat16)))
    report = checker.compare(b, trace=a)
    assert report.verdict == "different"
    said = str(report)
    assert "dtypes: A is in float32 and B in bfloat16" in said
    assert "model_a.to(torch.bfloat16)" in said
    assert "checker.lockstep(model_a, model_b, lambda model: model(...).loss)" in said
    assert report.to_json()["dtypes"] == ["float32", "bfloat16"]
    assert "model_a.to(torch.bfloat16)" in report.to_html()
    alike = checker.compare(b, trace=cast)
    assert alike.verdict == "bitwise"
    assert alike.dtypes is None


def test_one_layer_in_another_dtype_is_a_fault_and_no_migration():
    job = job_of("llama")
    other = copy.deepcopy(job.model)
    other.model.layers[1].mlp.to(torch.bfloat16)
    other.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    other.model.layers[1].mlp.register_forward_hook(lambda m, args, y: y.float())
    checker = ConsistencyChecker(mode="full", dump_on_failure=False)
    report = checker.compare(traced(checker, other, job), trace=traced(checker, job.model, job))
    assert report.dtypes is None
    assert report.first.cause.kind == "dtype"


def test_autocast_on_one_side_is_said_too():
    job = job_of("llama")
    checker = ConsistencyChecker(mode="full", dump_on_failure=False)
    a = traced(checker, job.model, job)
    with checker.trace(job.model) as b, torch.autocast("cpu", torch.bfloat16):
        loss = job.loss(job.model)
        loss.backward()
    said = str(checker.compare(b, trace=a))
    assert "dtypes: A is in no autocast and B in autocast to bfloat16" in said
    assert "once more under the autocast of B, and compare B with that" in said


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", NAMES)
def test_in_lockstep_a_model_in_another_dtype_is_within_rounding(which, dtype):
    job = job_of(which)
    for fused in (False, True):
        other = copy.deepcopy(job.model).to(dtype)
        if fused:
            adopt(other)
        for pair in ((job.model, other), *([] if fused else [(other, job.model)])):
            report = ConsistencyChecker(dump_on_failure=False).lockstep(*pair, job.loss)
            assert report.refusals == []
            assert report.verdict == "within rounding", str(report)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", NAMES)
def test_in_lockstep_a_fault_in_a_model_of_another_dtype_is_found(which, dtype):
    job, name = job_of(which), NAMES[which][1]
    for amount in (0.03, -0.1):
        other = copy.deepcopy(job.model).to(dtype)
        other.get_submodule(name).register_forward_hook(lambda m, args, y, amount=amount: y * (1 + amount))
        report = ConsistencyChecker(dump_on_failure=False).lockstep(job.model, other, job.loss)
        assert report.verdict == "different"
        assert report.first.module == name


def test_in_lockstep_other_weights_are_not_taken_for_cast_ones():
    job = job_of("llama")
    other = copy.deepcopy(job.model).to(torch.bfloat16)
    with torch.no_grad():
        other.model.layers[0].input_layernorm.weight.mul_(1.05)
    report = ConsistencyChecker(dump_on_failure=False).lockstep(job.model, other, job.loss)
    assert report.verdict == "different"
    assert report.first.module == "model.layers.0.input_layernorm"


def test_in_lockstep_what_the_other_dtype_cannot_hold_is_no_rounding():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight.fill_(1000.0)
        model[0].weight.fill_(10.0)
    x = torch.ones(2, 8)
    report = ConsistencyChecker(dump_on_failure=False).lockstep(model, copy.deepcopy(model).half(), lambda m: m(x).mean())
    turned = ConsistencyChecker(dump_on_failure=False).lockstep(copy.deepcopy(model).half(), model, lambda m: m(x.to(m[0].weight)).mean())
    assert "1: forward: beyond the range of float16, and finite in float32" in turned.refusals
    assert report.verdict == turned.verdict == "different"
    assert "1: forward: beyond the range of float16, and finite in float32" in report.refusals
    assert ConsistencyChecker().lockstep(model, copy.deepcopy(model).bfloat16(), lambda m: m(x).mean()).verdict == "within rounding"


def test_a_masks_lowest_number_is_the_lowest_of_the_other_dtype_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.score = nn.Linear(8, 8), Scores()

        def forward(self, x):
            y = self.first(x)
            return self.score(y, torch.full_like(y, torch.finfo(y.dtype).min)).square().mean()

    class Scores(nn.Module):
        def forward(self, y, mask):
            return torch.softmax(mask + y, -1)

    model, x = Masked(), torch.ones(2, 8)
    report = ConsistencyChecker(dump_on_failure=False).lockstep(model, copy.deepcopy(model).bfloat16(), lambda m: m(x))
    assert report.verdict == "within rounding", str(report)
