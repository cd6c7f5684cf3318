"""`om.determinism` sets what PyTorch needs, says what it can no longer honour, and puts everything back."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math import repeatable, settings

SOURCE = str(Path(__file__).parents[2] / "src")


def state():
    import torch._inductor.config as inductor

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        inductor.max_autotune,
        os.environ.get(repeatable.CUBLAS),
        settings.determinism_level(),
    )


def test_a_context_sets_pytorch_and_puts_everything_back(monkeypatch):
    monkeypatch.delenv(repeatable.CUBLAS, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = state()
    with om.determinism(1) as level:
        assert state() == (True, False, False, True, False, ":4096:8", 1)
        assert "torch.backends.cudnn.benchmark" in level.changed()
        assert repeatable.CUBLAS in level.changed()
        with om.determinism(2):
            assert settings.determinism_level() == 2
        assert state() == (True, False, False, True, False, ":4096:8", 1)
    assert state() == before
    assert before[2] is True


def test_everything_is_put_back_when_the_context_ends_with_an_error():
    before = state()
    with pytest.raises(KeyError), om.determinism(3):
        raise KeyError
    assert state() == before


def test_as_a_statement_it_holds_until_changed():
    before = state()
    level = om.determinism(1)
    try:
        assert settings.determinism_level() == 1
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        level.__exit__(None, None, None)
    assert state() == before


def test_level_zero_touches_nothing_of_pytorch():
    with om.determinism(0) as level:
        assert level.changed() == ()
        assert not torch.are_deterministic_algorithms_enabled()


def test_pytorchs_own_operators_refuse_what_does_not_repeat():
    with om.determinism(1), pytest.raises(RuntimeError, match=r"put_.*does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


def test_a_setting_that_somebody_changes_inside_is_named():
    level = om.determinism(1)
    torch.backends.cudnn.deterministic = False
    assert level.broken() == ("torch.backends.cudnn.deterministic",)
    with pytest.warns(om.DeterminismWarning, match=r"torch\.backends\.cudnn\.deterministic was changed inside the context, so level 1"):
        level.__exit__(None, None, None)


def test_cublas_that_may_have_read_its_variable_is_said_in_words(monkeypatch):
    monkeypatch.delenv(repeatable.CUBLAS, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(
        om.DeterminismWarning, match="CUBLAS_WORKSPACE_CONFIG is not set and CUDA has been used in this process: cuBLAS reads"
    ):
        om.determinism(1).__exit__(None, None, None)
    monkeypatch.setenv(repeatable.CUBLAS, ":4096:2")
    with pytest.warns(om.DeterminismWarning, match="CUBLAS_WORKSPACE_CONFIG is :4096:2 and CUDA"):
        om.determinism(1).__exit__(None, None, None)
    assert os.environ[repeatable.CUBLAS] == ":4096:2"
    monkeypatch.setenv(repeatable.CUBLAS, ":16:8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        om.determinism(1).__exit__(None, None, None)


def test_the_environment_sets_the_level_of_our_operators_alone():
    code = "import torch; from ops_math import settings as s; print(s.determinism_level(), torch.are_deterministic_algorithms_enabled())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": SOURCE, "OPS_MATH_DETERMINISM": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["2", "False"]
