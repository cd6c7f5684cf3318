"""`ops-math verify`: what it prints, its exit code, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from ops_math import catalog
from ops_math.cli import app
from ops_math.testing import Fault, judge_for, proof
from ops_math.testing.faults import on_output, planted


def run(*arguments, capsys):
    with pytest.raises(SystemExit) as end:
        app.run(["verify", *arguments])
    return end.value.code, capsys.readouterr()


def test_softmax_is_proved_with_margins_and_faults_by_name(capsys):
    code, shown = run("softmax", "--dtypes", "bf16", "--implementation", "eager", "--json", capsys=capsys)
    (report,) = json.loads(shown.out)
    assert code == 0
    assert report["ok"]
    assert report["implementation"] == "eager"
    assert report["caught"]["result scaled by 1.003 (bf16)"] == "plain"
    assert report["alive"] == []
    assert {"max", "l2", "gain", "rows", "columns", "row", "column"} <= set(report["margins"])
    assert all(0 <= margin["share"] < 1 for margin in report["margins"].values())
    assert report["tried"]["values"] == report["tried"]["strides"]


@pytest.mark.slow
def test_every_implementation_is_named_and_one_that_cannot_run_here_says_why(capsys):
    code, shown = run("softmax", "--dtypes", "fp32", "--no-faults", capsys=capsys)
    assert code == 0
    assert "softmax (triton_gpu) on cpu in fp32: nothing could be judged" in shown.out
    assert "Triton kernels need a GPU, this is cpu" in shown.out
    assert "softmax (vendor) on cpu in fp32: right" in shown.out
    assert "largest element: " in shown.out


def test_an_implementation_that_no_case_reaches_is_not_called_right(capsys):
    """A dropout that drops nothing calls no kernel, so that case alone says nothing about one."""
    code, shown = run("dropout", "--implementation", "triton_gpu", "--dtypes", "bf16", capsys=capsys)
    assert code == 1
    assert "nothing could be judged" in shown.out
    assert "Triton kernels need a GPU" in shown.out
    assert "none dropped in bf16: calls no implementation" in shown.out


def test_a_fault_in_an_operator_of_ours_is_named_and_the_exit_code_is_1(capsys):
    fault = Fault("gradient scaled", "bwd", on_output(0, lambda t: t * 1.01))
    operator = catalog.operators()["gelu"]
    cases = [c for c in operator.file("problem").CASES if "bf16" in c.dtypes]
    for case in cases:  # the yardstick must be measured before anything is planted in it
        judge_for(operator, case, "bf16", "cpu")
    with planted(operator, "eager", fault):
        code, shown = run("gelu", "--dtypes", "bf16", "--implementation", "eager", "--no-faults", capsys=capsys)
    assert code == 1
    assert "gelu (eager) on cpu in bf16: WRONG" in shown.out
    assert "WRONG  values: d0 " in shown.out
    assert "WRONG  formula in float64: " in shown.out


def test_a_living_fault_makes_the_exit_code_1(capsys, monkeypatch):
    invisible = Fault("the last bit of one element", "fwd", on_output(0, lambda t: t * (1 + 2.0**-23)))
    monkeypatch.setattr(proof, "FAULTS", (invisible,))
    code, shown = run("softmax", "--dtypes", "fp32", "--implementation", "eager", capsys=capsys)
    assert code == 1
    assert "ALIVE   the last bit of one element (fp32): no case shows this fault" in shown.out


def test_a_function_of_anybodys_is_held_to_a_reference(capsys):
    given = ("--reference", "tests.verify.broken:loss_reference", "--inputs", "tests.verify.broken:loss_inputs", "--dtypes", "fp32")
    code, shown = run("tests.verify.broken:loss_of_the_first_gradient", *given, "--no-faults", capsys=capsys)
    assert code == 1
    assert "uses one row's output gradient for every row" in shown.out
    assert "from tests.verify.broken import loss_of_the_first_gradient as op" in shown.out
    code, shown = run("tests.verify.broken:loss", *given, "--no-faults", capsys=capsys)
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["rms_nrom"],
            "got 'rms_nrom'. Did you mean 'rms_norm'? For a function of your own write MODULE:NAME and give --reference and --inputs.",
        ),
        (["math:sin"], "verify: --reference must be MODULE:NAME, for a function that is not ours; got nothing. See docs/verify.md."),
        (
            ["math:sinn", "--reference", "math:sin", "--inputs", "math:sin"],
            "verify: OP must be something that can be imported; got 'math:sinn' (module 'math' has no attribute 'sinn'). "
            "Run from its folder, or install it.",
        ),
        (
            ["softmax", "--reference", "math:sin"],
            "verify: --reference must be left out for an operator of ours; got it. It belongs to MODULE:NAME; ours bring their own.",
        ),
        (["softmax", "--dtypes", "fp8"], "verify: --dtypes must be one of 'fp32', 'bf16', 'fp16'; got 'fp8'. Pick one of these."),
        (["softmax", "--device", "cuda"], "verify: --device cuda: torch sees no GPU here. Use --device cpu, or run `ops-math doctor`"),
        (["softmax", "--dtypes", ","], "verify: --dtypes must be at least one of fp32, bf16, fp16; got ','. Leave it out for fp32,bf16."),
        (["softmax", "--implementation", "cudnn"], "verify: --implementation must be one of 'triton_gpu', 'vendor', 'eager'; got 'cudnn'."),
    ],
)
def test_what_cannot_be_verified_is_one_sentence_and_exit_code_2(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, shown = run(*arguments, capsys=capsys)
    assert code == 2
    assert words in shown.err


@pytest.mark.parametrize(("text", "words"), [
    ("import sys\nsys.exit(7)", """got 'script:f', which ends the process (code 7). Guard what it runs by `if __name__ == "__main__":`."""),
    ("def f(:", "got 'script:f' (invalid syntax (script.py, line 1)). Run from its folder, or install it."),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_named(text, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    code, shown = run("script:f", "--reference", "math:sin", "--inputs", "math:sin", capsys=capsys)
    assert code == 2
    assert words in shown.err


def test_the_help_names_every_option(capsys):
    code, shown = run("--help", capsys=capsys)
    assert code == 0
    options = "reference inputs device dtypes implementation frozen tempers compile far faults json quiet"
    for option in (f"--{name}" for name in options.split()):
        assert option in shown.out
