"""`ops-math calibrate` refuses in words what no machine or model takes, before anything runs, and shows what it found before it writes."""

from __future__ import annotations

import json
import os

import pytest

from ops_math.cli import app, calibrate
from ops_math.cli.train import capacity
from ops_math.schedule.calibrate import Calibration


def run(capsys, *options):
    with pytest.raises(SystemExit) as end:
        app.run(["calibrate", "--device", "cpu", *options])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seq", "100000000"], "calibrate: out of memory for llama-tiny with batches of 4 x 100,000,000: it needs about "),
        (["--seq", "1000000000000"], "calibrate: a step of 4,000,000,000,000 tokens: no memory holds it. Give a smaller --batch or --seq"),
        (
            ["--model", "bert-tiny", "--seq", "4000"],
            "calibrate: --seq must be at most 512, the positions that bert-tiny has; got 4000. Shorten it.",
        ),
    ],
)
def test_sizes_that_cannot_run_are_refused_in_words(options, words, capsys, monkeypatch):
    monkeypatch.setattr(capacity, "available", lambda device: 32 << 30)
    monkeypatch.setattr(calibrate, "step_of", lambda *given: pytest.fail("a step was made"))
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert err.startswith(f"ops-math: {words}")
    assert "--no-compare" not in err  # which is no option of this command


def test_without_an_optimizer_less_memory_is_needed(capsys, monkeypatch):
    def reached(*given):
        raise calibrate.checks.UnsupportedError("a step was made")

    monkeypatch.setattr(calibrate, "step_of", reached)
    config = calibrate.resolve({"model": "llama-tiny"})
    assert capacity.need(config, optimizer=False).fixed * 2 == capacity.need(config).fixed
    monkeypatch.setattr(capacity, "available", lambda device: capacity.need(config, optimizer=False).total(config.batch))
    assert run(capsys)[2] == "ops-math: a step was made\n"


def test_what_was_measured_is_shown_when_the_disk_is_full(capsys, monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate.schedule, "calibrate", lambda step, **given: Calibration((), 7, (), 1.0, 0))
    (tmp_path / "export.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    for options in ([], ["--json"]):
        code, out, err = run(capsys, "--export", str(tmp_path / "export.json"), *options)
        assert code == 2
        assert (json.loads(out)["known"] == 7) if options else "0 problems measured, 7 known before" in out
        assert "No space left on device" in err
    assert (tmp_path / "export.json").read_text() == "old"
