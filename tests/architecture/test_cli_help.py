"""Every command explains itself: a sentence for the command, one for each argument and option, and no two options of one name."""

from __future__ import annotations

import importlib

import pytest

from ops_math.cli import app


def made(name):
    module, _, function = app.COMMANDS[name].partition(":")
    return app.command(name, getattr(importlib.import_module(module), function))


def faults_of(command) -> list[str]:
    """What is missing in a command's help."""
    found = [] if (command.help or "").strip().endswith(".") else [f"{command.name}: no sentence says what it does"]
    names = [option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)]
    found += [f"{command.name}: {name} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        if not text or not text.strip():
            found.append(f"{command.name}: {parameter.opts[0]} has no help")
    return found


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_and_option_has_help(name):
    assert faults_of(made(name)) == []


@pytest.mark.parametrize("name", app.COMMANDS)
def test_no_word_of_the_help_is_lost_on_its_page(name, monkeypatch, capsys):
    """Rich takes `[s]` for strikethrough and `[default: 60]` for a style."""
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        app.run([name, "--help"])
    page = capsys.readouterr().out
    for parameter in made(name).params:
        for word in (parameter.help or "").replace("\\[", "[").split():
            assert word in page, (name, parameter.name, word)


def test_every_option_of_train_says_what_it_is_without_it():
    told = {p.name for p in made("train").params if "[default: " in p.help}
    assert told == {p.name for p in made("train").params} - {"resume", "as_json"}


def test_a_command_without_help_is_noticed():
    def silent(number: int) -> None:
        pass

    assert faults_of(app.command("silent", silent)) == ["silent: no sentence says what it does", "silent: number has no help"]
