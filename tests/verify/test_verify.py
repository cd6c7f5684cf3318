"""`verify` passes honest functions and says in words what is wrong with others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ops_math import checks
from ops_math.testing import Draw, as_call, run, verify
from tests.verify import broken

ROOT = Path(__file__).resolve().parents[2]


def held(op, **options):
    usual = {"reference": broken.norm_reference, "inputs": broken.norm_inputs, "faults": ()}
    return verify(op, **{**usual, **options})


def checks_of(report):
    return {f.check for f in report.findings}


def finding(report, check, output=None):
    found = [f for f in report.findings if f.check == check and output in (None, f.output)]
    assert found, str(report)
    return found[0]


@pytest.mark.slow
def test_an_honest_norm_is_right_in_every_dtype_and_every_planted_fault_is_caught():
    report = held(broken.norm, dtypes=("fp32", "bf16", "fp16"), faults=None)
    assert report.ok, str(report)
    assert report.findings == report.alive == ()
    assert len(report.caught) > 120
    assert len({name.rpartition(" (")[0] for name, _ in report.caught}) > 40
    assert all(0 < margin.share < 1 for statistic, margin in report.margins if statistic != "size")
    report.require()


@pytest.mark.slow
def test_an_honest_loss_is_right_on_confident_logits_too():
    report = verify(broken.loss, reference=broken.loss_reference, inputs=[broken.loss_inputs, broken.confident_inputs])
    assert report.ok, str(report)


def test_a_loss_that_uses_the_first_rows_gradient_for_all_is_found_and_named():
    op = broken.loss_of_the_first_gradient
    report = verify(op, reference=broken.loss_reference, inputs=broken.loss_inputs, faults=())
    found = finding(report, "values", "d0")
    assert "uses one row's output gradient for every row: right where all are equal" in found.words
    assert "tokens=2" in found.smallest


def test_a_true_class_that_is_rounded_before_one_is_subtracted_is_found():
    op = broken.loss_rounded_before_the_subtraction
    report = verify(op, reference=broken.loss_reference, inputs=broken.confident_inputs, dtypes=("bf16",), faults=())
    assert finding(report, "values", "d0")
    with pytest.raises(checks.VerificationError, match="verification found it wrong"):
        report.require()


@pytest.mark.parametrize(
    ("fault", "output", "words"),
    [
        ("scale", "d1", "is 1.01 times what it should be, everywhere alike"),
        ("eps", "out0", "times what it should be, everywhere alike"),
        ("last rows", "out0", "the last ones"),
        ("no weight gradient", "d1", "is zero everywhere: no gradient arrives, or nothing was written"),
        ("statistic in bf16", "d0", "is off by 0.0024 of its size (rows error"),
        ("sum in bf16", "d1", "is off by"),
    ],
)
@pytest.mark.slow
def test_a_wrong_number_is_described(fault, output, words):
    report = held(broken.norm_with(fault))
    assert words in finding(report, "values", output).words, str(report)


@pytest.mark.parametrize(
    ("op", "check", "words"),
    [
        (broken.norm_of_wrong_rows, "inputs transposed", "where they are transposed (as views of the same numbers)"),
        (broken.norm_of_old_memory, "unwritten memory", "are read from memory that was never written (fresh buffers held NaN)"),
        (broken.norm_without_repeat, "repeats", "differ between two runs of one call"),
        (broken.norm_cut_from_the_graph, "values", "has no graph: every gradient through it would be lost without an error"),
        (broken.norm_with("overwrites"), "output gradients kept", "overwrites the incoming gradient"),
    ],
)
def test_a_wrong_behaviour_is_described(op, check, words):
    report = held(op, dtypes=("fp32",))
    assert any(words in f.words for f in report.findings if f.check == check), str(report)


def test_an_input_that_is_written_to_is_named():
    report = held(broken.norm_that_writes, dtypes=("fp32",), frozen=(0, 1))
    assert finding(report, "inputs kept", "0").words == "this input was written to"


def test_what_a_function_refuses_in_words_is_listed_and_no_fault():
    report = held(broken.norm_of_16, dtypes=("fp32",))
    assert report.ok, str(report)
    assert any("ValueError: norm_of_16: the width must be a multiple of 16" in text for text in report.refused)


def test_a_reason_that_many_cases_share_is_printed_once_with_their_number():
    def refusing(x, weight, **options):
        raise ValueError("never")

    text = str(held(refusing, dtypes=("fp32",)))
    lines = [line for line in text.splitlines() if line.startswith("refuses")]
    assert len(lines) == 1
    assert re.fullmatch(r"refuses \d+ cases, the first norm_inputs.* in fp32: ValueError: never", lines[0])


def test_a_module_whose_parameters_are_not_arguments_says_that_their_gradients_are_not_looked_at():
    module = torch.nn.RMSNorm(48, eps=1e-6)

    def reference(x, weight=1.0):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    few = {"dtypes": ("fp32",), "tempers": (), "faults": ()}
    report = verify(module, reference=reference, inputs=lambda d, rows=9: (d.normal(rows, 48),), **few)
    words = "no gradient of theirs is looked at; make them arguments by torch.func.functional_call"
    assert report.ok
    assert report.skipped == (f"parameters of the module (weight): {words}",)

    def both(x, weight):
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    report = verify(both, reference=reference, inputs=lambda d, rows=9: (d.normal(rows, 48), d.normal(48)), **few)
    assert report.ok
    assert report.skipped == ()


def test_a_division_by_zero_on_no_rows_is_a_fault_and_not_a_refusal():
    report = held(broken.norm_dividing_by_rows, dtypes=("fp32",))
    assert finding(report, "runs").words == "stops with ZeroDivisionError: integer division or modulo by zero"


def test_the_smallest_failing_input_is_small_and_its_snippet_shows_the_fault(tmp_path):
    report = verify(
        broken.loss_of_the_first_gradient, reference=broken.loss_reference, inputs=broken.loss_inputs, dtypes=("fp32",), faults=()
    )
    found = finding(report, "values", "d0")
    assert found.smallest.startswith("(float32[2, 2], int64[2])")
    done = subprocess.run(
        [sys.executable, "-c", found.snippet],
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = next(line for line in done.stdout.splitlines() if line.startswith("d0 "))
    assert shown.endswith("<- wrong")
    assert float(shown.split()[1]) > 1e-3


def test_inputs_may_be_a_mapping_a_sequence_or_a_function_that_returns_one():
    for inputs in ({"wide": broken.norm_inputs}, [broken.norm_inputs], lambda: [broken.norm_inputs]):
        assert held(broken.norm, inputs=inputs, dtypes=("fp32",), tempers=(), skip=("strides", "graph")).ok


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"op": torch.nn.RMSNorm}, "verify: op must be a function, or a module that is made; got the class RMSNorm. "
         "Make one: RMSNorm(...)."),
        ({"dtypes": ("fp8",)}, "verify: dtypes must be one of 'fp32', 'bf16', 'fp16'; got 'fp8'. Pick one of these."),
        ({"inputs": [3]}, "verify: inputs must be functions of a draw, e.g. `lambda d, rows=64: (d.normal(rows, 256),)`, or Cases; "
         "got int. See ops_math.testing.Draw for what a draw makes."),
    ],
)  # fmt: skip
def test_what_cannot_be_verified_is_refused_in_words(options, sentence):
    with pytest.raises(checks.ArgumentError) as error:
        held(**{"op": broken.norm, **options})
    assert str(error.value) == sentence


def with_best(x, weight, eps):
    return broken.norm(x, weight, eps=eps), x.argmin(-1), len(x)


def with_best_reference(x, weight, eps):
    return broken.norm_reference(x, weight, eps=eps), x.argmax(-1), len(x)


def test_results_that_are_no_floating_tensors_are_named_as_not_looked_at():
    report = verify(with_best, reference=with_best_reference, inputs=broken.norm_inputs, faults=(), tempers=(), dtypes=("fp32",))
    assert report.ok, str(report)
    advice = "only floating results are held to the reference; compare this one yourself"
    assert {f"result 1 (int64): {advice}", f"result 2 (int): {advice}"} <= set(report.skipped)
    assert "skipped 2 cases, the first result 1 (int64): only floating results" in str(report)


@pytest.mark.parametrize("op", [lambda x, weight, eps: x.argmin(-1), lambda x, weight, eps: {"y": x}])
def test_a_function_without_a_floating_result_is_not_right(op):
    report = verify(op, reference=op, inputs=broken.norm_inputs, faults=(), tempers=(), dtypes=("fp32",))
    assert not report.judged
    assert "the reference returns no floating tensor" in str(report)


@pytest.mark.parametrize("frozen", [7, "mask", -1])
def test_a_frozen_argument_that_is_not_there_is_refused_in_words(frozen):
    with pytest.raises(checks.ArgumentError) as error:
        held(broken.norm, frozen=(1, frozen))
    has = "The inputs have 0, 1, 'eps'."
    assert str(error.value) == f"verify: frozen must be positions and keywords of arguments; got {frozen!r}. {has}"


def test_a_backend_that_is_not_there_is_refused_before_anything_runs():
    with pytest.raises(checks.ArgumentError, match=r"^verify: compile must be one of .*inductor.*; got 'bogus'\."):
        held(lambda *given: pytest.fail("ran"), compile="bogus")


def test_nothing_judged_is_not_right():
    def impossible(d, rows=4):
        raise ValueError("no such input")

    report = held(broken.norm, inputs=impossible, dtypes=("fp32",))
    assert not report.ok
    assert not report.judged
    assert "nothing could be judged" in str(report)


@pytest.mark.parametrize("op", [lambda x: x * torch.nan, lambda x: x * 2.0])
def test_a_reference_that_gives_nan_wherever_there_are_numbers_proves_nothing(op):
    report = verify(op, reference=lambda x: x * torch.nan, inputs=lambda d, rows=8: (d.normal(rows, 4),), dtypes=("fp32",), faults=())
    assert not report.ok
    assert "nothing could be judged" in str(report)
    assert "the reference gives NaN" in str(report)


def test_inputs_that_differ_from_call_to_call_are_refused_and_blame_no_function():
    with pytest.raises(checks.ArgumentError) as error:
        verify(torch.sin, reference=torch.sin, inputs=lambda d, rows=8: (torch.randn(rows, 4),), dtypes=("fp32",), faults=())
    do = "Make them of the draw: d.normal(rows, cols), d.ints(...), or a generator with a seed."
    assert str(error.value) == f"verify: inputs must be the same each time for one draw; got other numbers in argument 0. {do}"


def test_a_biased_rounding_is_found_though_each_element_is_within_one_unit():
    def floor(x):
        return _Floor.apply(x)

    report = verify(
        floor, reference=lambda x: x * 1.7, inputs=lambda d, rows=64, cols=64: (d.normal(rows, cols),), dtypes=("bf16",), faults=()
    )
    assert "rounds down" in finding(report, "rounding bias", "out0").words


class _Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        wide = x.float() * 1.7
        y = wide.to(x.dtype)
        return torch.where(y.float() > wide, torch.nextafter(y, torch.full_like(y, -torch.inf)), y) if x.dtype == torch.bfloat16 else y

    @staticmethod
    def backward(ctx, dy):
        return (dy.float() * 1.7).to(dy.dtype)


def test_a_call_of_many_forms_is_made_of_what_inputs_return():
    d = Draw(1, "fp32")
    x = d.normal(2)
    assert as_call(x).args == (x,)
    assert as_call((x, {"eps": 1.0})).kwargs == {"eps": 1.0}
    assert run(lambda t, eps: t * eps, as_call((x, {"eps": 1.0}))).names == ("out0", "d0")


def test_an_offset_past_two_to_the_31_that_wraps_is_found_without_touching_the_memory_between():
    def wrapping(x, weight, eps=1e-6):
        if x.dim() == 2 and x.shape[0] > 1 and x.stride(0) * (x.shape[0] - 1) >= 2**31:
            x = torch.cat((x[:-1], x[:1]))
        return broken.norm(x, weight, eps)

    options = {
        "dtypes": ("bf16",),
        "tempers": (),
        "far": True,
        "skip": ("rounding bias", "strides", "repeats", "graph", "one gradient alone"),
    }
    assert held(broken.norm, **options).ok
    found = finding(held(wrapping, **options), "inputs far apart", "out0")
    assert found.words == "is wrong where a row lies 2^31 elements behind the first"
    assert found.smallest.startswith("(bfloat16[2, ")


@pytest.mark.slow
def test_a_compiled_function_is_held_to_the_same_budget():
    report = held(broken.norm, dtypes=("fp32",), tempers=(), compile="aot_eager", skip=("strides", "graph"))
    assert report.ok, str(report)
    assert dict(report.tried)["compiled by aot_eager"] == 2
