"""Keywords of the blocks: masks, positions, packed documents, dropout, chains of blocks; and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops_math as om
from ops_nn.models.llama import apply_rotary
from tests.blocks.part_cases import BATCH, HEADS, SEQ, WIDTH, Setup, bert, encoder, llama, multihead, sequential

SWITCHED = pytest.mark.parametrize("on", [True, False], ids=["on", "off"])


def written_out(setup: Setup, x: torch.Tensor, allowed: torch.Tensor, tables=None) -> torch.Tensor:
    """The Llama attention block with a mask [B or 1, 1, S, S], True where a key is seen."""
    attn = setup.module
    h = setup.norm(x)
    q, k, v = (p(h).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    cos, sin = setup.kwargs["position_embeddings"] if tables is None else tables
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    return x + attn.o_proj(out.transpose(1, 2).flatten(-2))


def attend(setup: Setup, x: torch.Tensor, **keywords) -> torch.Tensor:
    return om.residual_attention(x, setup.norm, setup.module, norm_first=setup.norm_first, **{**setup.kwargs, **keywords})


CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()


@SWITCHED
def test_a_mask_a_window_and_padding_hide_keys(on):
    setup = llama(torch.float64, "attention")
    x = setup.x(torch.float64)
    free = torch.rand(BATCH, 1, SEQ, SEQ) > 0.4
    free |= torch.eye(SEQ, dtype=torch.bool)
    real = torch.arange(SEQ)[None] < torch.tensor([[SEQ], [5]])
    with om.enabled(on):
        masked = attend(setup, x, mask=free)
        added = attend(setup, x, mask=torch.zeros(free.shape, dtype=torch.float64).masked_fill(~free, float("-inf")))
        windowed = attend(setup, x, window=(2, 0))
        padded = attend(setup, x, key_padding_mask=real)
        everything = attend(setup, x, causal=False)
    torch.testing.assert_close(masked, written_out(setup, x, CAUSAL & free))
    torch.testing.assert_close(added, masked)
    torch.testing.assert_close(windowed, written_out(setup, x, CAUSAL & ~CAUSAL.tril(-3)))
    torch.testing.assert_close(padded, written_out(setup, x, CAUSAL & real[:, None, None, :]))
    torch.testing.assert_close(everything, written_out(setup, x, torch.ones_like(CAUSAL)))


@SWITCHED
def test_position_ids_choose_rows_of_the_tables(on):
    setup = llama(torch.float64, "attention")
    x = setup.x(torch.float64)
    ids = torch.stack([torch.randperm(SEQ), torch.arange(SEQ)])
    cos, sin = setup.kwargs["position_embeddings"]
    with om.enabled(on):
        y = attend(setup, x, position_ids=ids)
    torch.testing.assert_close(y, written_out(setup, x, CAUSAL, (cos[ids], sin[ids])))


@SWITCHED
@pytest.mark.parametrize("layout", ["[T, C]", "[1, T, C]"])
def test_packed_documents_do_not_see_each_other(on, layout):
    setup = llama(torch.float64, "attention")
    x = torch.randn(1, SEQ, WIDTH, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0, 4, 4, 5, SEQ], dtype=torch.int32)
    document = torch.tensor([0, 0, 0, 0, 2, 3, 3, 3, 3])
    expected = written_out(setup, x, CAUSAL & (document[:, None] == document))
    given = x[0] if layout == "[T, C]" else x
    with om.enabled(on):
        y = attend(setup, given, cu_seqlens=ends, max_seqlen=4)
    assert y.shape == given.shape
    torch.testing.assert_close(y.view_as(expected), expected)
    ours, theirs = (torch.autograd.grad(z.square().sum(), [x, *setup.module.parameters()], retain_graph=True) for z in (y, expected))
    torch.testing.assert_close(ours, theirs)


def test_packed_documents_reach_multihead_attention_too():
    setup = multihead(torch.float64)
    x = torch.randn(1, SEQ, WIDTH, dtype=torch.float64)
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    y = attend(setup, x, cu_seqlens=torch.tensor([0, 4, SEQ]), causal=True)
    h = setup.norm(x)
    expected = x + setup.module(h, h, h, attn_mask=~(CAUSAL & (document[:, None] == document)), need_weights=False)[0]
    torch.testing.assert_close(y, expected)


# Dropout


def dropped(x: torch.Tensor, p: float, rng: om.Rng) -> torch.Tensor:
    return om.dropout(x, p, rng=rng)


def test_dropout_of_a_block_is_a_function_of_its_rng():
    setup = sequential(torch.float64, nn.GELU(), nn.Dropout(0.3))
    norm, mlp, x, rng = setup.norm, setup.module, setup.x(torch.float64), om.Rng(5)
    y = om.residual_mlp(x, norm, mlp, dropout_p=0.2, rng=rng)
    inner, last = rng.child(0), rng.child(2)
    expected = x + dropped(mlp[3](dropped(F.gelu(mlp[0](norm(x))), 0.3, inner)), 0.2, last)
    torch.testing.assert_close(y, expected)
    parameters = [x, *setup.holder.parameters()]
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), parameters), torch.autograd.grad(expected.square().sum(), parameters))


def test_an_encoder_layers_four_dropouts_are_all_applied_in_training_and_none_in_evaluation():
    setup = encoder(torch.float64, "attention", True)
    layer, rng = setup.module, om.Rng(7)
    layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.25
    x = setup.x(torch.float64)
    first, second, _ = (rng.child(i) for i in range(3))
    qkv = F.linear(layer.norm1(x), layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)
    out = om.attention_qkv(qkv, num_heads=HEADS, dropout_p=0.25, rng=first)
    attended = x + dropped(layer.self_attn.out_proj(out.flatten(-2)), 0.25, second)
    torch.testing.assert_close(om.residual_attention(x, layer.norm1, layer, rng=rng), attended)
    act = dropped(F.gelu(layer.linear1(layer.norm2(x))), 0.25, first)
    transformed = x + dropped(layer.linear2(act), 0.25, second)
    torch.testing.assert_close(om.residual_mlp(x, layer.norm2, layer, rng=rng), transformed)
    layer.eval()
    torch.testing.assert_close(om.residual_mlp(x, layer.norm2, layer), x + layer._ff_block(layer.norm2(x)))
    torch.testing.assert_close(om.residual_attention(x, layer.norm1, layer), x + layer._sa_block(layer.norm1(x), None, None))


def test_berts_dropouts_are_applied_before_its_own_sum():
    setup = bert(torch.float64, "attention")
    attn, rng = setup.module, om.Rng(9)
    attn.self.dropout.p = attn.output.dropout.p = 0.25
    x = setup.x(torch.float64)
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (attn.self.query, attn.self.key, attn.self.value))
    out = om.attention(q, k, v, dropout_p=0.25, rng=rng.child(0)).flatten(-2)
    expected = attn.output.LayerNorm(dropped(attn.output.dense(out), 0.25, rng.child(1)) + x)
    torch.testing.assert_close(om.residual_attention(x, None, attn, norm_first=False, rng=rng), expected)


def test_the_blocks_dropout_follows_the_modules_own_and_reaches_unknown_modules():
    rng, x = om.Rng(3), torch.randn(4, WIDTH, dtype=torch.float64)
    mlp = nn.Tanh()
    expected = x + dropped(torch.tanh(x), 0.4, rng.child(2))
    torch.testing.assert_close(om.residual_mlp(x, None, mlp, dropout_p=0.4, rng=rng), expected)


def test_dropout_repeats_under_checkpointing_with_keys_from_pytorchs_generator():
    from torch.utils.checkpoint import checkpoint

    setup = sequential(torch.float64, nn.GELU(), nn.Dropout(0.3))
    x = setup.x(torch.float64)

    def block(x: torch.Tensor) -> torch.Tensor:
        return om.residual_mlp(x, setup.norm, setup.module, dropout_p=0.2)

    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        torch.manual_seed(11)
        gradients.append(torch.autograd.grad(run(x).square().sum(), [x, *setup.holder.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Chains


@SWITCHED
@pytest.mark.parametrize("how", ["next_norm", "defer"])
def test_a_chain_of_blocks_equals_the_blocks_one_by_one(on, how):
    setup, tail = llama(torch.float64, "attention"), nn.RMSNorm(WIDTH, eps=1e-5, dtype=torch.float64)
    layer, x = setup.holder, setup.x(torch.float64)
    middle = x + layer.self_attn(layer.input_layernorm(x), **setup.kwargs)
    last = middle + layer.mlp(layer.post_attention_layernorm(middle))
    with om.enabled(on):
        if how == "next_norm":
            pair = om.residual_attention(
                x, layer.input_layernorm, layer.self_attn, next_norm=layer.post_attention_layernorm, **setup.kwargs
            )
            torch.testing.assert_close(pair, (middle, layer.post_attention_layernorm(middle)))
            stream, y = om.residual_mlp(pair, None, layer.mlp, next_norm=tail)
            torch.testing.assert_close(stream, last)
        else:
            pair = om.residual_attention(x, layer.input_layernorm, layer.self_attn, defer=True, **setup.kwargs)
            assert isinstance(pair, om.Unsummed)
            y = om.residual_norm(om.residual_mlp(pair, layer.post_attention_layernorm, layer.mlp, defer=True), tail)
    torch.testing.assert_close(y, tail(last))
    parameters = [x, *layer.parameters(), *tail.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), parameters), torch.autograd.grad(tail(last).square().sum(), parameters)
    )


def test_a_sum_is_fused_with_the_norm_that_follows(monkeypatch):
    from ops_math.catalog import operators

    setup, phase, seen = llama(torch.float32, "attention"), operators()["rms_norm"].phases["fwd"], []
    problem_of = phase.problem_of
    phase.forget()  # a remembered call builds no problem
    monkeypatch.setattr(phase, "problem_of", lambda *args: seen.append(problem_of(*args)) or seen[-1])
    attend(setup, setup.x(torch.float32), next_norm=setup.holder.post_attention_layernorm)
    assert [p.residual for p in seen] == ["", "fp32"]


def test_an_unknown_next_norm_is_run_on_the_sum():
    setup, norm = llama(torch.float64, "attention"), nn.GroupNorm(1, SEQ, dtype=torch.float64)
    x = setup.x(torch.float64)
    om.reset_stats()
    stream, y = attend(setup, x, next_norm=norm)
    torch.testing.assert_close((stream, y), (setup.formula(x), norm(setup.formula(x))))
    assert [row.fallback for row in om.stats().rows if row.phase == "block"] == ["norm: GroupNorm is not in the table of parts"]


def test_next_norm_after_a_post_norm_block_sees_its_result():
    setup, norm = bert(torch.float64, "mlp"), nn.LayerNorm(WIDTH, dtype=torch.float64)
    x = setup.x(torch.float64)
    y, normed = om.residual_mlp(x, None, setup.module, norm_first=False, next_norm=norm)
    torch.testing.assert_close((y, normed), (setup.formula(x), norm(setup.formula(x))))


# Refusals


def refusal(call) -> str:
    with pytest.raises(om.ArgumentError) as error:
        call()
    return str(error.value)


def test_what_excludes_each_other_is_refused_in_words():
    x, norm, mlp = torch.randn(2, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()
    assert refusal(lambda: om.residual_mlp((x, x), norm, mlp)) == (
        "residual_mlp: norm must be None where x is a pair (x, norm(x)); got LayerNorm. "
        "The norm was applied by next_norm= of the call before."
    )
    assert refusal(lambda: om.residual_mlp(x, norm, mlp, defer=True, next_norm=norm)) == (
        "residual_mlp: defer must be False with next_norm or norm_first=False; got True. "
        "The sum is fused with that norm already; leave defer out."
    )
    assert refusal(lambda: om.residual_mlp(x, norm, mlp, dropout_p=1.0)) == (
        "residual_mlp: dropout_p must be at least 0 and below 1; got 1.0. Use 0 for no dropout; a probability of 1 would drop everything."
    )
    assert refusal(lambda: om.residual_mlp(x.long(), norm, mlp)) == (
        "residual_mlp: x must be floating point (fp32, bf16, fp16 or fp64); got int64. Convert it: x.to(torch.float32)."
    )


def test_a_bert_module_with_a_norm_of_its_own_is_not_given_another():
    setup = bert(torch.float32, "attention")
    x = setup.x(torch.float32)
    text = (
        "residual_attention: norm must be None, with norm_first=False, for a module that holds its residual sum and norm itself; got {}. "
        "Pass norm=None, norm_first=False."
    )
    assert refusal(lambda: om.residual_attention(x, nn.LayerNorm(WIDTH), setup.module, norm_first=False)) == text.format("another norm")
    assert refusal(lambda: om.residual_attention(x, None, setup.module)) == text.format("norm_first=True")
    own = om.residual_attention(x, setup.module.output.LayerNorm, setup.module, norm_first=False)
    assert torch.equal(own, om.residual_attention(x, None, setup.module, norm_first=False))


def test_an_unknown_module_gets_every_keyword_and_one_that_only_the_fused_path_reads_is_refused():
    class Own(nn.Module):
        def forward(self, x, *, factor):
            return (x * factor, "weights")

    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(om.residual_attention(x, None, Own(), factor=3.0), x + 3 * x)
    with pytest.raises(om.ArgumentError, match=r"^residual_attention: window must be taken by the module's own forward"):
        om.residual_attention(x, None, Own(), factor=3.0, window=(1, 0))
    with pytest.raises(TypeError, match=r"those of Own\.forward; got unheard_of\."):
        om.residual_attention(x, None, Own(), factor=3.0, unheard_of=1)
