"""The plain PyTorch baselines: names, sizes and arithmetic."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from ops_nn.models import PRESETS, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, build
from ops_nn.models.llama import apply_rotary

SMALL_LLAMA = LlamaConfig(97, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
SMALL_BERT = BertConfig(97, 32, 48, num_layers=2, num_heads=4, max_position_embeddings=16)


def llama(config: LlamaConfig = SMALL_LLAMA) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config)
    model.reset_parameters(torch.Generator().manual_seed(3))
    return model


def bert(config: BertConfig = SMALL_BERT) -> BertForMaskedLM:
    model = BertForMaskedLM(config)
    model.reset_parameters(torch.Generator().manual_seed(3))
    return model


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_llama_layer_has_the_parameter_names_of_public_checkpoints() -> None:
    names = dict(llama().named_parameters())
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    expected = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {"model.embed_tokens.weight": (97, 32), "model.norm.weight": (32,)}
    assert {name: tuple(tensor.shape) for name, tensor in names.items()} == expected


def test_an_untied_llama_has_a_head_of_its_own_and_a_tied_one_shares_the_embedding() -> None:
    tied, untied = llama(), llama(dataclasses.replace(SMALL_LLAMA, tie_word_embeddings=False))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert "lm_head.weight" in dict(untied.named_parameters())
    assert "lm_head.weight" in tied.state_dict()
    assert count(untied) - count(tied) == 97 * 32


def test_bert_has_the_parameter_names_of_public_checkpoints() -> None:
    model = bert()
    names = set(dict(model.named_parameters()))
    layer = "bert.encoder.layer.1."
    assert names >= {
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        layer + "attention.self.query.weight",
        layer + "attention.self.key.bias",
        layer + "attention.self.value.weight",
        layer + "attention.output.dense.weight",
        layer + "attention.output.LayerNorm.bias",
        layer + "intermediate.dense.weight",
        layer + "output.dense.bias",
        layer + "output.LayerNorm.weight",
        "cls.predictions.bias",
        "cls.predictions.transform.dense.weight",
        "cls.predictions.transform.LayerNorm.weight",
    }
    assert {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} <= set(model.state_dict())
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-tiny", 10_458_368),
        ("llama-150m", 151_026_432),
        ("llama-1b", 1_235_814_400),
        ("bert-tiny", 4_673_024),
        ("bert-base", 109_514_298),
        ("bert-large", 335_174_458),
    ],
)
def test_a_preset_has_its_number_of_parameters(name: str, parameters: int) -> None:
    config = PRESETS[name].config
    with torch.device("meta"):
        model = LlamaForCausalLM(config) if isinstance(config, LlamaConfig) else BertForMaskedLM(config)
    assert count(model) == parameters


def test_building_twice_gives_the_same_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second, other = build("bert-tiny", 64, seed=1), build("bert-tiny", 64, seed=1), build("bert-tiny", 64, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.cls.predictions.transform.dense.weight, other.cls.predictions.transform.dense.weight)


def test_an_unknown_preset_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match=r"build: name must be one of llama-tiny, .*; got 'gpt'; pick one of these"):
        build("gpt")


def test_a_fresh_model_starts_at_the_loss_of_a_uniform_guess() -> None:
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    for model in (llama(), bert().eval()):
        assert model(ids, ids.roll(1, 1)).loss.item() == pytest.approx(math.log(97), abs=0.05)


def test_llama_does_not_see_the_future() -> None:
    model = llama()
    ids = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 97
    a, b = model(ids).logits, model(changed).logits
    torch.testing.assert_close(a[:, :7], b[:, :7])
    assert (a[:, 7:] - b[:, 7:]).abs().amax(dim=-1).min() > 1e-5


def test_rotary_scores_depend_only_on_the_distance_of_two_positions() -> None:
    rotary = llama().model.rotary_emb
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score(at: int, to: int) -> float:
        tables = [t.double() for t in rotary(torch.empty(1, 2, 8), torch.tensor([[at, to]]))]
        turned_q = apply_rotary(q, *(t[:, :1] for t in tables))
        turned_k = apply_rotary(k, *(t[:, 1:] for t in tables))
        return (turned_q * turned_k).sum().item()

    assert score(3, 9) == pytest.approx(score(103, 109), abs=1e-4)
    assert score(3, 9) != pytest.approx(score(3, 10), abs=1e-3)


def test_rotary_tables_by_position_ids_equal_those_by_count() -> None:
    rotary = llama().model.rotary_emb
    x = torch.empty(2, 5, 32)
    by_count = rotary(x)
    by_ids = rotary(x, torch.arange(5).expand(2, 5))
    assert by_count[0].shape == (5, 8)
    assert by_ids[0].shape == (2, 5, 8)
    assert torch.equal(by_count[1].expand(2, 5, 8), by_ids[1])


def test_rotary_frequencies_stay_in_fp32_when_the_model_is_cast() -> None:
    model = llama()
    exact = model.model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)


def test_llama_3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    config = PRESETS["llama-1b"].config
    assert isinstance(config, LlamaConfig)
    small = dataclasses.replace(config, vocab_size=8, num_layers=1, hidden_size=8, intermediate_size=8)
    scaled = LlamaForCausalLM(small).model.rotary_emb.inv_freq
    plain = LlamaForCausalLM(dataclasses.replace(small, rope_scaling=None)).model.rotary_emb.inv_freq
    ratio = plain / scaled
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(32.0)
    assert (ratio.diff() >= 0).all()


def test_grouped_queries_equal_repeated_key_and_value_heads() -> None:
    grouped = llama()
    full = llama(dataclasses.replace(SMALL_LLAMA, num_kv_heads=4))
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grouped(ids).logits, full(ids).logits)


def test_bert_ignores_what_stands_at_padding() -> None:
    model = bert().eval()
    ids = torch.randint(0, 97, (1, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    changed = ids.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 97
    masked = [model(x, attention_mask=mask).logits[:, :5] for x in (ids, changed)]
    open_ = [model(x).logits[:, :5] for x in (ids, changed)]
    assert torch.equal(*masked)
    assert not torch.equal(*open_)


def test_bert_drops_in_training_and_not_in_evaluation() -> None:
    model = bert()
    ids = torch.randint(0, 97, (1, 8), generator=torch.Generator().manual_seed(0))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_sequence_longer_than_berts_positions_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"BertEmbeddings: input_ids needs at most 16 positions; got 17; shorten"):
        bert()(torch.zeros(1, 17, dtype=torch.int64))


def test_labels_of_minus_100_do_not_count() -> None:
    model = llama()
    ids = torch.randint(0, 97, (1, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:] = -100
    logits = model(ids).logits
    expected = nn.functional.cross_entropy(logits[0, :4], ids[0, :4])
    torch.testing.assert_close(model(ids, labels).loss, expected)


def test_head_counts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_heads must be a multiple of num_kv_heads; got 4 and 3; choose"):
        dataclasses.replace(SMALL_LLAMA, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple of num_heads; got 32 and 5; choose"):
        dataclasses.replace(SMALL_BERT, num_heads=5)
