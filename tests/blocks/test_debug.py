"""om.debug: honest calls are within their budget, a planted fault is found and named, and what training sees stays ours."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math import catalog, settings
from ops_math.testing.inputs import Draw, as_leaves
from ops_nn.adopt import adopt
from tests.adopt.models import bert as bert_job
from tests.adopt.models import gradients as job_gradients
from tests.adopt.models import llama as llama_job
from tests.blocks.part_cases import ATTENTIONS, MLPS, SEQ, WIDTH, Setup, llama, sequential
from tests.conformance.cases import every_case

ALL = {("residual_attention", name): make for name, make in ATTENTIONS.items()}
ALL |= {("residual_mlp", name): make for name, make in MLPS.items()}


PYTORCH_REFUSES = ("add, dropout, fp32 residual",)  # on a CPU: a sum in fp32 with 16-bit parameters


def run(key, setup: Setup, x: torch.Tensor, **options):
    block = om.residual_attention if key[0] == "residual_attention" else om.residual_mlp
    return block(x, setup.norm, setup.module, norm_first=setup.norm_first, **setup.kwargs, **options)


def backward(results) -> None:
    ys = [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]
    if ys:
        torch.autograd.backward(ys, [torch.randn(t.shape, generator=torch.Generator().manual_seed(4)).to(t.dtype) for t in ys])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize(("name", "case"), every_case())
def test_every_operator_is_within_its_budget_forward_and_backward(name, case):
    for dtype in case.dtypes:
        call, _ = as_leaves(case.make(Draw(3, dtype)), case.frozen, lambda t: t)
        with om.debug(on_error="raise") as debugger:
            backward(getattr(om, case.fn)(*call.args, **call.kwargs))
        report = debugger.report()
        if report.skipped:
            assert case.name in PYTORCH_REFUSES
            assert "mixed dtype" in report.skipped[0][1]
            continue
        assert report.rows
        assert {row.site.call for row in report.rows} == {case.fn}
        assert {row.site.file for row in report.rows} == {__file__}


@pytest.mark.parametrize("key", ALL, ids=lambda key: f"{key[0]}: {key[1]}")
def test_every_block_is_within_its_budget_and_gives_the_bits_it_gives_without(key):
    for dtype in (torch.float32, torch.bfloat16):
        setup = ALL[key](dtype)
        x = setup.x(dtype)
        found = []
        for on in (False, True):
            debugger = om.debug(on_error="raise") if on else None
            y = run(key, setup, x)
            backward(y)
            found.append([y.detach(), x.grad, *(p.grad for p in setup.holder.parameters() if p.grad is not None)])
            x.grad = None
            setup.holder.zero_grad()
        debugger.off()
        names = {row.output for row in debugger.report().rows}
        assert {"output", "gradient of x"} < names
        assert any(name.endswith("weight") for name in names)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_chain_and_dropout_are_compared_too():
    setup = sequential(torch.float32, nn.GELU(), nn.Dropout(0.3))
    x = setup.x(torch.float32)
    with om.debug(on_error="raise") as debugger:
        pair = om.residual_mlp(x, setup.norm, setup.module, next_norm=setup.norm, dropout_p=0.1)
        y = om.residual_mlp(pair, None, setup.module, defer=True, rng=om.Rng(3))
        om.residual_norm(y, setup.norm).square().sum().backward()
    rows = debugger.report().rows
    assert {row.site.call for row in rows} == {"residual_mlp", "add_layer_norm"}
    assert {"output 0", "output 1", "gradient of normed", "gradient of 0.weight", "gradient of norm.weight"} <= {row.output for row in rows}


@pytest.mark.parametrize("make", [llama_job, lambda: bert_job(dropout=0.1)], ids=["Llama", "BERT"])
def test_an_adopted_model_is_compared_layer_by_layer(make):
    job = make()
    adopt(job.model)
    torch.manual_seed(3)
    with om.debug(on_error="raise") as debugger:
        watched = job_gradients(job)
    report = debugger.report()
    modules = {row.site.module for row in report.rows}
    inner = "model.layers.2.self_attn" if "Llama" in type(job.model).__name__ else "bert.encoder.layer.1.attention"
    assert inner in modules
    assert len(report.rows) > 40
    assert str(report).startswith(f"{len(report.rows)} outputs and gradients compared at ")
    if "Llama" in type(job.model).__name__:
        alone = job_gradients(job)
        assert all(torch.equal(watched[key], value) for key, value in alone.items())


# Faults


class Planted:
    """Scale one result of an implementation's launcher."""

    def __init__(self, monkeypatch, operator: str, phase: str, index: int, factor: float):
        op = catalog.operators()[operator]
        (module,) = [i.module for i in op.implementations() if i.name == "eager"]
        honest = getattr(module, f"launch_{phase}")

        def faulty(*args):
            results = honest(*args)
            if not isinstance(results, tuple):
                return results * factor
            return tuple(r * factor if i == index else r for i, r in enumerate(results))

        monkeypatch.setattr(module, f"launch_{phase}", faulty)
        op.forget()
        self.forget = op.forget


@pytest.fixture
def forgotten():
    yield
    for op in catalog.operators().values():
        op.forget()


