"""The step on a GPU: within the budget, true to its tables, inside CUDA graphs, and beside PyTorch's fused step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import Parameter

import ops_math as om
from ops_math.ops.adamw.problem import CASES
from ops_nn.optim import AdamW, clip_scale
from tests.conformance.test_adamw_kernel import broken, moving_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA or ROCm device"),
]
STEP = 1e-2  # the learning rate, which is about what one step moves a parameter


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_are_within_the_budget_on_the_gpu(case):
    assert broken(case, "cuda") == []


def test_tables_follow_what_moves_on_the_gpu():
    assert moving_tables("cuda") == []


def a_model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(64, 257), torch.nn.LayerNorm(257), torch.nn.GELU(), torch.nn.Linear(257, 3)).cuda()


def gap(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_it_runs_its_kernel_and_goes_where_pytorchs_fused_step_goes():
    ours, theirs = a_model(), a_model()
    one, other = AdamW(ours.parameters(), lr=STEP), torch.optim.AdamW(theirs.parameters(), lr=STEP, fused=True)
    om.reset_stats()
    for _ in range(20):
        x = torch.randn(8, 64, device="cuda")
        for model, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert {row.implementation for row in om.stats().rows if row.op == "adamw"} == {"triton_gpu"}
    assert gap(ours, theirs) < STEP / 10  # a chaotic walk: gradients near 0 change sign by rounding, and Adam moves by signs


def test_a_captured_step_follows_its_learning_rate_and_is_not_disturbed_by_steps_outside():
    graphed, plain = a_model(), a_model()
    rates = [torch.tensor(STEP, device="cuda") for _ in range(2)]
    optimizers = [AdamW(m.parameters(), lr=lr) for m, lr in ((graphed, rates[0]), (plain, rates[1]))]
    x = torch.randn(8, 64, device="cuda")

    def work(model: torch.nn.Module, optimizer: AdamW) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step(clip=clip_scale(model.parameters(), 0.1).coefficient)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work(graphed, optimizers[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad()
    with torch.cuda.graph(graph):
        graphed(x).square().mean().backward()
        optimizers[0].step(clip=clip_scale(graphed.parameters(), 0.1).coefficient)
    for _ in range(2):
        work(plain, optimizers[1])
    for step in range(12):
        for rate in rates:
            rate.fill_(STEP / (1 + step))
        x.copy_(torch.randn(8, 64, device="cuda"))
        if step % 3 == 2:  # outside, with gradients of its own, between replays
            kept = [p.grad for p in graphed.parameters()]
            work(graphed, optimizers[0])
            for p, g in zip(graphed.parameters(), kept, strict=True):
                p.grad = g
        else:
            graph.replay()
        work(plain, optimizers[1])
    assert gap(graphed, plain) < STEP / 10
    assert int(optimizers[0].state[graphed[0].weight]["step"]) == 14


def test_a_first_step_inside_a_capture_is_refused_in_words():
    model = a_model()
    optimizer = AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    fresh = AdamW(model.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(om.UnsupportedError, match="Take one step outside the capture first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh.step()


def test_a_loss_scaler_skips_and_unscales_without_waiting():
    model = a_model()
    optimizer, scaler = AdamW(model.parameters(), lr=STEP), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        if step == 2:
            model[0].weight.grad[0, 0] = float("inf")
        before = [p.clone() for p in model.parameters()]
        torch.cuda.set_sync_debug_mode("error" if step == 1 else "default")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step == 2)
    assert int(optimizer.state[model[0].weight]["step"]) == 3


def test_a_steady_step_waits_for_nothing_and_repeats_its_bits():
    def run() -> list[Parameter]:
        model = a_model()
        optimizer = AdamW(model.parameters(), lr=STEP)
        for step in range(6):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.param_groups[0]["lr"] = STEP / (1 + step)
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            optimizer.step()
            torch.cuda.set_sync_debug_mode("default")
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
