"""`ops-math train` as a person runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ops_math.cli import app
from ops_math.cli.train import checkpoint, memory, report
from ops_math.cli.train.config import OPS_MATH, PLAIN, TrainConfig
from ops_math.cli.train.memory import Measurement
from tests.cli import train_fixtures as fixtures

SRC = Path(__file__).resolve().parents[2] / "src"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    fixtures.add_presets(monkeypatch)
    # A process of its own for each run is the subject of another test.
    monkeypatch.setattr(memory, "measure_apart", lambda name, used, batch: Measurement(2**20, "as told", 10, 2**19))


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    text = fixtures.write_text(tmp_path / "text.txt")

    def call(*arguments: object, data: Path | None = text) -> tuple[int, str, str]:
        given = ["--data", str(data)] if data is not None else []
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app.run(["train", *map(str, arguments), *given, "--cache", str(tmp_path / "cache")])
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, " ".join(err.split())

    return call


def test_a_comparison_ends_with_table_verdict_report_and_checkpoint(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainConfig, "variants", property(lambda self: (PLAIN, OPS_MATH)))
    code, out, err = cli("--model", "small", "--steps", 10, "--compare", "--report", tmp_path / "report")
    assert code == 0
    for expected in (
        "plain PyTorch",
        "ops-math",
        "tokens/s",
        "noise floor, 10 steps",
        "validation loss",
        "1 MiB",
        "in a process of its own",
    ):
        assert expected in out
    assert "training 10/10 loss" in err
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [checkpoint.FILE_NAME, report.HTML_NAME, report.JSON_NAME]
    plain = json.loads((tmp_path / "report" / report.JSON_NAME).read_text())
    assert [v["name"] for v in plain["variants"]] == [PLAIN, OPS_MATH]
    assert [len(v["losses"]) for v in plain["variants"]] == [10, 10]
    assert {row["op"] for row in plain["operators"]} >= {"rms_norm"}
    assert plain["verdict"] in " ".join(out.split())


def test_what_was_trained_is_shown_when_the_disk_is_full(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    assert cli("--model", "small", "--steps", 4, "--report", tmp_path / "first")[0] == 0  # the tokenizer is made
    monkeypatch.setattr(os, "fsync", full)
    code, out, err = cli("--model", "small", "--steps", 4, "--report", tmp_path / "report")
    assert "tokens/s" in out
    assert "Checkpoint" not in out
    assert code == 2
    for what in ("the checkpoint", "the report in"):
        assert re.search(rf"train: {what} \S+: it cannot be written \(.*No space left on device\)", err)
    assert "Traceback" not in err
    assert list((tmp_path / "report").iterdir()) == []
    code, out, _ = cli("--model", "small", "--steps", 4, "--report", tmp_path / "report", "--json")
    assert code == 2
    assert len(json.loads(out)["unwritten"]) == 2


def test_json_alone_stands_on_stdout(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("--model", "small-bert", "--steps", 4, "--report", tmp_path / "report", "--json")
    assert code == 0
    plain = json.loads(out)
    assert plain["steps_done"] == 4
    assert plain["variants"][0]["name"] == OPS_MATH
    assert plain["variants"][0]["validation_loss"] > 0
    assert plain == json.loads((tmp_path / "report" / report.JSON_NAME).read_text())


def test_models_are_listed_on_request(cli: Cli) -> None:
    code, out, _ = cli("--model", "help", data=None)
    assert code == 0
    for expected in ("llama-tiny", "llama-150m", "llama-1b", "bert-base", "bert-large", "10.5 M parameters"):
        assert expected in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "gpt"), "ops-math: train: --model must be one of 'llama-tiny'"),
        (("--steps", 0), "ops-math: train: --steps must be at least 1; got 0. Give a positive number."),
        (("--batch", -1), "ops-math: train: --batch must be at least 1; got -1."),
        (("--lr", "nan"), "ops-math: train: --lr must be a positive number; got nan."),
        (("--seed", -1), "ops-math: train: --seed must be between 0 and 2^63 - 1; got -1."),
        (("--dtype", "fp8"), "ops-math: train: --dtype must be one of 'fp32', 'bf16', 'fp16'; got 'fp8'. Pick one of these."),
        (("--precision", "low"), "ops-math: train: --precision must be one of 'default', 'ieee', 'tf32'; got 'low'."),
        (("--device", "tpu"), "ops-math: train: --device must be cpu, cuda or cuda:N; got 'tpu'. Name one of these."),
        (("--device", "cpu:1"), "ops-math: train: --device must be cpu, cuda or cuda:N; got 'cpu:1'."),
        (("--model", "small-bert", "--seq", 33), "ops-math: train: --seq must be at most 32, the positions that small-bert has; got 33."),
        (("--batch", 100_000), "--data must be at least 1,600,001 tokens, one batch of 100,000 x 16"),
    ],
)
def test_an_impossible_option_is_one_sentence_and_exit_code_2(
    cli: Cli, tmp_path: Path, arguments: tuple[object, ...], sentence: str
) -> None:
    given = arguments if "--model" in arguments else ("--model", "small", *arguments)
    code, out, err = cli(*given, "--report", tmp_path / "report")
    assert code == 2
    assert out == ""
    assert sentence in err
    assert not (tmp_path / "report" / report.HTML_NAME).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_words(cli: Cli) -> None:
    code, _, err = cli("--model", "small", "--device", "cuda")
    assert code == 2
    assert "train: --device cuda: torch sees no GPU here. Use --device cpu, or run `ops-math doctor` to see why" in err


def test_text_that_is_missing_is_found_before_training(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("--model", "small", "--report", tmp_path / "report", data=tmp_path / "nowhere.txt")
    assert code == 2
    assert "--data must be a text file or a folder of text files" in err


def test_a_report_folder_that_cannot_be_written_is_refused_before_training(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "readonly"
    folder.mkdir()
    folder.chmod(0o555)
    before = os.geteuid()
    # root may write anywhere: for the length of the call this process is nobody.
    if before == 0:
        tmp_path.chmod(0o777)
        for parent in tmp_path.parents:  # as many as pytest made: one more where tests run in parallel
            if not parent.name.startswith(("pytest-", "popen-")):
                break
            parent.chmod(0o755)
        os.seteuid(65534)
    try:
        code, _, err = cli("--model", "small", "--report", folder)
    finally:
        os.seteuid(before)
        folder.chmod(0o755)
    assert code == 2
    assert f"train: the report folder {folder}: it cannot be written (Permission denied). Choose another with --report" in err
    assert list(folder.iterdir()) == []


def stopped_run(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int, *arguments: object) -> tuple[int, str, str]:
    """A run that gets Ctrl-C after a step."""
    from ops_math.cli.train.engine import Run

    real = Run.timed_step

    def interrupted(run: Run, batch: object, step: int) -> None:
        real(run, batch, step)
        if step == after - 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "timed_step", interrupted)
        return cli("--model", "small", "--steps", 8, "--report", folder, *arguments)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys() if not key.startswith("rng/")}


def test_ctrl_c_stops_after_the_step_and_resume_ends_with_the_same_bits(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "stopped"
    assert cli("--model", "small", "--steps", 8, "--report", whole)[0] == 0
    code, out, err = stopped_run(cli, folder, monkeypatch, 3)
    assert code == 130
    assert "Stopping after this step; once more stops at once and saves nothing." in err
    assert "Stopped after step 3 of 8" in " ".join(out.split())
    assert json.loads((folder / report.JSON_NAME).read_text())["steps_done"] == 3
    assert (folder / report.HTML_NAME).exists()
    code, out, _ = cli("--resume", folder, "--json", data=None)
    assert code == 0
    assert json.loads(out)["steps_done"] == 8
    expected, found = tensors(whole / checkpoint.FILE_NAME), tensors(folder / checkpoint.FILE_NAME)
    assert "ops_math/weights/model.norm.weight" in expected
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_a_stopped_run_is_not_overwritten_by_a_new_one(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(cli, tmp_path / "stopped", monkeypatch, 3)
    before = (tmp_path / "stopped" / checkpoint.FILE_NAME).read_bytes()
    code, _, err = cli("--model", "small", "--report", tmp_path / "stopped")
    assert code == 2
    assert "it holds a run that stopped after step 3 of 8. Go on with it by --resume" in err
    assert (tmp_path / "stopped" / checkpoint.FILE_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "small-bert"), "train: --model must be 'small', as in the checkpoint"),
        (("--steps", 9), "train: --steps must be 8, as in the checkpoint"),
        (("--compare",), "train: --compare must be False, as in the checkpoint"),
        (("--documents",), "train: --documents must be False, as in the checkpoint"),
    ],
)
def test_resuming_as_something_else_is_refused_in_words(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], sentence: str
) -> None:
    stopped_run(cli, tmp_path / "stopped", monkeypatch, 3)
    before = (tmp_path / "stopped" / checkpoint.FILE_NAME).read_bytes()
    code, _, err = cli("--resume", tmp_path / "stopped", *arguments, data=None)
    assert code == 2
    assert sentence in err
    assert "Leave the option out to go on with that run, or start a new one without --resume." in err
    assert (tmp_path / "stopped" / checkpoint.FILE_NAME).read_bytes() == before


def test_a_finished_run_has_nothing_to_resume_and_may_be_replaced(cli: Cli, tmp_path: Path) -> None:
    assert cli("--model", "small", "--steps", 2, "--report", tmp_path / "report")[0] == 0
    code, _, err = cli("--resume", tmp_path / "report", data=None)
    assert code == 2
    assert "which has made all of its 2 steps. Start a new run" in err
    assert cli("--model", "small", "--steps", 3, "--report", tmp_path / "report")[0] == 0


def test_resuming_from_nothing_and_from_a_foreign_file_is_refused_in_words(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("--resume", tmp_path, data=None)
    assert code == 2
    assert "train: --resume must be a checkpoint, or a report folder with checkpoint.safetensors in it" in err
    foreign = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(2)}, foreign)
    code, _, err = cli("--resume", foreign, data=None)
    assert code == 2
    assert "a safetensors file of another program" in err


def test_a_foreign_checkpoint_in_the_report_folder_is_found_before_training(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    path = tmp_path / "report" / checkpoint.FILE_NAME
    path.write_bytes(b"something else")
    code, _, err = cli("--model", "small", "--report", tmp_path / "report")
    assert code == 2
    assert "not a complete checkpoint" in err
    assert "it is in the way of this run's checkpoint and is left as it is" in err
    assert path.read_bytes() == b"something else"


@pytest.mark.slow
def test_a_real_ctrl_c_stops_a_real_process_after_its_step(tmp_path: Path) -> None:
    text = fixtures.write_text(tmp_path / "text.txt", 20_000)
    arguments = [
        "--batch",
        "1",
        "--seq",
        "16",
        "--steps",
        "5000",
        "--data",
        str(text),
        "--report",
        str(tmp_path / "report"),
        "--cache",
        str(tmp_path),
    ]
    command = [sys.executable, "-c", "from ops_math.cli import main; main()", "train", *arguments, "--json"]
    process = subprocess.Popen(command, cwd=SRC, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "tokens to learn from" in process.stderr.readline()
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    plain = json.loads(out)
    assert 0 < plain["steps_done"] < 5000
    assert plain["stopped"].startswith(f"Stopped after step {plain['steps_done']} of 5000: --resume")
    state = checkpoint.read_state(tmp_path / "report" / checkpoint.FILE_NAME)
    assert state.step == plain["steps_done"] == len(state.runs[OPS_MATH]["losses"])
