"""`om.register`: a user's operator joins the catalogue when it is proved right."""

from __future__ import annotations

import copy
import pickle
import types
from typing import NamedTuple

import pytest
import torch

import ops_math as om
from ops_math import ArgumentError, UnsupportedError, VerificationError, catalog, schedule
from ops_math.registered import describe
from ops_math.spec import Cost
from tests.verify import broken


@pytest.fixture
def entered():
    """Enters operators, and takes them out again."""
    names = []

    def enter(name, op, **options):
        usual = {"reference": broken.norm_reference, "cases": broken.norm_inputs, "faults": (), "tempers": ("confident",)}
        made = om.register(name, op, **{**usual, **options})
        names.append(name)
        return made

    yield enter
    for name in names:
        om.unregister(name)
    om.reset_stats()


def inputs(rows=8, cols=32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, cols, generator=generator, requires_grad=True)
    return x, torch.randn(cols, generator=generator, requires_grad=True)


class NormProblem(NamedTuple):
    rows: int
    cols: int
    x: str


def problem(x, weight, eps=1e-6):
    return NormProblem(x.shape[0], x.shape[1], "fp32")


def only_narrow(problem, device, phase):
    return None if problem.cols <= 64 else f"takes up to 64 columns, not {problem.cols}"


def test_a_proved_operator_runs_counts_and_is_explained(entered):
    norm = entered("user_norm", broken.norm, cost=lambda p, phase: Cost((("x", 4096),), (), ()))
    assert norm.report.ok
    x, weight = inputs()
    y = norm(x, weight, eps=1e-6)
    assert torch.equal(y, broken.norm(x, weight))
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    (row,) = [r for r in om.stats().rows if r.op == "user_norm"]
    assert (row.implementation, row.calls, row.bytes, row.fallback) == ("own", 1, 4096, "")
    found = norm.explain(x, weight, eps=1e-6)
    assert [r.implementation for r in found.rows] == ["own", "reference"]
    assert found.rows[0].runs
    assert catalog.operators()["user_norm"] is norm


def test_what_it_does_not_support_falls_back_to_the_reference_and_the_statistics_say_why(entered):
    norm = entered("user_norm", types.SimpleNamespace(run=broken.norm, supports=only_narrow), problem=problem)
    x, weight = inputs(cols=65)
    assert torch.equal(norm(x, weight), broken.norm_reference(x, weight))
    (row,) = [r for r in om.stats().rows if r.op == "user_norm"]
    assert (row.implementation, row.fallback) == ("reference", "takes up to 64 columns, not 65")


def test_it_can_be_forced_and_switched_off_and_works_without_gradients(entered):
    norm = entered("user_norm", broken.norm)
    x, weight = inputs()
    with om.force(user_norm="reference"):
        assert torch.equal(norm(x, weight), broken.norm_reference(x, weight))
    before = om.stats()
    with om.enabled(False):
        assert torch.equal(norm(x, weight), broken.norm_reference(x, weight))
    assert om.stats() == before
    with torch.no_grad():
        assert not norm(x, weight).requires_grad
    with pytest.raises(ArgumentError, match=r"force: user_norm must be one of 'own', 'reference'; got 'triton_gpu'\. Pick one of these\."):
        om.force(user_norm="triton_gpu")


def test_the_choice_is_made_once_a_problem_and_anew_when_the_record_changes(entered):
    asked = []

    def supports(problem, device, phase):
        asked.append(problem)

    norm = entered("user_norm", types.SimpleNamespace(run=broken.norm, supports=supports), problem=problem)
    x, weight = inputs()
    norm(x, weight)
    norm(x, weight)
    assert asked == [NormProblem(8, 32, "fp32")]
    with schedule.freeze():
        norm(x, weight)
    assert len(asked) == 2


def test_a_wrong_operator_is_refused_with_the_report_and_leaves_nothing_behind():
    with pytest.raises(VerificationError) as error:
        om.register("user_norm", broken.norm_with("scale"), reference=broken.norm_reference, cases=broken.norm_inputs, faults=())
    assert "user_norm: verification found it wrong." in str(error.value)
    assert "is 1.01 times what it should be, everywhere alike" in str(error.value)
    assert "user_norm" not in catalog.operators()
    with pytest.raises(ArgumentError, match="force: operator must be one of"):
        om.force(user_norm="own")


def test_it_is_entered_unproved_when_that_is_asked_for(entered):
    norm = entered("user_norm", broken.norm_with("scale"), verify=False)
    assert norm.report is None


@pytest.mark.slow
def test_compiled_it_gives_the_same_numbers_forward_and_backward(entered):
    norm = entered("user_norm", broken.norm)
    x, weight = inputs()
    torch._dynamo.reset()
    y = torch.compile(lambda a, b: norm(a, b) * 2, backend="aot_eager", fullgraph=True)(x, weight)
    assert torch.equal(y, norm(x, weight) * 2)
    got = torch.autograd.grad(y.square().sum(), (x, weight))
    want = torch.autograd.grad((norm(x, weight) * 2).square().sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.slow
def test_compiled_one_that_asks_about_problems_is_refused_in_words_until_one_is_forced(entered):
    norm = entered("user_norm", types.SimpleNamespace(run=broken.norm, supports=only_narrow), problem=problem)
    x, weight = inputs()
    torch._dynamo.reset()
    words = r"user_norm under torch\.compile: what it supports is asked with sizes, which a compiler does not have\."
    with pytest.raises(UnsupportedError, match=words):
        norm._while_compiling((x, weight), {})
    with om.force(user_norm="own"):
        compiled = torch.compile(lambda a, b: norm(a, b), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, weight), broken.norm(x, weight))


