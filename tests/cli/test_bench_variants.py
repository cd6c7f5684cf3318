"""Variants of a step: what their names mean, Liger's operators in a plain model, work of unequal length."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

import ops_math as om
from ops_math import backends, checks
from ops_math.backends import inductor
from ops_math.cli.bench import contenders, liger, rivals, show, steps, workloads
from ops_nn.models import build

SMALL = steps.Setup(2, 32, torch.float32, False)


def test_a_name_is_words_joined_by_plus_in_any_order():
    packed = contenders.variant_of("packed+graphed+adamw")
    assert packed == contenders.variant_of("adamw+ops+graphed+packed")
    assert packed == contenders.Variant("ops", True, True, True, False, False, "fixed", 0)
    assert contenders.variant_of("lean").lean
    assert [contenders.variant_of(f"packed{word}").level for word in ("", "+level1", "+level2")] == [0, 1, 2]
    assert contenders.variant_of("plain+documents") == contenders.Variant("plain", False, False, False, False, False, "documents", 0)
    for name in steps.VARIANTS:
        contenders.variant_of(name)


@pytest.mark.parametrize("name", ["", "fast", "plain+liger", "packed+packed", "documents+padded", "plain+fast", "level1+level2"])
def test_a_name_that_means_nothing_is_refused_in_words(name):
    with pytest.raises(checks.ArgumentError) as error:
        contenders.variant_of(name)
    assert str(error.value) == f"bench step: a variant must be {contenders.HOW}; got {name!r}. Write it like packed+graphed."


@pytest.mark.skipif(bool(inductor.unavailable(backends.device_of(torch.device("cpu")))), reason="missing capability: a C++ compiler")
def test_operators_in_their_compiled_form_are_those_that_run():
    assert set(contenders.compiled_operators()) == {"rms_norm", "glu", "rope"}
    with pytest.raises(checks.ArgumentError, match="bench step: inductor must be used with our operators; got 'plain\\+inductor'"):
        contenders.variant_of("plain+inductor")
    runner = contenders.Runner("llama-tiny", "inductor", 1, 16, torch.float32, False, "cpu")
    om.reset_stats()
    runner.train()
    ran = {row.op: row.implementation for row in om.stats().rows if row.op in contenders.compiled_operators() and row.phase == "fwd"}
    assert ran == dict.fromkeys(("rms_norm", "glu", "rope"), "inductor")


def test_packed_weights_are_ours():
    with pytest.raises(checks.ArgumentError, match="bench step: packed must be used with our operators; got 'plain\\+packed'"):
        contenders.variant_of("plain+packed")


def test_packed_documents_are_not_for_liger():
    with pytest.raises(checks.ArgumentError, match="bench step: documents must be used without liger, whose attention is PyTorch's; got"):
        contenders.variant_of("liger+documents")


def test_names_in_tables_say_whose_they_are():
    row = {"benchmark": "step", "variant": "packed+graphed"}
    assert (show.name(row), show.own(row)) == ("ops_math packed graphed", True)
    assert [show.name(row | {"variant": v}) for v in ("plain", "liger", "ops", "documents")] == [
        "torch", "liger", "ops_math", "ops_math documents",
    ]  # fmt: skip
    assert [show.own(row | {"variant": v}) for v in ("plain", "liger", "compile", "plain+documents")] == [False] * 4


@pytest.fixture
def planted(monkeypatch):
    """A package with Liger's functions, in plain PyTorch; each call is counted."""
    calls = dict.fromkeys(liger.NEEDED, 0)

    def counted(name, function):
        def run(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return run

    def rope(q, k, cos, sin):
        def turn(x):
            a, b = x.chunk(2, -1)
            return x * cos.unsqueeze(1) + torch.cat((-b, a), -1) * sin.unsqueeze(1)

        return turn(q), turn(k)

    functions = {
        "liger_rms_norm": lambda x, w, eps: F.rms_norm(x, x.shape[-1:], w, eps),
        "liger_layer_norm": lambda x, w, b, eps: F.layer_norm(x, x.shape[-1:], w, b, eps),
        "liger_swiglu": lambda a, b: F.silu(a) * b,
        "liger_rope": rope,
        "liger_fused_linear_cross_entropy": lambda x, w, t, bias, ignore_index: F.cross_entropy(
            F.linear(x, w, bias), t, ignore_index=ignore_index
        ),
    }
    root, module = types.ModuleType("liger_kernel"), types.ModuleType(rivals.LIGER)
    for name, function in functions.items():
        setattr(module, name, counted(name, function))
    monkeypatch.setitem(sys.modules, "liger_kernel", root)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", types.ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, rivals.LIGER, module)
    rivals.liger.cache_clear()
    yield calls
    rivals.liger.cache_clear()


def grads(model, inputs):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_p"):
            module.dropout_p = 0.0
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "used"), [
    ("llama-tiny", {"liger_rms_norm": 21, "liger_swiglu": 10, "liger_rope": 10, "liger_fused_linear_cross_entropy": 1}),
    ("bert-tiny", {"liger_layer_norm": 8, "liger_fused_linear_cross_entropy": 1}),
])  # fmt: skip
def test_ligers_operators_stand_at_every_place_of_a_plain_model_and_change_no_number(planted, name, used):
    inputs, _ = workloads.workload("fixed", name, 1, 16, "cpu")
    loss, expected = grads(build(name).train(), inputs)
    patched = build(name).train()
    liger.put_in(patched)
    found, gradients = grads(patched, inputs)
    assert {k: v for k, v in planted.items() if v} == used
    assert found == pytest.approx(loss, rel=1e-6)  # fp32: the stand-ins sum in another order; a wrong wiring is off by percents
    for n, g in expected.items():
        torch.testing.assert_close(gradients[n], g, rtol=1e-4, atol=1e-6, msg=n)


