"""`ops-math selfcheck`: does a training step repeat, and if not, why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

DIFFERS = 1


def selfcheck(
    script: Annotated[str, typer.Argument(help="A Python file with make_step(), or FILE.py:function; it returns (model, step).")],
    steps: Annotated[int, typer.Option(help="Steps to run in each process.")] = 2,
    seconds: Annotated[float, typer.Option(help="How long one process may take [s].")] = 600.0,
    folder: Annotated[Path | None, typer.Option(help="Where the traces go.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a step twice in fresh processes, and say what does not repeat and why; exit code 1 where it does not."""
    from ops_nn.debug.selfcheck import FUNCTION
    from ops_nn.debug.selfcheck import selfcheck as check

    file, _, function = script.partition(":")
    found = check(file, function or FUNCTION, steps=steps, folder=folder, seconds=seconds)
    text = json.dumps(found.to_json(), allow_nan=False, indent=2) if as_json else str(found)
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
    if not found.repeats:
        sys.exit(DIFFERS)
