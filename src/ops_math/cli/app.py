"""The `ops-math` application: its commands, and errors in words instead of tracebacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape

from ops_math import __version__, checks
from ops_math.checks import ArgumentError, UnsupportedError

# Each command is imported when it is asked for, so that `ops-math --version` does not wait for matplotlib and tokenizers.
COMMANDS = {
    "train": "ops_math.cli.train.command:train",
    "doctor": "ops_math.cli.doctor:doctor",
    "ops": "ops_math.cli.ops:ops",
    "calibrate": "ops_math.cli.calibrate:calibrate",
    "explain": "ops_math.cli.explain:explain",
    "bench": "ops_math.cli.bench.command:bench",
    "compare": "ops_math.cli.compare:compare",
    "verify": "ops_math.cli.verify:verify",
    "replay": "ops_math.cli.compare:replay",
    "selfcheck": "ops_math.cli.selfcheck:selfcheck",
}
# What a user can mend. Anything else is a fault of ours and keeps its traceback.
USER_ERRORS = (ArgumentError, UnsupportedError, OSError, torch.OutOfMemoryError)


class Commands(typer.core.TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the help page."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one command."""
        if cmd_name not in COMMANDS:
            near = checks.nearest(cmd_name, COMMANDS)
            ctx.fail(f"No such command {cmd_name!r}. {near or 'There are ' + ', '.join(COMMANDS) + '.'}")
        module, _, function = COMMANDS[cmd_name].partition(":")
        return command(cmd_name, getattr(importlib.import_module(module), function))


def command(name: str, function: Callable[..., Any]) -> Any:
    """Make a command of an annotated function. Its help is text: `[s]` and `[default: 60]` are no markup."""
    alone = typer.Typer(add_completion=False)
    alone.command(name)(function)
    made = typer.main.get_command(alone)
    for parameter in made.params:
        words = getattr(parameter, "help", None)
        if words:
            parameter.help = escape(words)  # type: ignore[attr-defined]  # arguments and options have it, their base has not
    return made


application = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def show_version(asked: bool) -> None:
    """Print the version and stop."""
    if asked:
        typer.echo(f"ops-math {__version__} (torch {torch.__version__})")
        raise typer.Exit


VersionOption = Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")]


@application.callback()
def options(version: VersionOption = False) -> None:
    """A training step, fused, compared and trusted."""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line; a known error is one sentence and exit code 2."""
    try:
        application(args=arguments)
    except USER_ERRORS as error:
        _stop(str(error))
    except (RuntimeError, MemoryError) as error:  # a CPU's allocator has no exception of its own
        from ops_math.cli.train import capacity

        if not capacity.out_of_memory(error):
            raise
        _stop(f"out of memory: {capacity.asked_for(error)}. Ask for smaller sizes, or for a smaller model.")


def _stop(words: str) -> NoReturn:
    Console(stderr=True).print(f"ops-math: {words}", style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(2)
