"""Files that a diagnosis leaves: those that its words name, and no others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ops_math as om
from ops_nn.debug import ConsistencyChecker
from ops_nn.debug.selfcheck import selfcheck
from tests.debug.broken import run

SCRIPT = """
import torch
from torch import nn

def make_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def step():
        {step}
        model(torch.ones(2, 8)).sum().backward()

    return model, step
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The system's folder for temporary files, empty."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def two(mode: str, factor: float = 2.0):
    """Traces of two runs of which the second has another weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    checker = ConsistencyChecker(mode=mode, observe="all")
    x = torch.ones(2, 4)
    a = run(checker, model, lambda m: m(x).sum())
    with torch.no_grad():
        model[0].weight.mul_(factor)
    model.zero_grad(set_to_none=True)
    return a, run(checker, model, lambda m: m(x).sum())


def script(tmp_path: Path, step: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(step=step))
    return path


def test_a_comparison_of_light_traces_makes_no_folder(temporary):
    a, b = two("light")
    report = ConsistencyChecker().compare(b, trace=a)
    assert report.verdict == "different"
    assert "no file was written: tensors were not kept" in report.reproduce
    assert list(temporary.iterdir()) == []


def test_files_for_replay_share_one_folder_of_the_user_and_one_comparison_has_one_file(temporary):
    a, b = two("full")
    first, again = (ConsistencyChecker().compare(b, trace=a).dumped for _ in range(2))
    other = ConsistencyChecker().compare(two("full", 3.0)[1], trace=a).dumped
    assert first is not None
    assert other is not None
    assert first == again
    assert first != other
    assert [place.name for place in temporary.iterdir()] == [first.parent.name]
    assert sorted(first.parent.iterdir()) == sorted({first, other})
    assert first.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_that_name_that_somebody_else_could_write_to_is_not_used(temporary):
    a, b = two("full")
    shared = ConsistencyChecker().compare(b, trace=a).dumped.parent
    elsewhere = temporary / "elsewhere"
    shared.rename(elsewhere)
    shared.symlink_to(elsewhere)
    linked = ConsistencyChecker().compare(b, trace=a).dumped
    assert linked.parent != shared
    shared.unlink()
    shared.mkdir()
    os.chmod(shared, 0o777)
    assert ConsistencyChecker().compare(b, trace=a).dumped.parent != shared


def test_a_script_that_repeats_leaves_nothing(tmp_path, temporary):
    found = selfcheck(script(tmp_path, "pass"), steps=1)
    assert found.repeats
    assert found.folder is None
    assert found.to_json()["folder"] is None
    assert list(temporary.iterdir()) == []


def test_a_script_that_fails_leaves_nothing(tmp_path, temporary):
    with pytest.raises(om.UnsupportedError, match="failed at line"):
        selfcheck(script(tmp_path, "raise ValueError"), steps=1)
    with pytest.raises(om.ArgumentError, match="must call the model"):
        selfcheck(script(tmp_path, "return"), steps=1)
    assert list(temporary.iterdir()) == []


def test_of_a_script_that_does_not_repeat_the_two_runs_that_are_named_are_left(tmp_path, temporary):
    found = selfcheck(script(tmp_path, "torch.seed(); model.add_module('2', nn.Dropout(0.5))"), steps=1)
    assert not found.repeats
    assert [place.resolve() for place in temporary.iterdir()] == [found.folder.resolve()]
    assert sorted(place.name for place in found.folder.iterdir()) == ["a", "b"]
    assert str(found.folder / "a" / "step-0") in str(found)


def test_a_folder_that_was_named_keeps_all(tmp_path, temporary):
    found = selfcheck(script(tmp_path, "pass"), steps=1, folder=tmp_path / "traces")
    assert found.folder == tmp_path / "traces"
    assert sorted(place.name for place in found.folder.iterdir()) == ["a", "b"]
