"""A transformer layer of blocks at level 2: the same bits however the batch is cut, and in any company."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ops_math as om
from ops_nn.modules import Attention, RMSNorm, RotaryEmbedding, SwiGLU
from tests.determinism.calls import differing

WIDTH = 72


class Llama(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn = RMSNorm(WIDTH), Attention(WIDTH, 4, 2)
        self.norm2, self.mlp = RMSNorm(WIDTH), SwiGLU(WIDTH, 135)
        self.rotary = RotaryEmbedding(WIDTH // 4)

    def forward(self, x):
        positions = torch.arange(x.shape[1])[None].expand(x.shape[0], -1)
        tables = self.rotary(x, positions)
        x = om.residual_attention(x, self.norm1, self.attn, position_embeddings=tables)
        return om.residual_mlp(x, self.norm2, self.mlp)


class Encoder(nn.Module):
    """One layer, post-norm, with GELU and biases."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 135, dropout=0.0, batch_first=True, activation="gelu")

    def forward(self, x):
        x = om.residual_attention(x, self.layer.norm1, self.layer, norm_first=False)
        return om.residual_mlp(x, self.layer.norm2, self.layer, norm_first=False)


def run(model, x, dy):
    """y, dx, and the gradients of the parameters."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad], [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(params=[Llama, Encoder], ids=["llama", "encoder"])
def model(request):
    torch.manual_seed(0)
    return request.param()


def test_a_layer_does_not_see_how_the_batch_is_cut(model):
    x, dy = torch.randn(6, 11, WIDTH), torch.randn(6, 11, WIDTH)
    om.reset_stats()
    with om.determinism(2):
        whole, _ = run(model, x, dy)
        assert {r.op for r in om.stats().rows if r.implementation == "vendor"} == set()
        for cuts in ([1] * 6, [2, 4], [5, 1]):
            parts = [run(model, a, b)[0] for a, b in zip(x.split(cuts), dy.split(cuts), strict=True)]
            assert differing(whole, [torch.cat(t) for t in zip(*parts, strict=True)]) == [], cuts


def test_gradients_of_token_blocks_add_up_to_those_of_the_batch(model):
    x, dy = torch.randn(6, 8, WIDTH), torch.randn(6, 8, WIDTH)
    with om.determinism(2, token_block=16):
        _, whole = run(model, x, dy)
        parts = [run(model, a, b)[1] for a, b in zip(x.split(2), dy.split(2), strict=True)]
    assert differing(whole, [a + b + c for a, b, c in zip(*parts, strict=True)]) == []


def test_a_layer_at_level_two_has_the_values_of_level_zero(model):
    x, dy = torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH)
    free = run(model, x, dy)
    with om.determinism(2):
        bound = run(model, x, dy)
    for a, b in zip(free, bound, strict=True):
        for s, t in zip(a, b, strict=True):
            assert torch.linalg.vector_norm(s - t) <= 1e-5 * torch.linalg.vector_norm(s)


def test_without_the_level_a_layer_does_see_it_so_the_tests_can_fail():
    torch.manual_seed(0)
    model = Llama()
    x, dy = torch.randn(6, 11, WIDTH), torch.randn(6, 11, WIDTH)
    whole, _ = run(model, x, dy)
    parts = [run(model, a, b)[0] for a, b in zip(x.split(1), dy.split(1), strict=True)]
    assert differing(whole, [torch.cat(t) for t in zip(*parts, strict=True)]) != []


def test_a_block_refuses_level_three_and_says_why(model):
    words = r"^a block at determinism level 3: it does not know the tensor-parallel degree"
    with om.determinism(3), pytest.raises(om.UnsupportedError, match=words):
        model(torch.randn(1, 4, WIDTH))


def test_compiled_a_layer_at_level_two_gives_the_bits_of_eager(model):
    x, dy = torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH)
    with om.determinism(2):
        eager = run(model, x, dy)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = compiled(leaf)
        y.backward(dy)
    assert differing(eager[0], [y.detach(), leaf.grad]) == []
    assert differing(eager[1], [p.grad for p in model.parameters() if p.grad is not None]) == []
