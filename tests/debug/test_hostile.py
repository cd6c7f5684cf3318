"""Models and runs that a checker meets in the wild."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import ops_math as om
from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker, Key
from ops_nn.debug.names import layout
from tests.adopt.models import bert, llama
from tests.debug.broken import run

CHECKER = ConsistencyChecker(observe="all")


def numbers(trace, module: str) -> list[int]:
    return [call.number for call in trace.calls if call.module == module]


class Twice(nn.Module):
    """Calls one module twice, holds another under two names, and takes any length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(self.inner(self.inner(x)))).sum()


def test_a_module_that_is_called_twice_has_two_numbers_and_the_second_is_told():
    a = Twice()
    b = copy.deepcopy(a)
    x = torch.randn(3, 8)
    calls = []

    def second_is_wrong(module, args, result):
        calls.append(1)
        return result * 1.5 if len(calls) == 2 else None

    b.inner.register_forward_hook(second_is_wrong)
    traces = [run(CHECKER, m, lambda m: m(x)) for m in (a, b)]
    assert numbers(traces[0], "inner") == [0, 1]
    report = CHECKER.compare(traces[1], trace=traces[0])
    assert report.first.key == Key("inner", 1, "forward", "")
    assert "inner, forward, call 2" in str(report)


def test_a_shared_module_is_numbered_under_its_first_name_and_that_is_said():
    trace = run(CHECKER, Twice(), lambda m: m(torch.randn(3, 8)))
    assert numbers(trace, "first") == [0, 1]
    assert numbers(trace, "second") == []
    assert "first is also second: its calls are numbered under the first name" in trace.notes


def test_a_shape_that_changes_between_calls_is_no_difference_and_between_runs_is_one():
    model = Twice()
    x, y = torch.randn(3, 8), torch.randn(5, 8)
    traces = [run(CHECKER, model, lambda m: m(x) + m(y)) for _ in range(2)]
    assert CHECKER.compare(traces[1], trace=traces[0]).verdict == "bitwise"
    other = run(CHECKER, model, lambda m: m(x) + m(x))
    report = CHECKER.compare(other, trace=traces[0])
    assert report.verdict == "different"
    row = next(row for row in report.rows if not row.difference.bitwise)
    assert row.key == Key("", 1, "input", "0")
    assert row.difference.l2 == float("inf")


class DistributedDataParallel(nn.Module):
    """Named as PyTorch's, which needs a process group: it holds its model as `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


def test_wrappers_are_taken_out_of_names_and_the_runs_compared():
    job = llama()
    a = run(CHECKER, job.model, job.loss)
    wrapped = DistributedDataParallel(copy.deepcopy(job.model))
    b = run(CHECKER, wrapped, job.loss)
    assert b.modules.keys() == a.modules.keys()
    assert "taken out of names: module" in b.notes
    report = CHECKER.compare(b, trace=a)
    assert report.verdict == "bitwise"
    assert len(report.rows) == len(a.records)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("_fsdp_wrapped_module", "0.weight"), ("_checkpoint_wrapped_module", "0.weight"), ("_orig_mod", "0.weight")],
)
def test_the_components_that_wrappers_put_into_names_are_taken_out(name, expected):
    model = nn.Module()
    setattr(model, name, nn.Sequential(nn.Linear(2, 2)))
    found = layout(model)
    assert "0" in found.places
    assert found.removed == (name,)


def test_a_module_of_a_model_that_is_called_module_keeps_its_name():
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert list(layout(model).places) == ["", "module"]


class Blocks(nn.Module):
    """Two blocks that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.square().sum()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_of_a_compiled_model_the_boundary_is_seen_and_that_is_said(whole):
    torch._dynamo.reset()
    model = Blocks()
    x = torch.randn(3, 8)
    a = run(CHECKER, model, lambda m: m(x))
    compiled = copy.deepcopy(model)
    if whole:
        compiled = torch.compile(compiled, backend="aot_eager")
    else:
        compiled.blocks[0].compile(backend="aot_eager")
    b = run(CHECKER, compiled, lambda m: m(x))
    where = "the model" if whole else "blocks.0"
    assert any(note.startswith(f"{where} is compiled: seen at its boundary") for note in b.notes), b.notes
    assert numbers(b, "") == [0]
    assert numbers(b, "blocks.0") == ([] if whole else [0, 1])
    assert numbers(b, "blocks.0.0") == []
    report = CHECKER.compare(b, trace=a)
    assert report.findings == ()
    assert any(row.key == Key("blocks.1.0", 0, "parameter gradient", "weight") for row in report.rows)


