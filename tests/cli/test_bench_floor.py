"""The floor of a step: every product counted once, the others' bytes, the fastest attention; shares follow."""

import math

import pytest
import torch

from ops_math.cli.bench import contenders, floor, floor_attention, steps
from ops_math.cli.bench.clock import Sample
from ops_nn.models import PRESETS

SETUP = steps.Setup(2, 16, torch.float32, False)
AUTOCAST = steps.Setup(2, 16, torch.float32, True)


class ConstantClock:
    """Every call takes 10 us, and is run once."""

    fixed_s = 0.0

    def take(self, calls, order):
        for timed in calls.values():
            timed.run(timed.prepare())
        return [Sample(10.0, 1.0) for _ in order]


def runner(name, variant, setup=SETUP):
    return contenders.Runner(name, variant, setup.batch, setup.seq, setup.dtype, setup.autocast, "cpu")


def operations(products):
    """Of matrix products: twice the product of their three sizes."""
    total = 0
    for product, count in products.items():
        a, b = [x for x in product.args if isinstance(x, floor.Shaped)][-2:]
        total += count * 2 * math.prod(a.shape) * b.shape[-1]
    return total


@pytest.mark.parametrize("variant", ["ops", "packed"])
@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny"])
def test_the_products_of_a_step_are_three_for_every_matrix_and_token(name, variant):
    """6 N T operations (forward, both gradients), N without embeddings that nothing is multiplied with."""
    one = runner(name, variant)
    matrices = {n: p for n, p in one.model.named_parameters() if p.dim() == 2}
    tables = ("position_embeddings", "token_type_embeddings")
    multiplied = sum(p.numel() for n, p in matrices.items() if not any(t in n for t in tables))
    products, calls = floor.seen(one)
    assert operations(products) == 6 * multiplied * one.tokens
    assert {name for name, _, _ in calls}.isdisjoint({"attention", "linear_cross_entropy"})


def test_packed_weights_make_fewer_and_wider_products():
    apart, packed = (floor.seen(runner("llama-tiny", variant))[0] for variant in ("ops", "packed"))
    layers = PRESETS["llama-tiny"].config.num_layers
    assert sum(apart.values()) - sum(packed.values()) == layers * 3 * (2 + 1), "q, k, v as one and gate, up as one"


def test_products_keep_the_dtypes_of_autocast_and_casts_are_counted():
    one = runner("bert-tiny", "packed", AUTOCAST)
    products, calls = floor.seen(one)
    dtypes = {a.dtype for p in products for a in p.args if isinstance(a, floor.Shaped) and len(a.shape) == 2}
    assert dtypes == {torch.bfloat16}
    found = floor.moved(one, calls)
    matrices = sum(p.numel() for p in one.model.parameters() if p.dim() > 1)
    assert found["casts"] == 6 * matrices
    assert found["optimizer"] == 28 * sum(p.numel() for p in one.model.parameters())
    assert found["operators"] > 0


def test_parts_are_counts_times_times_and_shares_follow():
    least = floor.of("llama-tiny", SETUP, lambda: runner("llama-tiny", "packed"), ConstantClock(), lambda: None)
    count = sum(floor.seen(runner("llama-tiny", "packed"))[0].values())
    assert least.parts["products"] == pytest.approx(10.0 * count)
    assert least.parts["attention"] == pytest.approx(PRESETS["llama-tiny"].config.num_layers * 20.0)
    assert least.bandwidth == pytest.approx(2 * floor.COPIED["cpu"] / 10.0)
    assert least.us == pytest.approx(sum(least.parts.values()))
    row = floor.row("llama-tiny", SETUP, least, {"plain": least.us / 1e3 * 2, "packed": least.us / 1e3}, gpu=False)
    assert row["shares"] == {"plain": 0.5, "packed": 1.0}
    assert sum(row["parts"].values()) == pytest.approx(1.0, abs=1e-3)
    assert not {"floor_ms", "parts_ms", "products"} & set(row), "no times on a CPU"
    words = floor.describe(row)
    assert "floor over step time: packed 1.000, plain 0.500" in words
    with_times = floor.describe(floor.row("llama-tiny", SETUP, least, {"plain": 1.0}, gpu=True))
    assert f"llama-tiny floor: {least.us / 1e3:.1f} ms = products {least.parts['products'] / 1e3:.2f} ms" in with_times
    held = floor.describe(floor.row("llama-tiny", SETUP, least._replace(held_us=500.0), {"plain": 1.0}, gpu=True))
    assert "at clocks held under load: 0.5 ms; over step time: plain 0.500" in held


