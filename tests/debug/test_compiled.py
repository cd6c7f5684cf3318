"""Compiled and eager runs are compared by module, call and direction: at the boundary of what is compiled, and by weight inside."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker, Key
from ops_nn.models.llama import LlamaConfig, LlamaForCausalLM
from tests.debug.broken import run

CHECKER = ConsistencyChecker(observe="all", dump_on_failure=False)
LOOK = "trace under torch.compiler.set_stance('force_eager') to look inside"
BACKENDS = [
    "eager",
    pytest.param("aot_eager", marks=pytest.mark.slow),
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="missing capability: a C++ compiler"),
        ],
    ),
]


class Block(nn.Module):
    """x + f(norm(x)), with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.linear(torch.relu(self.norm(x)))


class Model(nn.Module):
    """Blocks, of which the middle one is called twice, and two results of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = x + self.shift
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        logits = self.head(x)
        return logits.square().mean(), logits


def whole(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def one_block(model, backend):
    model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
    return model


def every_block(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


WAYS = [whole, in_place, one_block, every_block]
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.fixture(scope="module")
def eager():
    torch.manual_seed(0)
    model = Model()
    return model, run(CHECKER, model, loss)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    counters.clear()


def loss(model):
    return model(X)[0]


def boundary(path, call=0):
    named = {"input": "0", "forward": "0" if not path else "", "output gradient": "0" if not path else "", "input gradient": "0"}
    return {Key(path, call, direction, name) for direction, name in named.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_run_is_compared_at_its_boundary_and_by_the_gradient_of_every_weight(way, backend, eager):
    model, a = eager
    compiled = way(copy.deepcopy(model), backend)
    b = run(CHECKER, compiled, loss)
    assert counters["stats"]["unique_graphs"] >= 1
    assert {key.module for key in b.records} <= a.modules.keys()
    assert b.modules.keys() == a.modules.keys()
    weights = {key for key in a.records if key.direction in ("parameter", "parameter gradient")}
    assert len(weights) == 2 * (3 * 5 + 3)
    expected = weights | boundary("")
    if way in (one_block, every_block):
        expected |= boundary("blocks.1") | boundary("blocks.1", 1)
    assert expected <= b.records.keys()
    report = CHECKER.compare(b, trace=a)
    assert report.verdict == ("within rounding" if backend == "inductor" and report.verdict != "bitwise" else "bitwise"), str(report)
    assert report.structure == []
    assert report.missing == []
    assert {row.key for row in report.rows} == b.records.keys()


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (whole, f"the model is compiled: seen at its boundary, its 11 inner modules are not; {LOOK}"),
        (in_place, f"the model is compiled: seen at its boundary, its 11 inner modules are not; {LOOK}"),
        (one_block, f"blocks.1 is compiled: seen at its boundary, its 2 inner modules are not; {LOOK}"),
        (every_block, f"3 modules are compiled, the first blocks.0: seen at their boundaries, 6 modules inside are not; {LOOK}"),
    ],
)
def test_what_is_not_seen_is_said_and_looked_into_by_the_way_that_is_named(way, words, eager):
    model, a = eager
    compiled = way(copy.deepcopy(model), "eager")
    assert words in run(CHECKER, compiled, loss).notes
    with torch.compiler.set_stance("force_eager"):
        inside = run(CHECKER, compiled, loss)
    assert inside.records.keys() == a.records.keys()
    assert [(c.module, c.number) for c in inside.calls] == [(c.module, c.number) for c in a.calls]
    assert not [note for note in inside.notes if "compiled" in note]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_weight_gradient_that_is_a_percent_off_inside_compiled_code_is_found_by_name(way, backend, eager):
    model, a = eager
    wrong = copy.deepcopy(model)
    wrong.blocks[1].linear.weight.register_hook(lambda g: g * 1.01)
    report = CHECKER.compare(run(CHECKER, way(wrong, backend), loss), trace=a)
    assert [str(found.key) for found in report.findings] == ["blocks.1.linear, parameter gradient of weight"]


@pytest.mark.parametrize(("way", "culprit"), [(whole, ""), (in_place, ""), (one_block, "blocks.1"), (every_block, "blocks.1")])
def test_a_fault_inside_compiled_code_is_found_at_the_innermost_boundary(way, culprit, eager):
    class Wrong(Block):
        def forward(self, x):
            return x + self.gain * 1.01 * self.linear(torch.relu(self.norm(x)))

    model, a = eager
    wrong = copy.deepcopy(model)
    wrong.blocks[1].__class__ = Wrong
    report = CHECKER.compare(run(CHECKER, way(wrong, "eager"), loss), trace=a)
    assert report.verdict == "different"
    assert report.first.key.module == culprit
    assert report.first.key.direction == "forward"


def test_two_compiled_runs_are_compared_and_keep_nothing_of_the_checker(eager):
    """Entering a trace compiles nothing anew, and neither does leaving it."""
    model, _ = eager
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    graphs, traces = [], []
    for _ in range(2):
        loss(compiled).backward()
        graphs.append(counters["stats"]["unique_graphs"])
        traces.append(run(CHECKER, compiled, loss))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1, 1]
    assert CHECKER.compare(traces[1], trace=traces[0]).verdict == "bitwise"


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_of_a_compiled_function_that_calls_the_model_weights_and_gradients_are_compared_and_that_is_said(factor, eager):
    model, a = eager
    wrong = copy.deepcopy(model)
    wrong.blocks[1].linear.weight.register_hook(lambda g: g * factor)
    step = torch.compile(lambda: loss(wrong), backend="eager", fullgraph=True)
    b = run(CHECKER, wrong, lambda m: step())
    assert b.calls == []
    words = "no call of a module was seen, as where a function that calls the model is compiled: parameters and gradients alone are"
    assert words in b.notes
    report = CHECKER.compare(b, trace=a)
    found = [str(found.key) for found in report.findings]
    assert found == ([] if factor == 1.0 else ["blocks.1.linear, parameter gradient of weight"])
    assert report.verdict == ("bitwise" if factor == 1.0 else "different")


@pytest.mark.parametrize("way", WAYS)
def test_lockstep_holds_the_compiled_boundary_and_the_modules_inside_by_one_name(way, eager):
    model, _ = eager
    report = CHECKER.lockstep(model, way(copy.deepcopy(model), "eager"), loss)
    assert report.verdict == "bitwise", str(report)
    assert {row.key.module for row in report.rows} >= {"", "blocks.1", "blocks.1.linear"}
    assert not [row for row in report.rows if "_orig_mod" in str(row.key)]
    wrong = copy.deepcopy(model)
    wrong.blocks[1].linear.weight.data.mul_(1.01)
    assert CHECKER.lockstep(model, way(wrong, "eager"), loss).first.key == Key("blocks.1.linear", 0, "forward", "")
    assert CHECKER.lockstep(way(copy.deepcopy(model), "eager"), model, loss).verdict == "bitwise"


class DistributedDataParallel(nn.Module):
    """Named as PyTorch's, which needs a process group: it holds its model as `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def test_a_compiled_wrapper_and_a_trace_from_a_file_keep_the_bare_names(eager, tmp_path):
    model, a = eager
    wrapped = torch.compile(DistributedDataParallel(copy.deepcopy(model)), backend="eager")
    b = run(CHECKER, wrapped, loss)
    b.save(tmp_path / "b")
    report = CHECKER.compare(tmp_path / "b", trace=a)
    assert report.structure == []
    assert report.verdict == "bitwise"
    assert {Key("", 0, "parameter gradient", "shift"), Key("blocks.1", 0, "parameter gradient", "gain")} <= {r.key for r in report.rows}
    wrapped.get_parameter("_orig_mod.module.blocks.1.linear.weight").register_hook(lambda g: g * 1.01)
    run(CHECKER, wrapped, loss).save(tmp_path / "c")
    report = CHECKER.compare(tmp_path / "c", trace=a)
    assert [str(found.key) for found in report.findings] == ["blocks.1.linear, parameter gradient of weight"]