def test_frozen_parts_have_no_gradients_and_thawed_ones_are_told():
    job = llama(tied=False)
    job.model.model.embed_tokens.weight.requires_grad_(False)
    a = run(CHECKER, job.model, job.loss)
    assert Key("model.embed_tokens", 0, "parameter gradient", "weight") not in a.records
    assert CHECKER.compare(run(CHECKER, job.model, job.loss), trace=a).verdict == "bitwise"
    b = copy.deepcopy(job.model)
    b.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    report = CHECKER.compare(run(CHECKER, b, job.loss), trace=a)
    assert (report.first.module, report.first.direction) == ("model.layers.0.mlp.up_proj", "parameter gradient")
    assert report.first.cause.kind == "cut gradient"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.linear(x)).square().sum()


def test_an_in_place_module_shows_what_it_was_given_before_it_wrote():
    model, x = InPlace(), torch.randn(3, 8)
    checker = ConsistencyChecker(mode="full")
    trace = run(checker, model, lambda m: m(x))
    before, after = (trace.records[Key("act", 0, d, n)].tensor for d, n in (("input", "0"), ("forward", "")))
    assert (before < 0).any()
    assert torch.equal(after, before.relu())
    other = copy.deepcopy(model)
    other.act = nn.ReLU()
    assert checker.compare(run(checker, other, lambda m: m(x)), trace=trace).verdict in ("bitwise", "different")
    assert checker.lockstep(model, model, (x,)).verdict == "bitwise"


def test_traces_of_different_models_say_what_differs_first():
    jobs = llama(), bert()
    a, b = (run(CHECKER, job.model, job.loss) for job in jobs)
    with pytest.raises(om.UnsupportedError, match=r"differs first: the model: class: ops_nn\.models\.llama\.LlamaForCausalLM in A, "):
        CHECKER.compare(b, trace=a)
    deeper = llama(layers=4)
    report = CHECKER.compare(run(CHECKER, deeper.model, deeper.loss), trace=a)
    assert any(words == "model.layers.3 is in B only (ops_nn.models.llama.LlamaDecoderLayer)" for words in report.structure)
    assert report.verdict == "different"


def test_autocast_is_compared_with_itself_and_told_from_fp32():
    job = llama()

    def cast(m):
        with torch.autocast("cpu", torch.bfloat16):
            return job.loss(m)

    a, b = (run(CHECKER, job.model, cast) for _ in range(2))
    assert CHECKER.compare(b, trace=a).verdict == "bitwise"
    wide = run(CHECKER, job.model, job.loss)
    report = CHECKER.compare(a, trace=wide)
    assert report.first.cause.kind == "dtype"
    assert report.first.module == "model.layers.0.self_attn.q_proj"
    fused = copy.deepcopy(job.model)
    adopt(fused)
    assert CHECKER.compare(run(CHECKER, fused, cast), trace=a).findings == ()


def test_a_second_trace_inside_the_first_is_refused_and_the_first_goes_on():
    model = Twice()
    with CHECKER.trace(model) as trace:
        with pytest.raises(om.UnsupportedError, match=r"another trace is open\. Close it first"), ConsistencyChecker().trace(model):
            pass
        model(torch.randn(2, 8))
    assert numbers(trace, "inner") == [0, 1]


def test_gradients_that_were_there_before_or_were_cleared_are_said():
    model, x = Twice(), torch.randn(2, 8)
    model(x).backward()
    with CHECKER.trace(model) as trace:
        model(x).backward()
        model.zero_grad()
    assert any(note.startswith("parameters held gradients when the trace began") for note in trace.notes)
    assert any(note.startswith("no parameter held a gradient when the trace ended") for note in trace.notes)


def test_a_full_trace_stops_keeping_at_its_limit_and_says_so():
    job = llama()
    trace = run(ConsistencyChecker(mode="full", limit_bytes=100_000), job.model, job.loss)
    kept = sum({id(r.tensor): r.tensor.nbytes for r in trace.records.values() if r.tensor is not None}.values())
    assert 0 < kept <= 100_000
    assert any(note.startswith("tensors beyond 9.31e-05 GiB were not kept") for note in trace.notes)
    again = run(ConsistencyChecker(mode="full"), job.model, job.loss)
    assert CHECKER.compare(again, trace=trace).verdict == "bitwise"


