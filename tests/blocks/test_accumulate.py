"""Weight gradients added straight into `.grad`: the same sums, and refused where something would not see them."""

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math import features
from ops_math.blocks import accumulate
from ops_nn.adopt import adopt
from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

LLAMA = LlamaConfig(61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
UNTIED = LlamaConfig(61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, tie_word_embeddings=False)
BERT = BertConfig(61, 32, 48, num_layers=2, num_heads=4, max_position_embeddings=64, hidden_dropout=0.0, attention_dropout=0.0)
# Weights that blocks multiply with: q, k, v, o, gate, up, down; query, key, value, two dense ones and one of the attention's output.
IN_BLOCKS = {"LlamaConfig": 7 * 2, "BertConfig": 6 * 2}


def model_of(config, dtype=torch.float32, pack=None):
    model = (LlamaForCausalLM if isinstance(config, LlamaConfig) else BertForMaskedLM)(config)
    model.reset_parameters(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0) if p.dim() > 1 else None
    model = model.to(dtype).train()
    if pack is not None:
        adopt(model, pack=pack)
    return model


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(61, (2, 24), generator=generator) for _ in range(count)]


def accumulated(model, into=None, count=3):
    for ids in batches(count):
        loss = model(ids, labels=ids).loss / count
        if into is None:
            loss.backward()
        else:
            with into:
                loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pack", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("config", [LLAMA, UNTIED, BERT], ids=["tied", "untied", "bert"])
def test_micro_batches_add_up_to_what_pytorch_adds_up_to(config, pack, dtype):
    """Against float64: no error beyond that of the usual way and a rounding, and in 16 bits none beyond the usual way's own."""
    model = model_of(config, dtype, pack)
    exact = accumulated(copy_in_float64(model, config))
    usual = accumulated(model)
    again = model_of(config, dtype, pack)
    into = om.accumulate_into_grad(again)
    found = accumulated(again, into)
    blocks = IN_BLOCKS[type(config).__name__]
    assert into.added == 2 * blocks, "from the second micro-batch on"
    assert into.apart == {"there is no gradient yet": blocks}
    for name, grad in exact.items():
        allowed = 1.1 * error(usual[name], grad) + 2 * torch.finfo(torch.float32).eps
        assert error(found[name], grad) <= allowed, name


def copy_in_float64(model, config):
    """The plain model with the same weights."""
    twin = model_of(config, torch.float64)
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    return twin


def test_gradients_stay_the_tensors_that_they_were_and_others_go_the_usual_way():
    model = model_of(LLAMA, pack=True)
    accumulated(model, count=1)
    kept = {n: p.grad for n, p in model.named_parameters()}
    into = om.accumulate_into_grad(model)
    with into:
        model(batches(1)[0], labels=batches(1)[0]).loss.backward()
    assert all(p.grad is kept[n] for n, p in model.named_parameters())
    assert str(into) == f"{IN_BLOCKS['LlamaConfig']} gradients added in place"


def test_no_weight_gradient_is_made_for_the_second_micro_batch():
    """The products that make gradients are gone; each adds into what is there."""
    from ops_math.testing.capture import watch

    model, (ids,) = model_of(LLAMA, pack=True), batches(1)
    model(ids, labels=ids).loss.backward()
    loss = model(ids, labels=ids).loss
    usual = watch(lambda: loss.backward(retain_graph=True)).names
    loss = model(ids, labels=ids).loss
    with om.accumulate_into_grad(model):
        names = watch(lambda: loss.backward()).names
    products = LLAMA.num_layers * 4  # q, k, v as one, o, gate and up as one, down
    assert usual.count("aten.mm.default") - names.count("aten.mm.default") == products
    assert names.count("aten.addmm_.default") - usual.count("aten.addmm_.default") == products


def test_parameters_that_were_not_given_are_left_to_pytorch():
    model, (ids,) = model_of(LLAMA, pack=False), batches(1)
    accumulated(model, count=1)
    weight = model.model.layers[0].self_attn.o_proj.weight
    into = om.accumulate_into_grad([weight])
    with into:
        model(ids, labels=ids).loss.backward()
    assert into.added == 1
    assert into.apart == {"it is not among the parameters given": IN_BLOCKS["LlamaConfig"] - 1}


def test_outside_the_context_nothing_is_different_and_contexts_nest():
    one, other = model_of(LLAMA, pack=True), model_of(LLAMA, pack=True)
    with om.accumulate_into_grad(other):
        with om.accumulate_into_grad(one):
            pass
        accumulated(one, count=1)
    same = model_of(LLAMA, pack=True)
    accumulated(same, count=1)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(one.parameters(), same.parameters(), strict=True))
    fresh, same = model_of(LLAMA, pack=True), model_of(LLAMA, pack=True)
    om.accumulate_into_grad(fresh)  # made, and not entered
    assert all(torch.equal(a, b) for a, b in zip(accumulated(fresh).values(), accumulated(same).values(), strict=True))


def test_a_context_that_is_entered_twice_ends_with_the_outer_one():
    into = om.accumulate_into_grad(model_of(LLAMA))
    with into, into:
        pass
    assert accumulate._LIVE.current is None


