"""A mask from a pool depends on seed, module, step and place alone; PyTorch's own does not, and a test shows it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ops_math as om
from ops_nn import SeedPool
from ops_nn.modules import Attention


class Layer(nn.Module):
    """x + dropout(relu(linear(x)))."""

    def __init__(self, width=16):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.4)

    def forward(self, x):
        return x + self.dropout(self.linear(x).relu())


class Stack(nn.Module):
    """Three layers, each recomputed in the backward where asked."""

    def __init__(self, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else layer(x)
        return x


def pooled(model, seed=7):
    pool = SeedPool(seed)
    pool.attach(model)
    pool.step(0)
    return pool


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Stack()


X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))


def test_stock_dropout_draws_another_mask_when_it_is_recomputed_and_the_pools_does_not(model):
    seen = []

    def stock(x):
        y = F.dropout(x, 0.5)
        seen.append(y == 0)
        return y.square()

    x = torch.ones(4096, requires_grad=True)
    checkpoint(stock, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    wrong = (seen[0] != seen[1]).double().mean().item()
    assert 0.4 < wrong < 0.6  # half of the gradient is that of another forward

    seen.clear()
    pool = SeedPool(3)

    def keyed(x):
        y = om.dropout(x, 0.5, rng=pool.rng("dropout", x.device))
        seen.append(y == 0)
        return y.square()

    checkpoint(keyed, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_recomputed_layers_have_the_gradients_of_those_that_are_not(model):
    again = Stack(recompute=True)
    again.load_state_dict(model.state_dict())
    pooled(model), pooled(again)
    assert same(gradients(model, X), gradients(again, X))


def test_a_batch_cut_in_pieces_draws_the_masks_of_the_whole(model):
    pool = pooled(model)
    whole = model(X)
    parts = []
    for first in (0, 8, 16):
        pool.step(0, first_row=first)
        parts.append(model(X[first : first + 8]))
    assert torch.equal(whole == X, torch.cat(parts) == X)  # where the branch was dropped, x itself is left
    pool.step(0, first_row=1)
    assert not torch.equal(whole[:8] == X[:8], model(X[:8]) == X[:8])


def test_the_order_of_calls_and_other_random_modules_change_no_mask(model):
    pool = pooled(model)
    want = [layer(X) for layer in model.layers]
    pool.step(1)
    pool.step(0)
    torch.rand(17)
    pool.rng("another")
    got = [model.layers[i](X) for i in (2, 0, 1)]
    assert same([want[2], want[0], want[1]], got)


def test_another_step_call_layer_or_seed_draws_another_mask(model):
    pool = pooled(model)
    layer, ones = model.layers[0].dropout, torch.ones(512, 16)
    base = layer(ones)
    others = [layer(ones), model.layers[1].dropout(ones)]
    pool.step(1)
    others.append(layer(ones))
    pooled(model, seed=8)
    others.append(layer(ones))
    for other in others:
        assert abs(((base == 0) == (other == 0)).double().mean().item() - (0.4**2 + 0.6**2)) < 0.03


def test_compiled_it_draws_the_masks_of_eager_at_every_step_without_a_new_compilation(model):
    other = copy.deepcopy(model)
    pool, second = pooled(model), pooled(other)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        pool.step(step), second.step(step)
        assert torch.equal(model(X), compiled(X)), step
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_fused_block_draws_from_the_stream_of_its_module():
    torch.manual_seed(0)
    norm, attn = nn.RMSNorm(16), Attention(16, 2, dropout_p=0.5)
    x = torch.randn(2, 5, 16)
    pool = pooled(attn)
    assert pool.attach(attn).unkeyed == ()
    first = om.residual_attention(x, norm, attn)
    torch.rand(3)
    pool.step(1), pool.step(0)
    assert torch.equal(first, om.residual_attention(x, norm, attn))
    assert not torch.equal(first, om.residual_attention(x, norm, attn))
    alone = attn(x)
    pool.step(1), pool.step(0)
    assert torch.equal(alone, attn(x))


def test_a_keyed_dropout_leaves_an_encoder_layer_fused():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True, activation="gelu", norm_first=True)
    pool = pooled(layer)
    assert om.part_of(layer).reason == ""
    x = torch.randn(2, 5, 16)
    first = om.residual_attention(x, layer.norm1, layer), om.residual_mlp(x, layer.norm2, layer)
    pool.step(1), pool.step(0)
    again = om.residual_attention(x, layer.norm1, layer), om.residual_mlp(x, layer.norm2, layer)
    assert same(first, again)
    layer.eval()
    assert torch.equal(om.residual_mlp(x, layer.norm2, layer), om.residual_mlp(x, layer.norm2, layer))


def test_a_checkpoint_goes_on_with_the_masks_of_the_run(model):
    pool = pooled(model)
    pool.step(5)
    state = pool.state_dict()
    want = model(X)
    fresh = SeedPool(0)
    fresh.attach(model)
    fresh.load_state_dict(state)
    assert torch.equal(want, model(X))
    with pytest.raises(om.ArgumentError, match=r"^SeedPool\.load_state_dict: state must be seed, step and first_row; got seed\. Pass"):
        fresh.load_state_dict({"seed": 1})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, r"state must be seed, step and first_row; got NoneType\. Pass what state_dict\(\) gave\.$"),
        ([1], r"state must be seed, step and first_row; got list\. Pass"),
        ({}, r"state must be seed, step and first_row; got nothing\. Pass"),
        ({1: 2, "seed": 0}, r"state must be seed, step and first_row; got 1, seed\. Pass"),
        ({"seed": "x", "step": 1, "first_row": 0}, r"seed must be a whole number; got str\. Pass"),
        ({"seed": 0, "step": 1.0, "first_row": 0}, r"step must be a whole number; got float\. Pass"),
        ({"seed": 0, "step": True, "first_row": 0}, r"step must be a whole number; got bool\. Pass"),
        ({"seed": 0, "step": -1, "first_row": 0}, r"step must be at least 0 and below 4194304; got -1\. "),
        ({"seed": 0, "step": 1, "first_row": -3}, r"first_row must be at least 0; got -3\. "),
    ],
)
def test_a_state_that_is_no_pools_is_refused_and_changes_nothing(model, state, words):
    pool = pooled(model)
    pool.step(5)
    want = model(X)
    pool.step(5)
    with pytest.raises(om.ArgumentError, match=rf"^SeedPool\.load_state_dict: {words}"):
        pool.load_state_dict(state)
    assert pool.state_dict() == {"seed": 7, "step": 5, "first_row": 0}
    assert torch.equal(model(X), want)


def test_calls_that_draw_the_same_need_not_be_told_apart(model):
    """A step that is announced twice: whichever of both forwards is recomputed, its mask is the same."""
    pool, layer = pooled(model), model.layers[0]
    x = X.clone().requires_grad_()
    pool.step(0)
    plain = layer(x)
    wanted = torch.autograd.grad(plain.square().sum(), x)[0]
    pool.step(0)
    first = checkpoint(layer, x, use_reentrant=False)
    pool.step(0)
    second = checkpoint(layer, x, use_reentrant=False)
    assert torch.equal(first, plain)
    for y in (second, first):
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], wanted)


def test_detached_a_model_is_as_it_was(model):
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    pooled(model).detach(model)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before


def test_a_module_that_draws_in_its_own_way_is_named():
    model = nn.Sequential(nn.LSTM(4, 4, 2, dropout=0.5), nn.Dropout(0.5))
    found = SeedPool(1).attach(model)
    assert found.keyed == ("1",)
    assert found.unkeyed == (("0", "LSTM calls PyTorch's generator in its forward, unless a block reads it"),)


def test_a_module_that_is_keyed_in_a_block_alone_is_named_since_its_own_forward_draws_by_itself():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
    pool = SeedPool(1)
    found = pool.attach(layer)
    assert (found.keyed, found.unkeyed, found.in_blocks) == (("dropout", "dropout1", "dropout2"), (), ("self_attn",))
    assert str(found) == (
        "3 modules draw from the pool\n"
        "  self_attn: draws from the pool where om.residual_attention or om.residual_mlp reads it, by itself where its own forward runs"
    )
    x = torch.randn(2, 5, 16)

    def plain():
        pool.step(0)
        return layer.self_attn(x, x, x, need_weights=False)[0]

    def block():
        pool.step(0)
        return om.residual_attention(x, layer.norm1, layer.self_attn)

    assert not torch.equal(plain(), plain())
    assert torch.equal(block(), block())


def test_what_cannot_be_placed_is_refused_and_can_be_said(model):
    pool = pooled(model)
    layer = model.layers[0]
    x = X.clone().requires_grad_()

    def twice(x):
        return layer(layer(x))

    with pytest.raises(
        om.UnsupportedError, match=r"^SeedPool: layers\.0\.dropout is recomputed and 2 calls of it in this step and the one before could"
    ):
        checkpoint(twice, x, use_reentrant=False).sum().backward()

    def said(x):
        with pool.step(3):
            return layer(layer(x))

    pool.step(3)
    checkpoint(said, x, use_reentrant=False).square().sum().backward()
    recomputed, x.grad = x.grad, None
    said(x).square().sum().backward()
    assert torch.equal(recomputed, x.grad)


def test_steps_that_are_never_announced_are_refused(model):
    pooled(model)
    with torch.no_grad():
        for _ in range(64):
            model.layers[0].dropout(X)
        with pytest.raises(
            om.UnsupportedError, match=r"layers\.0\.dropout was called 64 times in step 0: .*Call pool\.step\(n\) before each"
        ):
            model.layers[0].dropout(X)
    with pytest.raises(om.ArgumentError, match=r"^SeedPool\.step: number must be at least 0 and below 4194304; got -1\."):
        SeedPool(0).step(-1)
    with pytest.raises(om.ArgumentError, match=r"^SeedPool\.step: number must be a whole number; got float\. Pass e\.g\. 0\.$"):
        SeedPool(0).step(1.5)
    with pytest.raises(om.ArgumentError, match=r"^SeedPool\.step: first_row must be a whole number; got bool\. Pass e\.g\. 0\.$"):
        SeedPool(0).step(1, first_row=True)


def test_a_recomputation_after_the_next_step_began_takes_its_own_masks_or_is_refused(model):
    pool, layer = pooled(model), model.layers[0]
    x = X.clone().requires_grad_()

    def gradient(begin):
        pool.step(5)
        loss = checkpoint(layer, x, use_reentrant=False).square().sum()
        begin()
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(lambda: None), gradient(lambda: pool.step(6)))
    with pytest.raises(om.UnsupportedError, match=r"recomputed and 2 calls of it in this step and the one before could be meant"):
        gradient(lambda: (pool.step(6), checkpoint(layer, x, use_reentrant=False)))


def test_a_copied_model_moves_with_the_steps_of_its_pool(model):
    pool = pooled(model)
    other = copy.deepcopy(model)
    pool.step(8)
    ours = model(X)
    pool.step(8)
    assert torch.equal(other(X), ours)
    pool.detach(other)
    assert "ops_math_rng" not in other.layers[0].dropout.__dict__