LAYER, NOWHERE = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


def _small(step=lambda model: model(torch.ones(2, 3)).mean().backward()):
    """A trace of what `step` does with a small model, up to an exception if it raises one."""
    model, checker = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), ConsistencyChecker()
    with contextlib.suppress(ZeroDivisionError, RuntimeError), checker.trace(model):
        step(model)
    return checker.last


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda model: None, r"no module of its model was called inside its `with`"),
        (lambda model: 1 / 0, r"the run ended with ZeroDivisionError"),
        (lambda model: model(torch.ones(2, 7)), r"the run ended with RuntimeError"),
    ],
)
def test_a_trace_without_a_result_says_why_it_has_none(step, why):
    for a, b, name in ((_small(step), _small(), "A"), (_small(), _small(step), "B")):
        with pytest.raises(om.UnsupportedError, match=rf"^compare: {name} holds no result of a module: {why}\. Trace a whole step"):
            CHECKER.compare(b, trace=a)


def test_a_trace_is_not_compared_before_it_has_ended():
    model, other = nn.Linear(3, 2), _small()
    with CHECKER.trace(model) as trace:
        with pytest.raises(om.UnsupportedError, match=r"^compare: A holds no result of a module: its `with` has not ended\. "):
            CHECKER.compare(other, trace=trace)
        model(torch.ones(2, 3)).mean().backward()
    assert CHECKER.compare(trace, trace=trace).verdict == "bitwise"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda model: model(torch.ones(2, 3)), "saw no backward at all; was loss.backward() called inside the trace?"),
        (lambda model: model(torch.ones(2, 3)).mean() / (1 / 0), "saw no backward at all: the run ended with ZeroDivisionError"),
    ],
)
def test_a_run_without_a_backward_is_told_from_a_gradient_that_was_cut(step, words):
    model, traces = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), []
    for each in (step, lambda m: m(torch.ones(2, 3)).mean().backward()):
        with contextlib.suppress(ZeroDivisionError), CHECKER.trace(model) as trace:
            each(model)
        traces.append(trace)
    for order, name in ((1, "A"), (-1, "B")):
        a, b = traces[::order]
        cause = CHECKER.compare(b, trace=a).first.cause
        assert (cause.kind, cause.words) == ("no backward", f"{name} {words}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ConsistencyChecker(precision=0), r"precision must be a number above 0; got 0\. Pass 1e-6, or more to let more pass\."),
        (lambda: ConsistencyChecker(precision="1e-3"), r"precision must be a number above 0; got '1e-3'\. Pass 1e-6"),
        (lambda: ConsistencyChecker(mode="heavy"), r"mode must be one of 'light', 'full'; got 'heavy'\. Pick one of these\."),
        (lambda: ConsistencyChecker().trace(3).__enter__(), r"model must be a torch\.nn\.Module; got int\. Pass the model itself\."),
        (lambda: ConsistencyChecker().compare("x"), r"there must be a trace of A; got none\. Trace a run, or pass trace=\."),
        (lambda: ConsistencyChecker().lockstep(nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(3, 2)), r"scalar loss; got shape \[3, 2\]"),
        (lambda: CHECKER.lockstep(LAYER, LAYER, None), r"batch must be keywords, .*; got NoneType\. Pass e\.g\. lambda m: m\(x\)"),
        (lambda: CHECKER.lockstep(torch.ones(2), LAYER, LAYER), r"model_a must be a torch\.nn\.Module; got Tensor\. Pass the model"),
        (lambda: CHECKER.lockstep(LAYER, NOWHERE, {}), r"model_b must be a model with numbers; got one on the meta device\. Put it"),
        (lambda: CHECKER.trace(NOWHERE).__enter__(), r"one on the meta device\. Put it on a device: model\.to_empty\("),
        (lambda: CHECKER.compare(CHECKER, trace=3), r"compare: a trace must be a Trace or the folder of one; got int\. Pass what"),
        (lambda: CHECKER.compare(CHECKER, trace=_small()), r"got ConsistencyChecker\. Pass its \.last\."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(make, words):
    with pytest.raises(om.ArgumentError, match=words):
        make()