def test_the_floor_held_makes_each_call_as_often_as_a_step_and_moves_the_rest(monkeypatch):
    monkeypatch.setattr(floor, "SETTLED", 0.0)
    made = []
    size = floor.COPIED["cpu"]
    copied = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda a, b: made.append(a.numel() * 8) or copied(a, b))
    us = floor.held([(lambda: made.append("p"), 3)], [(lambda: made.append("a"), 2)], 4 * size + 8000, torch.device("cpu"))
    assert us > 0
    assert made == 4 * ["p", "p", "p", "a", "a", 2 * size, 2 * size, 8000]


def test_a_layer_of_attention_runs_whoever_was_fastest_again_and_again(monkeypatch):
    asked = []
    ways = floor_attention.ways

    def watched(name, way):
        return lambda *tensors: asked.append(name) or way(*tensors)

    monkeypatch.setattr(floor_attention, "ways", lambda *a: ({n: watched(n, w) for n, w in ways(*a)[0].items()}, {}))
    shape = floor_attention.shape_of("llama-tiny", SETUP)
    run = floor_attention.layer(shape, torch.device("cpu"), floor_attention.Fastest(1.0, "torch:math", "ops_math:eager", {}))
    assert asked == ["torch:math", "ops_math:eager", "ops_math:eager"], "once each for the output's shape, once more to go back from"
    run()
    run()
    assert asked[3:] == ["torch:math", "torch:math"]


def test_the_fastest_attention_is_found_forward_and_backward_apart_and_who_cannot_run_is_named():
    class Clock(ConstantClock):
        def take(self, calls, order):
            own = {"torch:flash": 3.0, "ops_math:eager": 5.0}
            backward = any(timed.prepare() is not None for timed in calls.values())
            return [Sample(own.get(name, 9.0) if not backward else 12.0 - own.get(name, 9.0), 1.0) for name in order]

    shape = floor_attention.shape_of("llama-tiny", SETUP)
    assert shape == floor_attention.Shape(2, 16, 4, 2, 64, True, 0.0, torch.float32, 10)
    best = floor_attention.fastest(shape, torch.device("cpu"), Clock())
    assert (best.fwd, best.us) == ("torch:flash", 10 * (3.0 + 3.0))
    assert best.bwd not in ("torch:flash", "ops_math:eager")
    assert best.absent == {"fa4": "flash-attn-4 is not installed"}
    dropped = floor_attention.fastest(floor_attention.shape_of("bert-tiny", SETUP), torch.device("cpu"), ConstantClock())
    assert dropped.absent["fa4"] == "it has no dropout"
    assert "torch:flash" in dropped.absent, "PyTorch's flash attention on a CPU takes no dropout"


def test_a_step_is_measured_with_its_floor(monkeypatch):
    monkeypatch.setattr(steps, "MEASURED", 2)
    monkeypatch.setattr(steps, "FEW", 0)
    monkeypatch.setattr(steps, "clock_for", lambda device: ConstantClock())
    found = steps.measure("llama-tiny", ["plain", "documents"], "cpu", setup=SETUP, with_floor=True)
    assert [row["variant"] for row in found.rows] == ["plain", "documents", "floor"]
    assert set(found.rows[-1]["shares"]) == {"plain"}, "a floor is of one work: full sequences"
    assert steps.describe(found.rows[-1]).startswith("llama-tiny floor: = products")
