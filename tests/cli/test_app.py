"""The application: its help, its version, and which errors reach a user as a sentence."""

import pytest

from ops_math import __version__, checks
from ops_math.cli import app


def test_the_version_is_stated_without_importing_any_command(capsys):
    with pytest.raises(SystemExit) as end:
        app.run(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"ops-math {__version__} (torch ")


def test_an_unknown_command_is_refused_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        app.run(["tarin"])
    assert end.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "No such command 'tarin'. Did you mean 'train'?" in shown


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            checks.ArgumentError("train: --data must be a text file; got an empty one."),
            "ops-math: train: --data must be a text file; got an empty one.",
        ),
        (
            RuntimeError("alloc_cpu.cpp:127: DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error 12"),
            "ops-math: out of memory: an allocation of 4.0 GiB failed. Ask for smaller sizes, or for a smaller model.",
        ),
        (MemoryError(), "ops-math: out of memory: an allocation failed. Ask for smaller sizes, or for a smaller model."),
        (PermissionError(13, "Permission denied", "report"), "ops-math: [Errno 13] Permission denied: 'report'"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence_and_exit_code_2(error, words, monkeypatch, capsys):
    def fails() -> None:
        raise error

    monkeypatch.setattr(app.Commands, "get_command", lambda self, ctx, name: app.command(name, fails))
    with pytest.raises(SystemExit) as end:
        app.run(["doctor"])
    assert end.value.code == 2
    assert capsys.readouterr().err.strip() == words


@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError("a kernel has a fault")])
def test_a_fault_of_ours_keeps_its_traceback(error, monkeypatch):
    def fails() -> None:
        raise error

    monkeypatch.setattr(app.Commands, "get_command", lambda self, ctx, name: app.command(name, fails))
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        app.run(["doctor"])


@pytest.mark.slow
def test_the_help_page_lists_every_command_with_a_sentence(capsys):
    with pytest.raises(SystemExit) as end:
        app.run(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for name in app.COMMANDS:
        assert f" {name} " in shown