def test_graph_breaks_inside_leave_the_boundary(eager):
    class Broken(Model):
        def forward(self, x):
            x = x + self.shift
            for block in (*self.blocks, self.blocks[1]):
                x = block(x)
                torch._dynamo.graph_break()
            logits = self.head(x)
            return logits.square().mean(), logits

    model, a = eager
    broken = Broken()
    broken.load_state_dict(model.state_dict())
    b = run(CHECKER, in_place(broken, "eager"), loss)
    assert counters["stats"]["unique_graphs"] > 1
    assert [c.module for c in b.calls] == [""]
    assert CHECKER.compare(b, trace=a).findings == ()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="missing capability: a C++ compiler")
@pytest.mark.parametrize("adopted", [pytest.param(False, marks=pytest.mark.long), True])
def test_rounding_that_adds_up_through_a_deep_compiled_model_is_no_fault_and_half_a_percent_is(adopted):
    """Twelve layers in Inductor's order of sums are 2.5e-5 apart, which is 25 times what rounding explains of one module."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(97, 64, 128, 12, 4, 2, 16))
    if adopted:
        adopt(model)
    ids = torch.randint(0, 97, (2, 24))

    def step(m):
        return m(ids, labels=ids).loss

    a = run(CHECKER, model, step)
    b = run(CHECKER, torch.compile(copy.deepcopy(model), backend="inductor"), step)
    report = CHECKER.compare(b, trace=a)
    assert report.findings == (), str(report)
    wrong = copy.deepcopy(model)
    wrong.model.layers[4].self_attn.q_proj.weight.register_hook(lambda g: g * 1.005)
    report = CHECKER.compare(run(CHECKER, torch.compile(wrong, backend="inductor"), step), trace=a)
    assert [str(found.key) for found in report.findings] == ["model.layers.4.self_attn.q_proj, parameter gradient of weight"]
