"""A trace changes no bit of the training, and the operators that run under it are those that run without."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import ops_math as om
from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker
from ops_nn.optim import AdamW
from tests.adopt.models import JOBS

ADOPTED = [name for name in JOBS if "most tokens" not in name]
CHECKERS = {
    "light": ConsistencyChecker(),
    "light, all modules": ConsistencyChecker(observe="all"),
    "full": ConsistencyChecker(mode="full"),
    "light, operators": ConsistencyChecker(observe="operators"),
}


def train(job, model: nn.Module, checker: ConsistencyChecker | None, steps: int = 3) -> tuple[dict, list[torch.Tensor]]:
    """What ran, and every loss, gradient and weight."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    om.reset_stats()
    kept = []
    for _ in range(steps):
        if checker is None:
            loss = job.loss(model)
            loss.backward()
        else:
            with checker.trace(model):
                loss = job.loss(model)
                loss.backward()
        kept += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    rows = {(r.op, r.phase, r.implementation, r.reason, r.fallback): (r.calls, r.bytes) for r in om.stats().rows}
    return rows, [*kept, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("how", CHECKERS)
@pytest.mark.parametrize("name", ADOPTED)
def test_the_operators_and_the_bits_are_those_without_the_checker(name, how):
    job = JOBS[name]()
    adopt(job.model)
    twin = copy.deepcopy(job.model)
    torch.manual_seed(3)
    rows, bits = train(job, job.model, None)
    torch.manual_seed(3)
    seen, traced = train(job, twin, CHECKERS[how])
    assert rows
    assert seen == rows
    assert len(bits) == len(traced)
    assert all(torch.equal(a, b) for a, b in zip(bits, traced, strict=True))


def test_hooks_on_layers_would_be_seen_by_these_very_tests():
    job = JOBS["our Llama, tied"]()
    adopt(job.model)
    twin = copy.deepcopy(job.model)
    rows, _ = train(job, job.model, None)
    for module in twin.modules():
        module.register_forward_hook(lambda module, args, result: None)
    hooked, _ = train(job, twin, None)
    assert hooked != rows


def test_nothing_is_left_behind_after_a_trace_or_an_exception_in_one():
    job = JOBS["our Llama, tied"]()
    before = {name: (set(vars(m)), m.__dict__["_forward_hooks"]) for name, m in job.model.named_modules()}
    plain = nn.Module.__call__
    checker = ConsistencyChecker(mode="full")
    traces = []

    def fails() -> None:
        with checker.trace(job.model) as trace:
            traces.append(trace)
            assert nn.Module.__call__ is not plain
            job.loss(job.model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    trace = traces[0]
    assert nn.Module.__call__ is plain
    assert {name: (set(vars(m)), m.__dict__["_forward_hooks"]) for name, m in job.model.named_modules()} == before
    assert len(trace.records) > 100
    assert "the run ended with ZeroDivisionError" in trace.notes


def test_dropout_draws_what_it_draws_without():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    with ConsistencyChecker(mode="full").trace(model):
        got = model(x)
    assert torch.equal(expected, got)


class _Elsewhere:
    """Figures as a GPU's: what is added is launched, and nothing of it is read before all is fetched."""

    def __init__(self) -> None:
        self.added: list[torch.Tensor] = []
        self.sent = self.fetched = 0

    device = torch.device("cpu")

    @property
    def count(self) -> int:
        return len(self.added)

    def add(self, tensors: list[torch.Tensor], sketch: bool) -> None:
        self.added += tensors

    def add_every(self, tensors: list[torch.Tensor], steps: list[int], sketch: bool) -> None:
        self.added += tensors

    def send(self):
        self.sent += 1

        def arrived() -> torch.Tensor:
            self.fetched += 1
            return torch.zeros(self.count, 86, dtype=torch.float64)

        return arrived


def test_figures_arrive_in_one_transfer_and_nothing_waits_for_the_device_before(monkeypatch):
    elsewhere = _Elsewhere()
    monkeypatch.setattr(om.FigureTable, "_part", lambda table, device: table._parts.setdefault(device, elsewhere))
    job = JOBS["our Llama, tied"]()
    waits = []
    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, *a, _m=method, _n=name: (waits.append(_n), _m(self, *a))[1])
    with ConsistencyChecker(observe="all").trace(job.model) as trace:
        job.loss(job.model).backward()
    assert (waits, elsewhere.sent, elsewhere.fetched) == ([], 1, 0), "the step is over, and nobody has looked"
    assert len(trace.records) > 100
    assert len(copy.deepcopy(trace).records) == len(trace.records)
    assert elsewhere.fetched == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA or ROCm device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_traced_step_on_a_gpu_waits_for_nothing_and_sees_what_an_unhurried_one_sees():
    job = JOBS["our Llama, tied"]()
    model = job.model.to("cuda")
    ids = torch.arange(24, device="cuda").view(2, 12)

    def step(checker, mode):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            model.zero_grad()
            with checker.trace(model) as trace:
                model(ids, labels=ids).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return trace

    checker = ConsistencyChecker(observe="all")
    unhurried = step(checker, "default")
    found = step(checker, "error")
    for p in model.parameters():
        p.grad.fill_(float("nan"))  # what is written afterwards is not what was seen
    assert {k: r.figures for k, r in found.records.items()} == {k: r.figures for k, r in unhurried.records.items()}


def test_a_trace_that_was_not_looked_at_yet_goes_to_another_process_whole():
    job = JOBS["our Llama, tied"]()
    with ConsistencyChecker().trace(job.model) as trace:
        job.loss(job.model).backward()
    again = pickle.loads(pickle.dumps(trace))
    assert again.records.keys() == trace.records.keys()
    assert len(trace.records) > 20


def test_a_sum_that_one_layer_leaves_to_the_next_is_looked_at_once_and_again_when_it_was_written_to():
    class Leaves(nn.Module):
        def forward(self, stream):
            return stream

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = Leaves(), Leaves(), Leaves()

        def forward(self, x, branch):
            stream = self.second(self.first(om.Unsummed(x, branch)))
            with torch.no_grad():
                branch.add_(1.0)
            return self.third(stream)

    x, branch = torch.randn(40, 50), torch.randn(40, 50)
    before, after = x + branch, x + (branch + 1.0)
    model = Whole()
    checker = ConsistencyChecker(observe="all")
    with checker.trace(model) as trace:
        model(x, branch)
    figures = {(k.module, k.direction): r.figures for k, r in trace.records.items() if k.module and k.name in ("", "0")}
    assert figures["first", "input"] is figures["second", "forward"]
    assert figures["third", "input"] is figures["third", "forward"]
    assert figures["first", "input"].l2 == pytest.approx(before.norm().item(), rel=1e-6)
    assert figures["third", "input"].l2 == pytest.approx(after.norm().item(), rel=1e-6)


def test_parameters_and_their_gradients_are_looked_at_together(monkeypatch):
    together = []
    plain = om.FigureTable.add_all
    monkeypatch.setattr(
        om.FigureTable, "add_all", lambda self, tensors, **how: (together.append(len(tensors)), plain(self, tensors, **how))[1]
    )
    job = JOBS["our Llama, tied"]()
    with ConsistencyChecker().trace(job.model):
        job.loss(job.model).backward()
    count = len(list(job.model.parameters()))
    assert together[0] >= count
    assert together[-1] == count
