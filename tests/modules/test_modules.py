"""The modules for new models: their formulas, parameter names of checkpoints, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ops_math as om
from ops_nn.models.llama import LlamaAttention, LlamaConfig, LlamaMLP, LlamaRotaryEmbedding
from ops_nn.modules import Attention, CrossEntropy, LayerNorm, LinearCrossEntropy, RMSNorm, RotaryEmbedding, SwiGLU


def test_norms_are_those_of_pytorch():
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    rms, layer = RMSNorm(16, eps=1e-3, dtype=torch.float64), LayerNorm(16, eps=1e-3, dtype=torch.float64)
    for p in (*rms.parameters(), *layer.parameters()):
        torch.nn.init.normal_(p)
    torch.testing.assert_close(rms(x), F.rms_norm(x, (16,), rms.weight, 1e-3))
    torch.testing.assert_close(layer(x), F.layer_norm(x, (16,), layer.weight, layer.bias, 1e-3))
    assert LayerNorm(16, bias=False).bias is None


def test_gemmas_norm_starts_at_zero_and_adds_one():
    norm = RMSNorm(8, weight_offset=1.0)
    assert norm.weight.eq(0).all()
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), None, 1e-6))


def test_attention_and_mlp_take_the_weights_of_a_llama_checkpoint():
    config = LlamaConfig(64, 32, 48, 1, 4, 2, 8)
    theirs, ours = LlamaAttention(config).double(), Attention(32, 4, 2, head_dim=8, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    tables = LlamaRotaryEmbedding(config)(x)
    torch.testing.assert_close(ours(x, tables), theirs(x, tables))
    gated, mine = LlamaMLP(config), SwiGLU(32, 48)
    mine.load_state_dict(gated.state_dict())
    torch.testing.assert_close(mine(x.float()), gated(x.float()))


def test_attention_and_the_block_around_it_agree_on_masks_and_documents():
    attn = Attention(32, 4, 2, dtype=torch.float64)
    x, ends = torch.randn(9, 32, dtype=torch.float64), torch.tensor([0, 4, 9])
    torch.testing.assert_close(x + attn(x, cu_seqlens=ends), om.residual_attention(x, None, attn, cu_seqlens=ends))
    batch, mask = x[None], torch.rand(9, 9) > 0.3
    real = torch.arange(9)[None] < 7
    torch.testing.assert_close(batch + attn(batch, mask=mask), om.residual_attention(batch, None, attn, mask=mask))
    torch.testing.assert_close(batch + attn(batch, key_padding_mask=real), om.residual_attention(batch, None, attn, key_padding_mask=real))


def test_attention_drops_in_training_only():
    attn = Attention(32, 4, dropout_p=0.5)
    x = torch.randn(1, 6, 32)
    assert torch.equal(attn(x, rng=om.Rng(1)), attn(x, rng=om.Rng(1)))
    assert not torch.equal(attn(x, rng=om.Rng(1)), attn(x, rng=om.Rng(2)))
    attn.eval()
    assert torch.equal(attn(x), attn(x))


def test_rotary_tables_keep_their_precision_in_a_bf16_model():
    tables = RotaryEmbedding(8, theta=500.0)
    x = torch.empty(1, 4096, 8)
    exact = torch.arange(4096).double()[:, None] * 500.0 ** -(torch.arange(0, 8, 2).double() / 8)
    for model in (tables, torch.nn.Sequential(tables).to(torch.bfloat16)[0]):
        cos, sin = model(x)
        assert cos.dtype == torch.float32
        torch.testing.assert_close(cos.double(), torch.cat((exact, exact), -1).cos(), atol=5e-4, rtol=0)
        torch.testing.assert_close(sin.double(), torch.cat((exact, exact), -1).sin(), atol=5e-4, rtol=0)
    assert not tables.state_dict()
    ids = torch.tensor([[3, 0], [7, 7]])
    assert torch.equal(tables(x, ids)[0], tables(x)[0][ids])


def test_losses_are_those_of_pytorch_and_a_head_without_targets_gives_logits():
    head = LinearCrossEntropy(16, 37, bias=True, label_smoothing=0.1)
    x, target = torch.randn(2, 5, 16, requires_grad=True), torch.randint(37, (2, 5))
    target[0, 2] = -100
    logits = head(x)
    torch.testing.assert_close(logits, F.linear(x, head.weight, head.bias))
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(head(x, target), expected)
    torch.testing.assert_close(CrossEntropy(label_smoothing=0.1)(logits, target), expected)
    capped = LinearCrossEntropy(16, 37, softcap=2.0)
    torch.testing.assert_close(CrossEntropy()(capped(x), target), capped(x, target))
    count = torch.tensor(3.0)
    torch.testing.assert_close(
        CrossEntropy()(logits, target, count), F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / 3
    )


def test_a_tied_head_learns_through_both_uses():
    embedding, head = torch.nn.Embedding(37, 16), LinearCrossEntropy(16, 37)
    head.weight = embedding.weight
    ids = torch.randint(37, (2, 5))
    head(embedding(ids), ids).backward()
    tied = embedding.weight.grad.clone()
    embedding.weight.grad = None
    F.cross_entropy(F.linear(embedding(ids), embedding.weight).flatten(0, 1), ids.flatten()).backward()
    torch.testing.assert_close(tied, embedding.weight.grad)


def test_shapes_that_do_not_fit_are_refused_in_words():
    with pytest.raises(ValueError) as error:
        Attention(30, 4)
    assert str(error.value) == (
        "Attention: hidden_size must be a multiple of num_heads where head_dim is not given; got 30 and 4. Pass head_dim."
    )
    with pytest.raises(ValueError) as error:
        Attention(32, 4, 3)
    assert str(error.value) == (
        "Attention: num_heads must be a multiple of num_kv_heads; got 4 and 3. Choose a number of key heads that divides the query heads."
    )
    with pytest.raises(ValueError) as error:
        RotaryEmbedding(7)
    assert str(error.value) == "RotaryEmbedding: head_dim must be even and positive (pairs are turned); got 7. Choose an even width."
