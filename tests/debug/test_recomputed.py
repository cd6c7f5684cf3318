"""Modules that activation checkpointing runs again keep their numbers, and their gradients are those of a run without it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ops_nn.debug import ConsistencyChecker
from tests.debug.broken import run

CHECKER = ConsistencyChecker(observe="all")


def numbers(trace, module: str) -> list[int]:
    """Numbers of the calls of a module."""
    return [call.number for call in trace.calls if call.module == module]


class Checkpointed(nn.Module):
    """Two blocks, each recomputed in the backward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().sum()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_not_a_second_call(reentrant):
    plain = Checkpointed(None)
    again = Checkpointed(reentrant)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(3, 8, requires_grad=True)
    a, b = (run(CHECKER, m, lambda m: m(x)) for m in (plain, again))
    for module in ("blocks.0", "blocks.1", "blocks.1.0"):
        assert numbers(b, module) == numbers(a, module) == [0, 1]
    assert list(b.calls) == list(a.calls)
    report = CHECKER.compare(b, trace=a)
    assert report.verdict == "bitwise", str(report)
    assert report.missing == []
    assert {row.key.direction for row in report.rows} >= {"input gradient", "output gradient", "parameter gradient"}
    assert any("recomputed in the backward count once" in note for note in b.notes)


class Tripled(torch.autograd.Function):
    """ReLU, with a gradient that is three times too large."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient * (ctx.saved_tensors[0] > 0)


class InRegions(nn.Module):
    """Calls two modules several times in functions, which may be recomputed."""

    def __init__(self, shape: str, reentrant: bool | None, between=torch.relu) -> None:
        super().__init__()
        self.one, self.two, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant
        self.body, self.between = getattr(self, shape), between

    def part(self, function, *args):
        return function(*args) if self.reentrant is None else checkpoint(function, *args, use_reentrant=self.reentrant)

    def both(self, x):
        return self.two(self.one(self.between(self.one(x))).relu()) + self.one(x.neg())

    def twice(self, x):
        return self.part(self.both, x)

    def in_a_row(self, x):
        return self.part(self.both, self.part(self.both, self.one(x)))

    def side_by_side(self, x):
        early, late = self.part(self.both, x), self.part(self.both, x + 1)
        return self.two(late.relu()) * early

    def beside(self, x):
        x = self.two(x)
        return x + self.part(self.both, x)

    def around(self, x):
        return self.both(self.part(self.both, self.one(self.part(self.both, x))))

    def nested(self, x):
        return self.part(self.around, self.part(self.around, x))

    def forward(self, x):
        return self.body(x).square().sum()


SHAPES = ("twice", "in_a_row", "side_by_side", "beside", "nested")


def in_regions(shape: str, reentrant: bool | None, **options) -> InRegions:
    torch.manual_seed(0)
    return InRegions(shape, reentrant, **options)


@pytest.mark.parametrize("mode", ["light", "full"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_modules_that_are_called_twice_in_one_recomputed_function_are_not_accused(shape, reentrant, mode):
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
    checker = ConsistencyChecker(mode=mode, observe="all")
    a, b = (run(checker, in_regions(shape, how), lambda m: m(x)) for how in (None, reentrant))
    report = checker.compare(b, trace=a)
    assert report.findings == (), str(report)
    assert report.missing == []
    assert numbers(b, "one") == numbers(a, "one")
    exact = {r.key for r in report.rows if r.difference.l2 <= 1e-6}
    assert {k for k in a.records if k.direction != "input" and k.module} <= exact, "also where sums are taken in another order"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_backward_in_a_recomputed_function_is_put_where_it_is_put_without_recomputation(shape):
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
    right = run(CHECKER, in_regions(shape, None), lambda m: m(x))
    wrong = [run(CHECKER, in_regions(shape, how, between=Tripled.apply), lambda m: m(x)) for how in (None, True)]
    plain, again = ([finding.key for finding in CHECKER.compare(trace, trace=right).findings] for trace in wrong)
    assert plain == again
    assert {key.module for key in plain} == {"one"}


def test_two_forwards_whose_backwards_run_in_their_order_keep_their_gradients():
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))

    def traced(how: bool | None):
        model = in_regions("in_a_row", how)
        with CHECKER.trace(model) as trace:
            losses = [model(x), model(2 * x)]
            for loss in losses:
                loss.backward()
        return trace

    report = CHECKER.compare(traced(True), trace=traced(None))
    assert report.findings == (), str(report)
    assert report.missing == []


def test_a_forward_without_gradients_before_the_backward_takes_no_gradients():
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))

    def traced(how: bool | None):
        model = in_regions("twice", how)
        with CHECKER.trace(model) as trace:
            loss = model(x)
            with torch.no_grad():
                model(x)
            loss.backward()
        return trace

    for how in (True, False):
        report = CHECKER.compare(traced(how), trace=traced(None))
        assert report.findings == (), str(report)
        assert report.missing == []


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_keep_their_calls_where_another_thread_runs_the_backward(shape):
    """As on a GPU: nodes that are made there are numbered from the start."""
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))

    def traced(how: bool | None):
        model = in_regions(shape, how)
        for _ in range(3):  # so that the numbers of this thread are others
            model(x)
        with CHECKER.trace(model) as trace:
            thread = threading.Thread(target=model(x).backward)
            thread.start()
            thread.join()
        return trace

    report = CHECKER.compare(traced(True), trace=traced(None))
    assert report.findings == (), str(report)
    assert report.missing == []


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_lockstep_looks_at_the_gradients_of_recomputed_modules(shape, reentrant):
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
    a, b = in_regions(shape, reentrant), in_regions(shape, reentrant)
    report = CHECKER.lockstep(a, b, lambda m: m(x))
    assert report.verdict == "bitwise", str(report)
    assert report.refusals == []
    seen = {(row.key.module, row.key.call) for row in report.rows if row.key.direction == "input gradient"}
    assert {("one", number) for number in range(len(numbers(run(CHECKER, a, lambda m: m(x)), "one")))} <= seen


def test_lockstep_finds_a_wrong_backward_in_a_recomputed_function_and_changes_no_gradient():
    x = torch.randn(3, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
    a, b = in_regions("nested", True), in_regions("nested", True)
    steps = []
    for model in (a, b):
        model.one.weight.register_post_accumulate_grad_hook(steps.append)
        model.one.weight.grad = torch.ones(8, 8)
        plain, wrong = model.one.forward, Tripled.apply if model is b else torch.relu
        model.one.forward = lambda given, plain=plain, wrong=wrong: wrong(plain(given) + 3.0) - 3.0
    report = CHECKER.lockstep(a, b, lambda m: m(x))
    assert report.first is not None
    assert (report.first.module, report.first.direction) == ("one", "input gradient")
    assert all(torch.equal(model.one.weight.grad, torch.ones(8, 8)) for model in (a, b))
    assert steps == []
