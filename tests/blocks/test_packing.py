"""Weights laid together: one product for each group, with nothing else changed, and no harm where they come apart again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math.blocks import packed
from ops_math.layout import adjoining, lay_together
from ops_nn.adopt import adopt
from ops_nn.models import LlamaConfig, LlamaForCausalLM
from tests.adopt.models import JOBS
from tests.blocks.part_cases import ATTENTIONS, MLPS

WIDE = torch.float64
ALL = {("residual_attention", name): make for name, make in ATTENTIONS.items()}
ALL |= {("residual_mlp", name): make for name, make in MLPS.items()}
FAMILIES = ("llama", "qwen", "mistral", "our module")
HOLDS_GROUPS = [key for key in ALL if any(word in key[1].lower() for word in (*FAMILIES, *(["bert"] if "attention" in key[0] else [])))]


def call(key, setup, x):
    block = om.residual_attention if key[0] == "residual_attention" else om.residual_mlp
    return block(x, setup.norm, setup.module, norm_first=setup.norm_first, **setup.kwargs)


def gradients(key, setup, x):
    y = call(key, setup, x)
    held = [p for p in setup.holder.parameters() if p.requires_grad]
    found = torch.autograd.grad(y.sin().sum(), [x, *held], allow_unused=True)
    return [y, *(g for g in found if g is not None)]


@pytest.fixture
def one_product(monkeypatch):
    """How many groups ran as one product."""
    seen = []
    forward = packed.packed_forward
    monkeypatch.setattr(packed, "packed_forward", lambda *a: seen.append(1) or forward(*a))
    monkeypatch.setattr("ops_math.blocks.mlp_products.packed_forward", packed.packed_forward)
    return seen


@pytest.mark.parametrize("key", HOLDS_GROUPS, ids=lambda key: f"{key[0]}: {key[1]}")
def test_a_packed_block_equals_an_unpacked_one_in_float64_with_every_gradient(key, one_product):
    setup = ALL[key](WIDE)
    x = setup.x(WIDE)
    apart = gradients(key, setup, x)
    assert one_product == []
    packing = om.pack_weights(setup.holder)
    together = gradients(key, setup, x)
    assert len(one_product) == any(row.packed for row in packing.rows)
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def test_some_block_is_packed_for_each_kind_of_group():
    kinds = {row.layers for key in HOLDS_GROUPS for row in om.pack_weights(ALL[key](WIDE).holder).rows if row.packed}
    assert kinds == {("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj")}


def tiny(**options):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(64, 32, 48, 2, 4, 2, 8, **options))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model.train()


IDS = torch.arange(48).view(2, 24) % 64


def train(model, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_goes_as_without_and_parameters_stay_the_objects_they_were():
    plain, ours = tiny(), tiny()
    adopt(plain)
    adopt(ours)
    before = [id(p) for p in ours.parameters()]
    state = {name: t.clone() for name, t in ours.state_dict().items()}
    om.pack_weights(ours)
    assert [id(p) for p in ours.parameters()] == before
    assert all(torch.equal(t, state[name]) for name, t in ours.state_dict().items())
    torch.testing.assert_close(torch.tensor(train(ours)), torch.tensor(train(plain)), rtol=1e-4, atol=1e-4)
    attn = ours.model.layers[0].self_attn
    assert adjoining([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]) is not None  # an optimizer writes in place
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    assert adjoining([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]) is not None  # and so does loading


UNDO = {
    "to another dtype": lambda m: m.to(torch.float64),
    "a deep copy": copy.deepcopy,
    "loading by assignment": lambda m: m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}, assign=True) and m,
    "a new weight": lambda m: setattr(m.model.layers[0].self_attn.k_proj, "weight", nn.Parameter(torch.randn(16, 32))) or m,
}


@pytest.mark.parametrize("how", UNDO)
def test_what_moves_parameters_apart_does_no_harm_and_is_said(how, one_product):
    model = tiny()
    om.pack_weights(model)
    moved = UNDO[how](model)
    adopt(moved)
    om.reset_stats()
    ours = moved(IDS, labels=IDS).loss
    with om.enabled(False):
        plain = moved(IDS, labels=IDS).loss
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4, check_dtype=False)
    rows = [row for row in om.stats().rows if row.phase == "block"]
    assert rows
    assert all("moved apart; pack_weights lays them together again" in row.fallback for row in rows)
    assert {row.implementation for row in rows} == {"fused, unpacked"}  # it does not run as the module that it is


def test_a_weight_written_between_forward_and_backward_is_noticed():
    model = tiny()
    om.pack_weights(model)
    adopt(model)
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2.0)  # not the first of its group
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_unpack_gives_each_parameter_a_storage_of_its_own():
    model = tiny(tie_word_embeddings=False)
    packing = om.pack_weights(model)
    assert len(packing.rows) == 4
    assert all(row.packed and row.bytes for row in packing.rows)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    packing.unpack()
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    model(IDS, labels=IDS)
    assert "left alone" not in str(packing)


class Own(nn.Linear):
    """A layer with a forward of its own, as an adapter has."""


def flattened(attn):
    """As a sharding does: parameters become views of its own buffer."""
    attn.flat = torch.cat([p.detach().flatten() for p in attn.parameters()])
    for p, part in zip(attn.parameters(), attn.flat.split([p.numel() for p in attn.parameters()]), strict=True):
        p.data = part.view(p.shape).t().contiguous().t() if p is attn.k_proj.weight else part.view(p.shape)


LEFT = {
    "a weight lies in a buffer that somebody else made": flattened,
    "a weight is used in another place too": lambda a: setattr(a, "v_proj", a.k_proj),
    "its layers are Own, Linear, Linear, not plain Linear layers": lambda a: setattr(a, "q_proj", Own(32, 32, bias=False)),
    "some of its layers have a bias and others none": lambda a: setattr(a, "q_proj", nn.Linear(32, 32)),
    "its weights differ in dtype, device or input width": lambda a: a.q_proj.to(torch.bfloat16),
    "it has no memory yet": lambda a: a.to("meta"),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_must_be_left_alone_is_left_alone_with_the_reason(reason):
    model = tiny()
    attn = model.model.layers[1].self_attn
    LEFT[reason](attn)
    before = [p.data_ptr() for p in attn.parameters()]
    rows = {row.path: row for row in om.pack_weights(model).rows}
    assert reason in rows["model.layers.1.self_attn"].reason
    assert not rows["model.layers.1.self_attn"].packed
    assert rows["model.layers.0.self_attn"].packed
    assert [p.data_ptr() for p in attn.parameters()] == before


def test_packing_twice_moves_nothing():
    model = tiny()
    om.pack_weights(model)
    before = [p.data_ptr() for p in model.parameters()]
    om.pack_weights(model)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_a_packed_model_is_saved_and_loaded_like_any_other(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="missing capability: safetensors")
    model = tiny(tie_word_embeddings=False)
    om.pack_weights(model)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for found in (safetensors.load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt")):
        assert all(torch.equal(found[name], t) for name, t in model.state_dict().items())
    assert (tmp_path / "model.pt").stat().st_size < 1.5 * size


def test_a_compiled_packed_model_runs_its_products_apart():
    model = tiny()
    om.pack_weights(model)
    adopt(model)
    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(IDS, labels=IDS).loss
    torch.testing.assert_close(found, model(IDS, labels=IDS).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_adopted_models_agree_packed_in_float64(name):
    job = JOBS[name]()
    model = job.model.double()
    adopt(model)
    names = [n for n, _ in model.named_parameters()]
    apart = torch.autograd.grad(job.loss(model), list(model.parameters()), allow_unused=True)
    om.pack_weights(model)
    together = torch.autograd.grad(job.loss(model), list(model.parameters()), allow_unused=True)
    for n, a, b in zip(names, apart, together, strict=True):
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=n)


def test_adjoining_looks_at_storage_order_shape_and_strides():
    whole = torch.arange(24.0).view(6, 4)
    a, b, c = whole[:2], whole[2:3], whole[3:]
    assert torch.equal(adjoining([a, b, c]), whole)
    assert adjoining([a, b, c]).data_ptr() == whole.data_ptr()
    assert adjoining([a]).shape == (2, 4)
    assert adjoining([b, a]) is None
    assert adjoining([a, c]) is None
    assert adjoining([a, whole[2:3, :3]]) is None
    assert adjoining([whole.t()[:2], whole.t()[2:]]) is None
    assert adjoining([a, b.double()]) is None


def test_lay_together_refuses_what_is_not_alike():
    with pytest.raises(om.ArgumentError, match="lay_together: parameters must be"):
        lay_together([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 4))])


def test_pack_weights_wants_a_module():
    with pytest.raises(om.ArgumentError, match=r"pack_weights: model must be a torch\.nn\.Module; got str"):
        om.pack_weights("model")


def test_the_report_lists_copies_with_bytes_and_reason():
    om.layout.reset()
    om.layout.copied(torch.zeros(4, 4), "q", "strides")
    om.layout.copied(torch.zeros(4, 4), "q", "strides")
    om.layout.copied(torch.zeros(1000), "k", "dtype")
    report = om.layout.report()
    assert [(row.what, row.calls, row.bytes) for row in report.rows] == [("k", 1, 4000), ("q", 2, 128)]
    assert report.bytes == 4128
    assert "k: dtype" in str(report)
    om.layout.reset()
    assert str(om.layout.report()) == "no copy was made for a layout or a dtype"


def test_adopting_packs_and_reverting_unpacks():
    model = tiny(tie_word_embeddings=False)
    adoption = adopt(model, pack=True)
    attn = model.model.layers[0].self_attn
    weights = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
    assert adjoining(weights) is not None
    assert [row.fused for row in adoption.report if "as one product" in row.what] == [True] * 4
    adoption.revert()
    assert adjoining(weights) is None
    assert "forward" not in model.__dict__
