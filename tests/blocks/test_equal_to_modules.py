"""The blocks compute what the modules compute, forward and all gradients, for every row of the table of parts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ops_math as om
from tests.blocks.part_cases import ATTENTIONS, HAS_TRANSFORMERS, MLPS, Setup

ALL = {("residual_attention", name): make for name, make in ATTENTIONS.items()}
ALL |= {("residual_mlp", name): make for name, make in MLPS.items()}
each_part = pytest.mark.parametrize("key", ALL, ids=lambda key: f"{key[0]}: {key[1]}")


def run(key: tuple[str, str], setup: Setup, x: torch.Tensor, **options) -> torch.Tensor:
    block = om.residual_attention if key[0] == "residual_attention" else om.residual_mlp
    return block(x, setup.norm, setup.module, norm_first=setup.norm_first, **setup.kwargs, **options)


def with_gradients(setup: Setup, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output and the gradient of every input and parameter that has one."""
    y = f(x)
    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    names = [n for n, p in setup.holder.named_parameters()]
    found = torch.autograd.grad(y, [x, *setup.holder.parameters()], dy, allow_unused=True)
    return {"y": y.detach()} | {n: g for n, g in zip(["x", *names], found, strict=True) if g is not None}


@pytest.fixture(autouse=True)
def fresh_counters():
    om.reset_stats()


def widened(value):
    """Floating tensors of a keyword in float64."""
    if isinstance(value, tuple):
        return tuple(widened(v) for v in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def fallbacks() -> list[str]:
    return [row.fallback for row in om.stats().rows if row.phase == "block"]


@each_part
def test_a_block_equals_its_formula_in_float64_with_every_gradient(key):
    setup = ALL[key](torch.float64)
    x = setup.x(torch.float64)
    expected = with_gradients(setup, x, setup.formula)
    got = with_gradients(setup, x, lambda x: run(key, setup, x))
    assert fallbacks() == []
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 1e-12 * max(value.abs().max(), expected["x"].abs().max()), name


@each_part
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_block_errs_no_more_than_the_modules_do(key, dtype):
    setup = ALL[key](dtype)
    x = setup.x(dtype)
    plain = with_gradients(setup, x, setup.formula)
    ours = with_gradients(setup, x, lambda x: run(key, setup, x))
    assert fallbacks() == []
    exact_setup = ALL[key](torch.float64)
    exact_setup.holder.load_state_dict({n: t.double() for n, t in setup.holder.state_dict().items()})
    exact_setup.kwargs.update({name: widened(value) for name, value in setup.kwargs.items()})
    exact = with_gradients(exact_setup, x.detach().double().requires_grad_(), exact_setup.formula)
    floor = torch.finfo(dtype).eps / 2
    for name, r in exact.items():
        scale = max(r.norm(), 1e-3 * exact["x"].norm())
        error, allowed = ((v[name].double() - r).norm() / scale for v in (ours, plain))
        assert error <= 1.5 * allowed + floor, f"{name}: {error:.2e} against {allowed:.2e}"


@each_part
def test_switched_off_a_block_is_its_formula_bit_for_bit(key):
    setup = ALL[key](torch.float32)
    x = setup.x(torch.float32)
    with om.enabled(False):
        expected = with_gradients(setup, x, setup.formula)
        got = with_gradients(setup, x, lambda x: run(key, setup, x))
    assert om.stats().rows == ()
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@each_part
def test_without_gradients_nothing_is_saved_and_the_bits_are_the_same(key):
    setup = ALL[key](torch.float32)
    x = setup.x(torch.float32)
    y = run(key, setup, x).detach()
    saved: list[torch.Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        again = run(key, setup, x)
    assert not saved
    assert torch.equal(y, again)


@each_part
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(key, reentrant):
    setup = ALL[key](torch.float32)
    x = setup.x(torch.float32)
    results = []
    for f in (lambda x: run(key, setup, x), lambda x: checkpoint(lambda x: run(key, setup, x), x, use_reentrant=reentrant)):
        y = f(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in setup.holder.parameters() if p.grad is not None)])
        x.grad = None
        setup.holder.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@each_part
def test_a_deep_copy_of_the_modules_is_known_too(key):
    setup = ALL[key](torch.float32)
    twin = copy.deepcopy(setup.module)
    om.reset_stats()
    block = om.residual_attention if key[0] == "residual_attention" else om.residual_mlp
    block(setup.x(torch.float32), setup.norm, twin, norm_first=setup.norm_first, **setup.kwargs)
    reasons = fallbacks()
    assert reasons == []


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers: its Llama, Qwen2, Mistral and BERT are not installed")
def test_the_modules_of_transformers_were_among_those_tested():
    assert any("Hugging Face" in name for name in ATTENTIONS)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_bias_left_to_the_norm_gives_the_same_outputs_and_gradients(monkeypatch, recorded):
    from ops_math.blocks import norms

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)

    def both():
        with torch.set_grad_enabled(recorded):
            h = om.residual_attention(x, layer.norm1, layer, norm_first=False)
            y = om.residual_mlp(h, layer.norm2, layer, norm_first=False)
            return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])] if recorded else [y]

    usual = both()
    asked = []

    def on_a_gpu(kind, h):
        asked.append(kind)
        return kind == "layer_norm"

    monkeypatch.setattr(norms, "adds_bias", on_a_gpu)
    for a, b in zip(usual, both(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert asked == ["layer_norm"] * 2


def test_a_post_norm_stream_keeps_its_dtype_under_autocast_and_its_gradients_are_as_right_as_plain_ones():
    from ops_nn.adopt import adopt
    from ops_nn.models.bert import BertConfig, BertForMaskedLM

    ids = torch.randint(0, 500, (2, 48), generator=torch.Generator().manual_seed(3))

    def gradients(autocast, adopted):
        model = BertForMaskedLM(BertConfig(500, 64, 256, num_layers=4, num_heads=2))
        model.reset_parameters(torch.Generator().manual_seed(1))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout_p"):
                module.dropout_p = 0.0
        model.train()
        if adopted:
            adopt(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = model.bert(ids)
            loss = model(ids, labels=ids).loss
        assert hidden.dtype == torch.float32
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if "key.bias" not in n}  # theirs is zero but for rounding

    exact, plain, ours = gradients(False, False), gradients(True, False), gradients(True, True)
    ratios = [((ours[n] - r).norm() / (plain[n] - r).norm()).item() for n, r in exact.items()]
    assert sorted(ratios)[len(ratios) // 2] < 1.1
    assert max(ratios) < 1.6
