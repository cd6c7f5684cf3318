"""The options of `ops-math train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ops_math import checks
from ops_math.cli.train import checkpoint, job, report
from ops_math.cli.train.config import cache_folder, resolve
from ops_math.cli.train.display import Display, model_table, show_result
from ops_math.cli.train.result import Result

DEFAULT_REPORT = Path("ops-math-report")
INTERRUPTED = 130


def train(
    model: Annotated[str | None, typer.Option(help="Model size; `help` lists them.  [default: llama-tiny]", show_default=False)] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A text file, or a folder of them.  [default: the documentation that CPython ships]", show_default=False),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.  [default: 60]", show_default=False)] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare", help="Train plain PyTorch and torch.compile beside it.  [default: no-compare]", show_default=False
        ),
    ] = None,
    report_folder: Annotated[
        Path | None,
        typer.Option("--report", help="Folder for report and checkpoint.  [default: ops-math-report]", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: cuda where there is a GPU]", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, or autocast to bf16 or fp16; parameters stay fp32.  [default: fp32]", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.  [default: the model's]", show_default=False)] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence.  [default: the model's]", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, batches, masks and dropout.  [default: 0]", show_default=False)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.  [default: the model's]", show_default=False)] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="How ops-math's kernels multiply fp32 matrices: default, ieee or tf32.  [default: default]", show_default=False),
    ] = None,
    documents: Annotated[
        bool | None,
        typer.Option(
            "--documents/--no-documents", help="Let a token see its own document alone.  [default: no-documents]", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="A checkpoint, or the report folder of a run that was stopped.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON, and nothing else.")] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for trained tokenizers.  [default: the user's cache]", show_default=False)
    ] = None,
) -> None:
    """Train a language model on real text with ops-math, and see what it changes.

    Ctrl-C stops after the step and writes the report so far and a checkpoint; --resume goes on from there.
    """
    if model == "help":
        Console().print(model_table())
        return
    asked = {"model": model, "steps": steps, "batch": batch, "seq": seq, "seed": seed, "lr": lr, "device": device}
    asked |= {"dtype": dtype, "precision": precision, "compare": compare, "documents": documents}
    resumed = None if resume is None else _unfinished(resume)
    if resumed is not None and data is None and resumed[1].data_path is not None:
        data = Path(resumed[1].data_path)
    config = resolve(asked, *(() if resumed is None else (resumed[1].config, str(resumed[0]))))
    folder = report_folder or (DEFAULT_REPORT if resumed is None else resumed[0].parent)
    with Display() as display:
        outcome = job.run(config, data, folder, cache_folder(cache), resumed, display)
    if as_json:
        typer.echo(json.dumps(report.to_json(outcome), indent=2))
    else:
        show_result(outcome, Console())
    _end(outcome)


def _end(outcome: Result) -> None:
    """Say what could not be written, when all else is on the screen; the exit code of a run that was stopped."""
    if outcome.unwritten:
        raise checks.UnsupportedError("; ".join(outcome.unwritten))
    if outcome.stopped:
        raise typer.Exit(INTERRUPTED)


def _unfinished(given: Path) -> tuple[Path, checkpoint.State]:
    """A checkpoint that can be gone on from, and its state."""
    path = checkpoint.find(given)
    state = checkpoint.read_state(path)
    checkpoint.check_unfinished(path, state)
    return path, state
