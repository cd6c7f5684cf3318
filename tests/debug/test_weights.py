"""Of a large weight a light trace reads an element of every row, which shows what makes weights other weights; a full one reads all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ops_nn.debug import ConsistencyChecker
from ops_nn.debug.figures import FEWEST, WHOLE_BELOW, step_of, thinned
from ops_nn.debug.trace import PARAMETER, Key
from tests.debug.broken import run

WIDTH, ROWS = 320, 400


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, ROWS), nn.Tanh(), nn.Linear(ROWS, 8))


def traced(mode: str, m: nn.Module):
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    return run(ConsistencyChecker(mode=mode, dump_on_failure=False), m, lambda m: m(x).square().mean())


def compared(a, b):
    return ConsistencyChecker(dump_on_failure=False).compare(b, trace=a)


def read(shape: tuple[int, ...]) -> torch.Tensor:
    """Which elements are read, as ones."""
    places = thinned(torch.arange(torch.Size(shape).numel()).view(shape))
    found = torch.zeros(torch.Size(shape).numel())
    found[places.flatten()] = 1.0
    return found.view(shape)


@pytest.mark.parametrize("shape", [(4096, 256), (300, 300), (257, 4096), (64, 4096), (11008, 512), (1000, 777)])
def test_every_row_is_read_and_as_many_columns_as_there_are_rows(shape):
    seen = read(shape)
    assert seen.sum(1).min() >= 1
    assert (seen.sum(0) > 0).sum() >= min(shape[1], shape[0] - 1)
    assert seen.sum() <= max(shape[0] + shape[0] // 200 + 2, 2 * FEWEST)


@pytest.mark.parametrize(
    "shape", [(7, 100_000), (2, 3, 70_000), (70_000, 3), (9000, 251), (70_000, 1), (512, 512, 3, 3), (1, 20_000), (90, 250)]
)
def test_of_odd_shapes_enough_is_read_in_every_column_of_short_rows(shape):
    seen = read(shape)
    assert FEWEST <= seen.sum() <= max(2 * FEWEST, seen.numel() // 200) or seen.numel() < 20 * FEWEST
    if shape[0] > 1000:
        assert seen.view(-1, shape[-1]).sum(0).min() > 0


@pytest.mark.parametrize("shape", [(), (100_000,), (127, 129), (0, 5), (5, 0)])
def test_vectors_and_what_is_small_are_read_whole(shape):
    t = torch.zeros(shape)
    assert thinned(t) is t
    assert step_of((WHOLE_BELOW // 128, 128)) > 1


def test_what_is_read_follows_the_shape_alone():
    x = torch.randn(300, 320)
    assert torch.equal(thinned(x.t().contiguous().t()), thinned(x))
    assert torch.equal(thinned(x.bfloat16()), thinned(x).bfloat16())


def row(w: torch.Tensor) -> None:
    w[17] *= 1.001


def last_row(w: torch.Tensor) -> None:
    w[-1] += 0.01


def column(w: torch.Tensor) -> None:
    w[:, 33] += 0.01


def exchanged(w: torch.Tensor) -> None:
    w[[3, 90]] = w[[90, 3]]


def rounded(w: torch.Tensor) -> None:
    w.copy_(w.bfloat16())


def shifted(w: torch.Tensor) -> None:
    w.copy_(w.roll(1, 1))


def seeded(w: torch.Tensor) -> None:
    w.copy_(torch.randn(w.shape, generator=torch.Generator().manual_seed(9)) * w.std())


@pytest.mark.parametrize("modes", [("light", "light"), ("light", "full"), ("full", "light"), ("full", "full")], ids=str)
@pytest.mark.parametrize("change", [row, last_row, column, exchanged, rounded, shifted, seeded])
def test_other_weights_are_named_in_every_mode(change, modes):
    a = model()
    b = copy.deepcopy(a)
    with torch.no_grad():
        change(b[0].weight)
    report = compared(traced(modes[0], a), traced(modes[1], b))
    assert report.first.module == "0"
    assert report.first.cause.kind == "other weights", str(report.first.cause)


def test_a_light_and_a_full_trace_of_one_run_agree_in_all_bits():
    traces = [traced(mode, model()) for mode in ("light", "full")]
    for pair in (traces, traces[::-1]):
        report = compared(*pair)
        assert report.verdict == "bitwise"
        assert Key("0", 0, PARAMETER, "weight") in [row.key for row in report.rows]


def test_a_weight_of_a_full_trace_that_was_not_kept_is_not_held_against_a_part():
    light, full = (traced(mode, model()) for mode in ("light", "full"))
    key = Key("0", 0, PARAMETER, "weight")
    full.records[key] = full.records[key]._replace(tensor=None)
    report = compared(light, full)
    assert report.verdict == "bitwise"
    assert key not in [row.key for row in report.rows]


def test_one_element_is_seen_in_the_result_and_what_was_not_read_is_said():
    a = model()
    b = copy.deepcopy(a)
    unread = (read((ROWS, WIDTH)) == 0).nonzero()[777].tolist()
    with torch.no_grad():
        b[0].weight[tuple(unread)] += 1.0
    light = compared(traced("light", a), traced("light", b)).first
    assert light.module == "0"
    assert light.cause.words.endswith("; an element of every row of its weights was compared, mode='full' compares all")
    full = compared(traced("full", a), traced("full", b)).first
    assert (full.module, full.cause.kind) == ("0", "other weights")


def test_weights_are_looked_at_once_for_all_their_names_and_change_nothing_that_is_seen_later():
    m = model()
    m.append(nn.Linear(ROWS, WIDTH, bias=False))
    m[3].weight = nn.Parameter(m[0].weight.detach().t().contiguous())
    tied = nn.ModuleDict({"a": m[0], "b": nn.Linear(WIDTH, ROWS)})
    tied["b"].weight = m[0].weight

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.out = tied, nn.Identity()

        def forward(self, x):
            return self.out(self.parts["a"].weight), self.parts["b"](x)

    whole = Whole()
    checker = ConsistencyChecker(observe="all")
    with checker.trace(whole) as trace:
        whole(torch.randn(2, WIDTH))
    a, b = (trace.records[Key(f"parts.{name}", 0, PARAMETER, "weight")].figures for name in "ab")
    assert a is b
    passed = trace.records[Key("out", 0, "forward", "")]
    assert passed.figures.l2 == pytest.approx(m[0].weight.norm().item(), rel=1e-5)
