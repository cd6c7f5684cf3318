"""Whole steps: interleaved, ratios alone on a CPU, a variant that fails is named, and the script beside the results runs the same."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ops_math.cli.app import application
from ops_math.cli.bench import command, steps

ROOT = Path(__file__).resolve().parents[2]
SMALL = steps.Setup(1, 16, torch.float32, False)


@pytest.fixture
def quick(monkeypatch):
    """Two steps of one short sequence."""
    monkeypatch.setattr(steps, "MEASURED", 2)
    monkeypatch.setattr(steps, "FEW", 0)
    monkeypatch.setitem(steps.SETUPS, "llama-tiny", SMALL)


def test_a_step_on_a_cpu_gives_ratios_and_no_times(quick):
    found = steps.measure("llama-tiny", ["plain", "ops"], "cpu")
    plain, ours = found.rows
    assert (plain["variant"], ours["variant"]) == ("plain", "ops")
    assert plain["ratio_to_plain"] == 1.0
    assert not {"step_ms", "tokens_per_s", "peak_gib", "kernels"} & (set(plain) | set(ours))
    assert ours["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-4)
    assert [set(session) for session in found.sessions] == [{"plain", "ops"}]
    assert len(found.sessions[0]["ops"]) == 2


def test_a_compiler_that_fails_is_named_and_the_others_are_measured(quick, monkeypatch):
    def broken(model):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    found = steps.measure("llama-tiny", ["plain", "compile", "ops", "packed"], "cpu")
    assert found.failed == {"compile": "failed: RuntimeError: no C++ compiler"}
    assert [row["variant"] for row in found.rows] == ["plain", "ops", "packed"]


def test_ours_that_fails_stops_the_command(quick, monkeypatch):
    original = steps.Runner.step

    def step(self):
        if self.variant == "ops":
            raise RuntimeError("no such kernel")
        return original(self)

    monkeypatch.setattr(steps.Runner, "step", step)
    with pytest.raises(RuntimeError, match="no such kernel"):
        steps.measure("llama-tiny", ["plain", "ops"], "cpu")


def test_every_session_builds_its_models_anew(quick, monkeypatch):
    built = []
    original = steps.Runner.__init__

    def count(self, name, variant, *args, **kwargs):
        built.append(variant)
        original(self, name, variant, *args, **kwargs)

    monkeypatch.setattr(steps.Runner, "__init__", count)
    found = steps.measure("llama-tiny", ["plain", "ops"], "cpu", sessions=3)
    assert built == ["plain", "ops"] * 4, "once alone, then for each session"
    assert len(found.sessions) == 3
    assert found.rows[1]["visits"] == 6


def made_up(slow):
    """Sessions of steps in which ours takes `slow` times plain's."""
    noise = [1.0, 1.02, 0.99, 1.01, 1.0, 0.98, 1.01, 1.0]
    ours = [100.0 * slow * n for n in noise[::-1]]
    sessions = [{"plain": [100.0 * n for n in noise], "ops": ours, "packed": ours} for _ in range(5)]
    row = {"benchmark": "step", "model": "llama-tiny", "batch": 4, "seq": 256, "ratio_to_plain": slow, "noise": 0.01}
    rows = [row | {"variant": "plain", "ratio_to_plain": 1.0}, row | {"variant": "ops"}]
    return lambda *args, **kwargs: steps.Stepped(rows, sessions, {})


def test_a_step_can_be_saved_and_held_and_a_slower_one_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path))
    options = ["bench", "step", "--device", "cpu", "--vs", "torch,liger,fa4"]
    for slow, option, code in ((0.8, "--save", 0), (0.8, "--check", 0), (1.1, "--check", 1)):
        monkeypatch.setattr(command.steps, "measure", made_up(slow))
        result = CliRunner().invoke(application, [*options, option, "main"])
        assert result.exit_code == code, result.output
        assert "not measured in step: liger: liger-kernel is not installed" in result.output
        assert "not measured in step: fa4: no whole step of it is measured here" in result.output
    assert "SLOWER: llama-tiny step ops: time over that of torch" in result.output
    assert "llama-tiny 4 x 256: torch takes 0.91 of our time" in result.output


@pytest.mark.slow
def test_the_script_beside_the_results_takes_the_options_that_they_were_made_with(tmp_path):
    code = (
        "import sys, torch; sys.argv[0] = 'benchmarks/steps.py'\n"
        "from ops_math.cli.bench import steps\n"
        "steps.MEASURED, steps.FEW = 2, 0\n"
        "steps.SETUPS['llama-tiny'] = steps.Setup(1, 16, torch.float32, False)\n"
        "from benchmarks.steps import main; main()"
    )
    options = ["--model", "llama-tiny", "--variants", "plain,ops", "--no-gradients", "--table", "--results", str(tmp_path / "r.jsonl")]
    done = subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, cwd=ROOT, timeout=240, check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "llama-tiny ops: " in done.stdout
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_the_scripts_need_torch_alone():
    """A machine that is lent for measuring may have nothing else."""
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'jinja2', 'tokenizers', 'platformdirs', 'msgspec', 'filelock'):\n"
        "    sys.modules[name] = None\n"
        "import benchmarks.steps, benchmarks.operators, benchmarks.rows, benchmarks.cpu_choices, benchmarks.random_shapes\n"
        "import benchmarks.curves\n"
        "assert benchmarks.steps.SETUPS and benchmarks.steps.Runner"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
