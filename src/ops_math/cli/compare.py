"""`ops-math compare` and `ops-math replay`: two traces from anywhere, and one call that runs alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ops_math import checks

DIFFERS = 1
TraceArgument = Annotated[Path, typer.Argument(help="A folder that Trace.save wrote.")]


def _show(text: str) -> None:
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def compare(
    run_a: TraceArgument,
    run_b: TraceArgument,
    noise: Annotated[Path | None, typer.Option(help="A trace of A with its weights nudged: the noise floor.")] = None,
    precision: Annotated[float, typer.Option(help="Rounding that is let pass, as a relative error in fp32.")] = 1e-6,
    report: Annotated[Path | None, typer.Option(help="Folder for comparison.txt, .json and .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two traces and name the first module that parts; exit code 1 where they differ."""
    from ops_nn.debug import ConsistencyChecker, Trace

    checks.positive("compare", "--precision", precision)
    checker = ConsistencyChecker(precision=precision, folder=report)
    loaded: dict[str, Any] = {"trace": Trace.load(run_a), "noise": None if noise is None else Trace.load(noise)}
    found = checker.compare(Trace.load(run_b), **loaded)
    if as_json:
        typer.echo(json.dumps(found.to_json(), allow_nan=False, indent=2))
    else:
        _show(str(found))
    if report is not None:
        found.save(report)
        if not as_json:
            _show(f"report: {report / 'comparison.html'}")
    if found.verdict == "different":
        sys.exit(DIFFERS)


def replay(file: Annotated[Path, typer.Argument(help="A file that ConsistencyChecker wrote.")]) -> None:
    """Run one call of one module alone, as both runs had it; exit code 1 where they differ."""
    from ops_nn.debug import replay_file

    found = replay_file(file)
    _show(str(found))
    if found.differs:
        sys.exit(DIFFERS)
