"""What a long command says in a pipe, which device it takes, and which files it refuses before it works for them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ops_math import ArgumentError, UnsupportedError
from ops_math.cli import progress
from ops_math.cli.app import application
from ops_math.cli.bench import command, steps
from ops_math.cli.device import chosen
from ops_math.cli.paths import writable


class Pipe(io.StringIO):
    """A stream that knows what was flushed."""

    flushed = ""

    def flush(self) -> None:
        """Take what was written."""
        self.flushed = self.getvalue()


def test_a_pipe_gets_each_new_line_at_once_and_none_twice():
    pipe = Pipe()
    with progress.telling(Console(file=pipe)) as tell:
        tell("a [s] long one")
        assert pipe.flushed == "a [s] long one\n"
        tell("a [s] long one")
        tell("b")
    assert pipe.flushed == "a [s] long one\nb\n"


def test_lines_that_come_too_fast_are_left_out():
    pipe = Pipe()
    line = progress.lines(Console(file=pipe), every_s=1e3)
    for words in "abc":
        line(words)
    assert pipe.flushed == "a\n"


def test_a_terminal_gets_a_status_and_no_lines():
    pipe = Pipe()
    console = Console(file=pipe, force_terminal=True)
    progress.lines(console)("a")
    assert pipe.getvalue() == ""


def test_a_step_in_a_pipe_says_every_variant_on_stderr(monkeypatch):
    def measure(name, variants, device, *, tell, **rest):
        for variant in variants:
            tell(f"{name}: {variant}, alone")
        return steps.Stepped([], [], {})

    monkeypatch.setattr(command.steps, "measure", measure)
    result = CliRunner().invoke(application, ["bench", "step", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert said[:3] == ["llama-tiny: plain, alone", "llama-tiny: ops, alone", "llama-tiny: packed, alone"]
    assert "alone" not in result.stdout


def test_the_device_is_one_of_this_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert chosen("bench", None) == torch.device("cuda")
    assert chosen("bench", "cuda:1") == torch.device("cuda:1")
    for name in ("gpu", "tpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "", "0"):
        with pytest.raises(ArgumentError, match=r"^bench: --device must be cpu, cuda or cuda:N; got "):
            chosen("bench", name)
    with pytest.raises(ArgumentError, match=r"^bench: --device must be one of the 2 GPUs, cuda:0 to cuda:1; got 'cuda:2'\."):
        chosen("bench", "cuda:2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert chosen("bench", None) == torch.device("cpu")
    with pytest.raises(UnsupportedError, match=r"^bench: --device cuda: torch sees no GPU here\. Use --device cpu"):
        chosen("bench", "cuda")


@pytest.mark.parametrize("arguments", [["bench", "softmax"], ["calibrate"], ["verify", "softmax"], ["train"]], ids=lambda a: a[0])
def test_every_command_that_takes_a_device_refuses_one_that_is_none(arguments):
    result = CliRunner().invoke(application, [*arguments, "--device", "tpu"])
    assert str(result.exception) == f"{arguments[0]}: --device must be cpu, cuda or cuda:N; got 'tpu'. Name one of these."


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    writable("bench", "--results", None)
    writable("bench", "--results", tmp_path / "new.jsonl")
    with pytest.raises(ArgumentError, match=r"^bench: --results must be a file; got .*, which is a folder\. Name a file in it\."):
        writable("bench", "--results", tmp_path)
    with pytest.raises(ArgumentError, match=r"^bench: --results must be a file in a folder that exists; got .*\. Make .*no first\."):
        writable("bench", "--results", tmp_path / "no" / "r.jsonl")
    for arguments in (["calibrate", "--export"], ["bench", "softmax", "--device", "cpu", "--results"], ["bench", "softmax", "--picture"]):
        result = CliRunner().invoke(application, [*arguments, str(tmp_path)])
        assert isinstance(result.exception, ArgumentError), (arguments, result.exception)


def test_a_baseline_that_cannot_be_kept_is_refused_before_it_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(command, "measure_operators", None)
    result = CliRunner().invoke(application, ["bench", "softmax", "--device", "cpu", "--save", "x"])
    assert str(result.exception).startswith("bench: --save: the folder ")
    assert str(result.exception).endswith("Name a path elsewhere.")


def test_a_file_in_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ops_math.cli.paths.os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ArgumentError, match=r"^bench: --picture must be a file that may be written; got .*a\.svg\. Name another\."):
        writable("bench", "--picture", tmp_path / "a.svg")