@pytest.mark.parametrize(
    ("name", "op", "sentence"),
    [
        ("my norm", broken.norm, "register: name must be a Python name; got 'my norm'. Write it like my_norm."),
        (
            "rms_norm",
            broken.norm,
            "register: name must be one that the catalogue does not have; got 'rms_norm'. Take another, or unregister it first.",
        ),
        ("user_norm", 3, "register: op must be a function, or a module with run(); got int. Pass what computes it."),
        (
            "user_norm",
            torch.nn.RMSNorm(4),
            "register: op must be a function, or a module with run(); got the layer RMSNorm. Pass a function of tensors, so that "
            "parameters are arguments whose gradients can be proved.",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused_in_words(name, op, sentence):
    with pytest.raises(ArgumentError) as error:
        om.register(name, op, reference=broken.norm_reference, cases=broken.norm_inputs)
    assert str(error.value) == sentence


def test_cases_are_asked_for_and_only_what_was_registered_can_be_taken_out():
    with pytest.raises(ArgumentError) as error:
        om.register("user_norm", broken.norm, reference=broken.norm_reference)
    assert str(error.value) == ("register: cases must be inputs to prove it on; got None. Pass a function of a draw, or verify=False.")
    with pytest.raises(ArgumentError) as error:
        om.unregister("rms_norm")
    assert str(error.value) == "unregister: name must be one that was registered; got 'rms_norm'. Registered are: none."


def test_tensors_in_a_list_are_described_by_shape_and_not_read():
    made = [describe([torch.full((3,), value), torch.full((2, 2), value)], "sum", eps=1e-6) for value in (0.0, 1.0)]
    assert made[0] == made[1] == (((3,), (2, 2)), ("fp32", "fp32"), "0=[, ], 1='sum', eps=1e-06")
    assert describe("") != describe()


@pytest.mark.parametrize("name", [3, None, [], b"norm"])
def test_a_name_that_is_no_word_is_refused_in_words(name):
    with pytest.raises(ArgumentError, match=r"^register: name must be a Python name; got "):
        om.register(name, broken.norm, reference=broken.norm_reference, verify=False)
    with pytest.raises(ArgumentError, match=r"^unregister: name must be one that was registered; got "):
        om.unregister(name)


@pytest.mark.parametrize("argument", ["problem", "cost"])
def test_what_describes_a_call_must_be_a_function(argument):
    with pytest.raises(ArgumentError, match=rf"^register: {argument} must be a function, or None; got int\."):
        om.register("user_norm", broken.norm, reference=broken.norm_reference, verify=False, **{argument: 3})


class Holder(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.weight = op, torch.nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.op(x, self.weight)


def test_a_model_that_holds_one_can_be_copied_and_saved_whole(entered, tmp_path):
    model = Holder(entered("user_norm", broken.norm, verify=False))
    x = inputs()[0].detach()
    average = copy.deepcopy(model)  # as averages of weights are made
    assert average.op is model.op
    assert average.weight is not model.weight
    assert copy.copy(model.op) is model.op
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))


def test_a_pickle_of_one_that_is_not_registered_is_refused_in_words(entered):
    saved = pickle.dumps(entered("user_norm", broken.norm, verify=False)).replace(b"user_norm", b"your_norm")
    with pytest.raises(
        UnsupportedError, match=r"^loading your_norm: no operator of this name is registered here\. Call ops_math\.register"
    ):
        pickle.loads(saved)


def _answering(supports):
    return types.SimpleNamespace(run=lambda x: x * 2.0, supports=supports)


MISTAKEN = {
    "supports": (lambda answer: {"op": _answering(lambda problem, device, phase: answer)}, (True, False, 0)),
    "problem": (lambda answer: {"problem": lambda x: answer}, ([1], {"rows": 1}, ([1],))),
    "cost": (lambda answer: {"cost": lambda problem, phase: answer}, (None, 12)),
}


@pytest.mark.parametrize(("argument", "answer"), [(name, answer) for name, (_, answers) in MISTAKEN.items() for answer in answers])
def test_a_function_that_answers_something_else_is_named_with_its_answer(argument, answer):
    given = {"op": lambda x: x * 2.0, **MISTAKEN[argument][0](answer)}
    entry = om.register("mistaken", given.pop("op"), reference=lambda x: x * 2.0, verify=False, **given)
    try:
        with pytest.raises(om.ArgumentError, match=f"^mistaken: {argument} must be a function that returns .*; got one that returns "):
            entry(torch.ones(3))
    finally:
        om.unregister("mistaken")