def test_a_gradient_one_percent_too_large_is_found_named_and_raised(monkeypatch, forgotten):
    Planted(monkeypatch, "rms_norm", "bwd", 1, 1.01)
    with om.force(rms_norm="eager"):
        x, w = torch.randn(64, 48, requires_grad=True), torch.randn(48, requires_grad=True)
        with om.debug(on_error="raise") as debugger:
            y = om.rms_norm(x, w)
            line = test_a_gradient_one_percent_too_large_is_found_named_and_raised.__code__.co_firstlineno + 5
            with pytest.raises(om.BudgetError) as error:
                y.sum().backward()
    (row,) = debugger.report().outside
    assert (row.site.call, row.site.file, row.site.line, row.output) == ("rms_norm", __file__, line, "gradient of weight")
    assert str(error.value).splitlines()[:2] == ["outside the error budget:", str(row)]
    assert str(row).startswith(f"rms_norm at {__file__}:{line}: gradient of weight: ")
    assert row.share > 50


def test_a_fault_inside_a_block_is_found_at_the_blocks_call(monkeypatch, forgotten):
    Planted(monkeypatch, "glu", "bwd", 0, 1.01)
    om.force(glu="eager")
    setup = llama(torch.float32, "mlp")
    x = setup.x(torch.float32)
    with (
        om.debug() as debugger,
        pytest.warns(UserWarning, match="outside its error budget: residual_mlp at .*gradient of gate_proj.weight"),
    ):
        om.residual_mlp(x, setup.norm, setup.module).sum().backward()
    assert "gradient of gate_proj.weight" in {row.output for row in debugger.report().outside}
    assert "gradient of down_proj.weight" not in {row.output for row in debugger.report().outside}


def test_a_missing_gradient_is_outside_its_budget(monkeypatch, forgotten):
    Planted(monkeypatch, "layer_norm", "bwd", 3, 0.0)
    with om.force(layer_norm="eager"), om.debug(on_error="record") as debugger:
        x, b = torch.randn(8, 48), torch.randn(48, requires_grad=True)
        om.layer_norm(x, None, b).sum().backward()
    assert [row.output for row in debugger.report().outside] == ["gradient of bias"]


def test_a_wrong_output_is_found_without_gradients_too(monkeypatch, forgotten):
    Planted(monkeypatch, "softmax", "fwd", 0, 1.01)
    with torch.no_grad(), om.force(softmax="eager"), om.debug(on_error="record") as debugger:
        om.softmax(torch.randn(8, 48))
    assert [row.output for row in debugger.report().outside] == ["output"]


# Switches


def test_only_every_nth_call_of_a_site_is_compared():
    x = torch.randn(4, 16)
    with om.debug(every=3) as debugger:
        for _ in range(7):
            om.softmax(x)
        om.softmax(x)
    assert sorted(row.calls for row in debugger.report().rows) == [1, 3]


def test_skipped_functions_and_switched_off_calls_are_not_compared():
    x = torch.randn(4, 16)
    with om.debug(skip=("softmax",)) as debugger:
        om.softmax(x)
        with om.enabled(False):
            om.rms_norm(x)
    assert debugger.report().rows == ()
    assert str(debugger.report()) == "no fused call was compared"


def test_debugging_ends_with_the_block_or_when_told_to():
    with om.debug():
        assert settings.STATE.debug is not None
    assert settings.STATE.debug is None
    debugger = om.debug()
    debugger.off()
    assert settings.STATE.debug is None


def test_what_plain_pytorch_cannot_say_either_is_not_an_error():
    x = torch.tensor([[float("inf"), 1.0, 2.0, 3.0]] * 20)
    with om.debug(on_error="raise") as debugger:
        om.rms_norm(x)
    assert debugger.report().rows[0].share <= 1.0


def test_a_backward_run_twice_is_compared_twice():
    x = torch.randn(4, 16, requires_grad=True)
    with om.debug(on_error="raise") as debugger:
        y = om.softmax(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
    assert {row.output: row.calls for row in debugger.report().rows} == {"output": 1, "gradient of x": 2}


def test_bad_options_are_refused_in_words():
    with pytest.raises(om.ArgumentError) as error:
        om.debug(on_error="ignore")
    assert str(error.value) == "debug: on_error must be one of 'warn', 'raise', 'record'; got 'ignore'. Pick one of these."
    with pytest.raises(om.ArgumentError) as error:
        om.debug(every=0)
    assert str(error.value) == "debug: every must be above 0; got 0. Pass a positive every."


def test_an_operator_under_debug_keeps_its_name_and_documentation():
    assert om.rms_norm.__name__ == "rms_norm"
    assert "Root-mean-square" in om.rms_norm.__doc__


def test_nothing_is_warned_about_when_all_is_well():
    setup = llama(torch.float32, "attention")
    with warnings.catch_warnings(), om.debug():
        warnings.simplefilter("error")
        om.residual_attention(setup.x(torch.float32), setup.norm, setup.module, **setup.kwargs).sum().backward()


def test_autocast_is_compared_in_its_own_dtype():
    setup = llama(torch.float32, "mlp")
    x = torch.randn(2, SEQ, WIDTH, requires_grad=True)
    with om.debug(on_error="raise") as debugger:
        with torch.autocast("cpu", torch.bfloat16):
            y = om.residual_mlp(x, setup.norm, setup.module)
        y.sum().backward()
    assert {"output", "gradient of up_proj.weight"} <= {row.output for row in debugger.report().rows}