def test_a_liger_that_lacks_an_operator_is_named(planted, monkeypatch):
    monkeypatch.delattr(sys.modules[rivals.LIGER], "liger_rope")
    with pytest.raises(rivals.AbsentError, match="this version has no liger_rope"):
        liger.put_in(build("llama-tiny"))


def test_a_rival_that_is_absent_and_a_graph_without_a_gpu_drop_out_in_words(monkeypatch):
    monkeypatch.setattr(steps, "MEASURED", 2)
    monkeypatch.setattr(steps, "FEW", 0)
    found = steps.measure("llama-tiny", ["plain", "liger", "packed+graphed", "packed+adamw"], "cpu", setup=SMALL)
    assert found.failed == {
        "liger": "liger-kernel is not installed",
        "packed+graphed": "graphed_step: CUDA graphs need a CUDA device, and there is none. Call the step itself.",
    }
    assert [row["variant"] for row in found.rows] == ["plain", "packed+adamw"]


@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny"])
def test_work_of_unequal_length_counts_its_real_tokens(name):
    batch, seq = 4, 64
    fixed = workloads.workload("fixed", name, batch, seq, "cpu")
    documents, padded, trimmed = (workloads.workload(kind, name, batch, seq, "cpu") for kind in contenders.WORK)
    assert fixed.tokens == documents.tokens == batch * seq
    assert documents.inputs["input_ids"].shape == (1, batch * seq)
    assert padded.tokens == trimmed.tokens < batch * seq
    assert padded.inputs["input_ids"].shape == (batch, seq)
    longest = trimmed.inputs["input_ids"].shape[1]
    assert longest <= seq
    for key in ("input_ids", "labels"):
        assert torch.equal(padded.inputs[key][:, :longest], trimmed.inputs[key])
    counted = int((padded.inputs["labels"] != -100).sum())
    assert counted == padded.tokens - (0 if "bert" in name else batch)


def test_padding_does_not_reach_the_loss():
    """Plain PyTorch: padded, trimmed and packed, the same documents have one loss."""
    model = build("llama-tiny")
    padded, trimmed = (workloads.workload(kind, "llama-tiny", 3, 64, "cpu") for kind in ("padded", "trimmed"))
    losses = [model(**w.inputs).loss.item() for w in (padded, trimmed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_rows_compare_time_by_real_tokens(monkeypatch):
    monkeypatch.setattr(steps, "MEASURED", 2)
    monkeypatch.setattr(steps, "FEW", 0)
    monkeypatch.setattr(steps, "interleaved", lambda runners, *a: {r.variant: [10.0, 10.0] for r in runners})
    found = steps.measure("llama-tiny", ["plain", "padded"], "cpu", setup=SMALL)
    plain, padded = found.rows
    assert plain["ratio_to_plain"] == 1.0
    assert padded["tokens"] < plain["tokens"] == 64
    assert padded["ratio_to_plain"] == pytest.approx(64 / padded["tokens"], rel=1e-3)