def refused(model, backward, sentence):
    with pytest.raises(om.UnsupportedError) as error, om.accumulate_into_grad(model):
        backward()
    assert sentence in str(error.value)


def test_a_backward_that_returns_gradients_is_refused():
    model, (ids,) = model_of(LLAMA, pack=True), batches(1)
    accumulated(model, count=1)
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss = model(ids, labels=ids).loss
    refused(model, lambda: torch.autograd.grad(loss, list(model.parameters())), "accumulate_into_grad: torch.autograd.grad asks for the "
            "gradient of model.layers.1.mlp.down_proj.weight as a result")  # fmt: skip
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters()), "nothing was written"


@pytest.mark.parametrize("option", ["retain_graph", "create_graph"])
def test_a_backward_that_keeps_its_graph_is_refused(option):
    model, (ids,) = model_of(LLAMA, pack=True), batches(1)
    accumulated(model, count=1)
    loss = model(ids, labels=ids).loss
    refused(model, lambda: loss.backward(**{option: True}), "the backward keeps its graph (retain_graph or create_graph)")


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_with_a_hook_is_refused(hook, late):
    model, (ids,) = model_of(LLAMA, pack=True), batches(1)
    accumulated(model, count=1)
    weight = model.model.layers[0].self_attn.o_proj.weight
    sentence = "accumulate_into_grad: model.layers.0.self_attn.o_proj.weight has a hook, which would not see its gradient"
    loss = model(ids, labels=ids).loss
    if not late:
        getattr(weight, hook)(lambda p: None)
        refused(model, lambda: None, sentence)
        return

    def backward():
        getattr(weight, hook)(lambda p: None)
        loss.backward()

    refused(model, backward, sentence)


def test_what_is_sharded_or_replicated_or_no_parameter_is_refused(monkeypatch):
    class Shard(nn.Parameter):
        pass

    with pytest.raises(om.UnsupportedError, match="accumulate_into_grad: parameter 0 is sharded or of a class of its own"):
        om.accumulate_into_grad([Shard(torch.ones(2, 2))])
    with pytest.raises(om.UnsupportedError, match="accumulate_into_grad: parameter 0 is no leaf"):
        om.accumulate_into_grad([nn.Parameter(torch.ones(2, 2)) * 2])
    for nothing in ([], nn.ReLU(), torch.ones(2)):
        with pytest.raises(
            om.ArgumentError, match="accumulate_into_grad: parameters must be a module or parameters that require gradients"
        ):
            om.accumulate_into_grad(nothing)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(om.UnsupportedError, match="accumulate_into_grad: with more than one rank gradients are reduced by hooks"):
        om.accumulate_into_grad(nn.Linear(2, 2))


def test_distributed_data_parallel_is_refused():
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(om.UnsupportedError, match="accumulate_into_grad: DistributedDataParallel reduces gradients by hooks"):
        om.accumulate_into_grad(wrapped)


def test_backward_with_inputs_adds_to_those_alone():
    model, (ids,) = model_of(LLAMA, pack=False), batches(1)
    accumulated(model, count=1)
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    weight = model.model.layers[0].self_attn.o_proj.weight
    into = om.accumulate_into_grad(model)
    with into:
        model(ids, labels=ids).loss.backward(inputs=[weight])
    assert into.added == 1
    assert into.apart == {"this backward does not ask for it": IN_BLOCKS["LlamaConfig"] - 1}  # q, k and v are of the same node
    changed = [n for n, p in model.named_parameters() if not torch.equal(p.grad, before[n])]
    assert changed == ["model.layers.0.self_attn.o_proj.weight"]


def test_under_autocast_a_cpu_goes_the_usual_way_and_says_so():
    """An fp32 gradient of bf16 products: a CPU has no product that adds to it."""
    usual, into_model, (ids,) = model_of(LLAMA, pack=True), model_of(LLAMA, pack=True), batches(1)
    into = om.accumulate_into_grad(into_model)
    for _ in range(2):
        for model in (usual, into_model):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids, labels=ids).loss
            if model is usual:
                loss.backward()
            else:
                with into:
                    loss.backward()
    assert into.added == 0
    assert set(into.apart) == {"there is no gradient yet", "a product of bf16 does not add to fp32 on this device"}
    for a, b in zip(usual.parameters(), into_model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("pack", [False, True], ids=["apart", "packed"])
def test_a_gpu_adds_16_bit_products_to_fp32_gradients(pack):
    model, twin = (model_of(LLAMA, pack=pack).cuda() for _ in range(2))
    if pack:
        om.pack_weights(model)
        om.pack_weights(twin)
    assert features.widens("addmm", torch.device("cuda"))
    into = om.accumulate_into_grad(twin)
    for ids in batches(3):
        for one in (model, twin):
            with torch.autocast("cuda", torch.bfloat16):
                loss = one(ids.cuda(), labels=ids.cuda()).loss
            if one is model:
                loss.backward()
            else:
                with into:
                    loss.backward()
    assert into.added == 2 * IN_BLOCKS["LlamaConfig"]
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert error(b.grad, a.grad.double()) < 1e-5, name  # two orders of an fp32 sum; a gradient rounded to bf16 is off by 2e-3
