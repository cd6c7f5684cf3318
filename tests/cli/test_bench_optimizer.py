"""The AdamW step is checked against PyTorch's in float64, timed in turns with it, and held to a baseline like every operator."""

import json

import pytest
import torch
from typer.testing import CliRunner

from ops_math import checks
from ops_math.cli.app import application
from ops_math.cli.bench import command, driver, optimizer
from tests.cli.bench_fixtures import MadeUpClock


def measure(dtype="fp32", shape="3x100"):
    plan = driver.Plan("adamw", shape, {}, dtype, torch.device("cpu"), ("torch", "liger"))
    return optimizer.measure(plan, MadeUpClock(0), 0.0, 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ours_has_right_numbers_and_says_what_ran(dtype):
    outcome = measure(dtype)
    assert (outcome.failed, outcome.wrong, outcome.missing) == ({}, {}, {"liger": "has no adamw"})
    rows = {row["variant"]: row for row in driver.rows_of(outcome)}
    assert set(rows) == {"ops_math", "torch", "torch foreach"}
    assert rows["ops_math"]["implementation"] in ("vendor", "eager")
    assert rows["ops_math"]["sessions"] == 2


def test_a_learning_rate_that_is_off_by_one_percent_is_seen(monkeypatch):
    wrong = {**optimizer.MAKERS, "ops_math": lambda p: torch.optim.AdamW(p, lr=1.01 * optimizer.LR, fused=True)}
    monkeypatch.setattr(optimizer, "MAKERS", wrong)
    assert list(measure().wrong) == ["ops_math"]


def test_the_least_traffic_is_seven_passes():
    plan = driver.Plan("adamw", "3x100", {}, "fp32", torch.device("cpu"), ("torch",))
    assert optimizer.work_of(plan).bytes == 3 * 100 * 4 * 7


def test_it_is_one_of_all_and_takes_its_own_sizes(monkeypatch, tmp_path):
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path))
    monkeypatch.setattr(command, "clock_for", lambda device: MadeUpClock(0))
    result = CliRunner().invoke(application, ["bench", "adamw", "--device", "cpu", "--shape", "2x64", "--json", "--save", "main"])
    assert result.exit_code == 0, result.output
    assert {row["phase"] for row in json.loads(result.stdout)["rows"]} == {"step"}
    for options in (["--shape", "64"], ["--random", "2"], ["--with", "lr=1"]):
        refused = CliRunner().invoke(application, ["bench", "adamw", "--device", "cpu", *options])
        assert isinstance(refused.exception, checks.ArgumentError), options
    asked = command.check_options("all", None, [], None, "cpu", 0.1, None, False, 0, [], 0, None, None)
    assert "adamw" in {plan.function for plan in command.plans(asked)}
