"""Rivals: who is missing is named, who writes into inputs gets copies, whose numbers are wrong is said, and ours come from the policy."""

import importlib
import sys
import types

import pytest
import torch

from ops_math import checks
from ops_math.cli.bench import driver, live, rivals
from tests.cli.bench_fixtures import MadeUpClock

LIGER = "liger_kernel.transformers.functional"


@pytest.fixture
def liger(monkeypatch):
    """A Liger of our own making: an empty module, to be given functions."""
    module = types.ModuleType(LIGER)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, LIGER, module)
    return module


def measure(function, names, shape="8x64"):
    plan = driver.Plan(function, shape, {}, "fp32", torch.device("cpu"), rivals.asked(names))
    return driver.measure(plan, MadeUpClock(0), 0.0, 1)


def test_plain_pytorch_is_always_measured_since_ratios_are_to_it():
    assert rivals.asked("liger,quack") == ("torch", "liger", "quack")
    assert rivals.asked("") == ("torch",)
    with pytest.raises(checks.ArgumentError, match="bench: --vs must be one of"):
        rivals.asked("cudnn")


@pytest.mark.skipif("liger_kernel" in sys.modules, reason="Liger was imported by another test")
def test_a_rival_that_is_not_installed_or_has_no_such_function_is_named():
    found, missing = rivals.subjects("rms_norm", ("torch", "fa4"), False)
    assert [subject.name for subject in found] == ["ops_math", "torch"]
    assert missing == {"fa4": "has no rms_norm"}
    _, missing = rivals.subjects("attention", ("torch", "fa4"), False)
    assert missing == {"fa4": "flash-attn-4 is not installed"}


def test_a_version_without_the_function_is_named(liger):
    _, missing = rivals.subjects("rms_norm", ("liger",), False)
    assert missing == {"liger": "this version has no liger_rms_norm"}


def test_a_rival_that_fails_at_import_is_named(monkeypatch):
    original = importlib.import_module

    def explode(name):
        if name != "quack":
            return original(name)
        raise AssertionError("unknown architecture")

    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setattr(rivals.importlib, "import_module", explode)
    _, missing = rivals.subjects("softmax", ("quack",), False)
    assert missing == {"quack": "fails when imported (AssertionError: unknown architecture)"}


def test_a_rival_runs_and_is_held_to_the_same_numbers(liger):
    liger.liger_rms_norm = lambda x, w, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps)
    outcome = measure("rms_norm", "liger")
    assert (outcome.missing, outcome.failed, outcome.wrong) == ({}, {}, {})
    liger.liger_rms_norm = lambda x, w, eps: 1.01 * torch.nn.functional.rms_norm(x, x.shape[-1:], w, eps)
    outcome = measure("rms_norm", "liger")
    assert list(outcome.wrong) == ["liger"]
    rows = [row for row in driver.rows_of(outcome) if row["variant"] == "liger"]
    assert len(rows) == 2, "it is timed all the same"
    assert all("result 0 is wrong" in row["wrong"] for row in rows)


def test_a_rival_that_writes_into_its_inputs_spoils_nobody_elses(liger):
    def softmax(x):
        with torch.no_grad():
            x.zero_()
        return torch.softmax(x, -1)

    liger.liger_softmax = softmax
    assert list(measure("softmax", "liger,implementations").wrong) == ["liger"], "ours by force come after it"


def test_a_rival_that_raises_drops_out_by_name_and_the_others_are_timed(liger):
    def softmax(x):
        raise ValueError("no such width")

    liger.liger_softmax = softmax
    outcome = measure("softmax", "liger")
    assert outcome.failed == {"liger": "failed: ValueError: no such width"}
    assert {row["variant"] for row in driver.rows_of(outcome)} == {"ops_math", "torch"}


def test_each_implementation_of_ours_can_be_timed_by_force():
    outcome = measure("softmax", "implementations")
    names = {row["variant"] for row in driver.rows_of(outcome)}
    assert {"ops_math:eager", "ops_math:vendor"} <= names
    assert "ops_math:triton_gpu" in outcome.failed
    assert "Triton kernels need a GPU, this is cpu" in outcome.failed["ops_math:triton_gpu"]


def test_liger_rope_gets_its_layout_and_gives_ours_back(liger):
    def rope(q, k, cos, sin):
        assert (q.shape, k.shape, cos.shape) == ((2, 4, 16, 8), (2, 2, 16, 8), (1, 16, 8))
        return tuple(
            t * cos.unsqueeze(1) + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin.unsqueeze(1) for t in (q, k)
        )  # fmt: skip

    liger.liger_rope = rope
    outcome = measure("rope", "liger", "2x16x4x2x8")
    assert (outcome.failed, outcome.wrong) == ({}, {})


def test_what_was_live_says_which_rivals_and_cute_kernels_were_there(monkeypatch):
    found = live.surroundings(torch.device("cpu"))
    assert found["PyTorch's CuTe kernels"] == "not live, without nvidia-cutlass-dsl and apache-tvm-ffi"
    monkeypatch.setattr(live, "version", lambda name: "4.8")
    found = live.surroundings(torch.device("cpu"))
    assert (found["liger"], found["PyTorch's CuTe kernels"]) == ("4.8", "possible")


def test_a_commit_is_given_or_asked_of_git_and_never_of_a_repository_around_an_installation(monkeypatch, tmp_path):
    monkeypatch.setenv("OPS_MATH_COMMIT", "abc")
    assert live.commit() == "abc"
    monkeypatch.delenv("OPS_MATH_COMMIT")
    monkeypatch.setattr(live, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "live.py"))
    assert live.commit() == f"version {live.__version__}"
