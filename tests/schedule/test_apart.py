"""A candidate that hangs for ever or ends its process is named by the parent, and everything else is measured."""

import time

import pytest
import torch

import ops_math as om
from ops_math import backends, schedule
from ops_math.schedule import apart
from ops_math.schedule.apart import Apart
from ops_math.schedule.live import record_for
from ops_math.schedule.measure import Limits
from ops_math.settings import Policy

pytestmark = pytest.mark.slow  # each starts processes that import PyTorch
PLANTED = ("tests.schedule.planted",)


def test_a_child_finds_what_this_process_would_and_under_its_settings():
    x = torch.randn(64, 96).t()
    with om.precision("ieee"):
        found = om.calibrate(lambda: om.softmax(x), seconds=2, save=False, apart=True)
    (m,) = found.measurements
    assert (m.op, m.phase, m.policy) == ("softmax", "fwd", "precision=ieee determinism=0")
    assert set(m.times_us) == {"vendor", "eager"}
    with om.precision("ieee"):
        om.reset_stats()
        om.softmax(x)
        assert om.stats().rows[0].reason == "fastest measured on this device"


def test_a_child_multiplies_as_pytorchs_newer_settings_say_here():
    x, w = torch.randn(64, 32), torch.randn(48, 32)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = om.calibrate(lambda: om.linear(x, w), seconds=2, save=False, apart=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    (m,) = found.measurements
    assert "products='tf32'" in m.problem


@pytest.mark.parametrize(
    ("how", "words"),
    [("ends", "ended its process (exit code 139)"), ("hangs", "did not finish within 1.0 s"), ("stops", "did not answer for 4 s")],
)
def test_a_candidate_that_takes_its_process_with_it_is_named_and_the_rest_is_measured(how, words, monkeypatch):
    monkeypatch.setenv("PLANTED", how)
    monkeypatch.setattr(apart, "PATIENCE_SECONDS", 1.0)
    x = torch.randn(64, 96)
    problem_args = [x, torch.float32]
    record, told = record_for(backends.device_of(torch.device("cpu"))), []
    start = time.monotonic()
    with Apart(PLANTED) as child:
        found = child.measure("softmax", "fwd", problem_args, x.device, Limits(0.2, 1.0), Policy("default", 0, ()), record, told.append)
    assert found.winner == "eager"
    assert found.refused == {"vendor": words}
    assert "vendor" in told
    assert time.monotonic() - start < 100


def test_a_child_that_falls_silent_is_ended(monkeypatch):
    child = Apart()
    with child:
        child._start()
        assert child._child is not None
        process = child._child
        assert child._line(0.1) is None
    assert process.poll() is not None


def test_a_child_that_cannot_start_is_said_in_words(monkeypatch):
    monkeypatch.setenv("PLANTED", "broken")
    found = om.calibrate(lambda: om.softmax(torch.randn(8, 8)), seconds=1, save=False, apart=True, modules=PLANTED)
    assert found.measurements == ()
    assert found.skipped[0][1].startswith("no process to measure in could be started (exit code")
    monkeypatch.setattr(apart, "START_SECONDS", 0.01)
    with Apart() as child, pytest.raises(schedule.NotMeasuredError, match=r"could be started \(exit code None\)"):
        child._start()


def test_the_incumbent_is_known_to_the_child():
    x = torch.randn(64, 96)
    found = om.calibrate(lambda: om.softmax(x), seconds=1, save=False, apart=True).measurements[0]
    slower = max(found.times_us, key=lambda name: found.times_us[name])
    record = record_for(backends.device_of(torch.device("cpu")))
    level = found._replace(winner=slower, noise={}, times_us=dict.fromkeys(found.times_us, 5.0))
    known = record._replace(exact=dict.fromkeys(record.exact, level))
    with Apart(("tests.schedule.level",)) as child:
        again = child.measure(
            "softmax", "fwd", [x, torch.float32], x.device, Limits(0.2, 5.0), Policy("default", 0, ()), known, lambda w: None
        )
    assert again.winner == slower
