"""Weights cast together once a forward: the same bits as cast where they are used, and never stale."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math import features
from ops_math.blocks import casts, packed
from ops_nn.models.bert import BertConfig, BertForMaskedLM

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(features, "copies_together", lambda device: not torch.compiler.is_compiling())


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = BertConfig(64, 32, 64, num_layers=2, num_heads=4, max_position_embeddings=16, attention_dropout=0.0, hidden_dropout=0.0)
    made = BertForMaskedLM(config)
    made.reset_parameters(torch.Generator().manual_seed(0))
    return made.train()


def run(model, x):
    for layer in model.bert.encoder.layer:
        x = om.residual_attention(x, None, layer.attention, norm_first=False)
        x = om.residual_mlp(x, None, layer, norm_first=False)
    return x


def gradients(model, x, scope):
    model.zero_grad()
    with torch.autocast("cpu", BF16):
        if scope:
            with om.cast_weights(model):
                y = run(model, x)
        else:
            y = run(model, x)
    y.float().sin().sum().backward()
    return [y, *(p.grad for p in model.bert.encoder.parameters())]


def test_the_bits_are_those_of_casts_where_they_are_used(model, monkeypatch):
    x = torch.randn(2, 8, 32)
    usual = gradients(model, x, False)
    found = []
    find = casts.Held.find
    monkeypatch.setattr(casts.Held, "find", lambda self, *a: found.append(find(self, *a)) or found[-1])
    for a, b in zip(usual, gradients(model, x, True), strict=True):
        assert torch.equal(a, b)
    assert len(found) == 2 * (3 + 3 + 2 + 3)  # of two layers: qkv weights, their biases, output, MLP without the bias that gelu adds
    assert all(c is not None for c in found)


def test_query_key_and_value_are_one_matrix_without_another_copy(model, monkeypatch):
    monkeypatch.setattr(packed, "cast_together", lambda *a: pytest.fail("the weights were cast again"))
    gradients(model, torch.randn(2, 8, 32), True)


def test_a_weight_written_inside_is_cast_again(model):
    x, weight = torch.randn(2, 8, 32), model.bert.encoder.layer[0].intermediate.dense.weight
    with torch.no_grad(), torch.autocast("cpu", BF16):
        pass
    with torch.autocast("cpu", BF16), om.cast_weights(model):
        before = run(model, x)
        with torch.no_grad():
            weight.mul_(2.0)
        after = run(model, x)
    with torch.autocast("cpu", BF16):
        assert torch.equal(after, run(model, x))
    assert not torch.equal(before, after)


def test_a_replaced_layer_is_cast_where_it_is_used_and_the_old_one_goes(model):
    x, dense = torch.randn(2, 8, 32), model.bert.encoder.layer[0].intermediate
    gradients(model, x, True)
    old = weakref.ref(dense.dense)
    dense.dense = nn.Linear(32, 64)
    usual = gradients(model, x, False)
    for a, b in zip(usual, gradients(model, x, True), strict=True):
        assert torch.equal(a, b)
    gc.collect()
    assert old() is None


def test_packed_refuses_what_does_not_lie_together(model):
    inner = model.bert.encoder.layer[0].attention.self
    weights = [inner.query.weight, inner.key.weight, inner.value.weight]
    with torch.autocast("cpu", BF16), om.cast_weights(model):
        assert casts.packed(weights, BF16).shape == (96, 32)
        assert torch.equal(casts.packed(weights, BF16), torch.cat(weights).to(BF16))
        assert casts.packed(weights[::-1], BF16) is None
        assert casts.packed([weights[0], weights[2]], BF16) is None
        assert casts.packed(weights, torch.float16) is None
    assert casts.packed(weights, BF16) is None


def test_a_size_that_is_no_multiple_of_eight_leaves_the_others_aligned():
    block = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3))
    with torch.autocast("cpu", BF16), om.cast_weights(nn.ModuleList([block])):
        for linear in (block[0], block[2]):
            narrow = casts.narrow(linear.weight, BF16)
            assert narrow.storage_offset() % 8 == 0
            assert torch.equal(narrow, linear.weight.to(BF16))


@pytest.mark.parametrize("case", ["no autocast", "no gradients", "switched off", "bf16 weights"])
def test_where_there_is_nothing_to_gain_nothing_is_held(model, case):
    autocast = torch.autocast("cpu", BF16, enabled=case != "no autocast")
    model = model.to(BF16) if case == "bf16 weights" else model
    with autocast, torch.set_grad_enabled(case != "no gradients"), om.enabled(case != "switched off"), om.cast_weights(model):
        assert casts.held() is None


def test_scopes_nest_and_end_with_an_error(model):
    with torch.autocast("cpu", BF16), om.cast_weights(model):
        outer = casts.held()
        with pytest.raises(ZeroDivisionError), om.cast_weights(model.bert.encoder.layer[0]):
            _ = 1 // (casts.held() is outer)
        assert casts.held() is outer
    assert casts.held() is None


def test_it_wants_a_module():
    with pytest.raises(om.ArgumentError, match=r"cast_weights: model must be a torch\.nn\.Module; got list"), om.cast_weights([]):
        pass
