"""The terminal: progress on stderr, the table on stdout."""

from __future__ import annotations

import statistics
from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ops_math.cli.train import table
from ops_math.cli.train.config import LABELS, TrainConfig
from ops_math.cli.train.engine import Run
from ops_math.cli.train.result import Result
from ops_nn.models import PRESETS

LINES_WITHOUT_TERMINAL = 12


class Display:
    """Progress of a run. Without a terminal on stderr it writes about a dozen lines instead of a bar."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
        left = (TimeRemainingColumn(), TextColumn("left", style="dim"))
        self.progress = Progress(*columns, *left, console=self.console, disable=not self.console.is_terminal)
        self.totals: dict[TaskID, int] = {}

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int, done: int = 0) -> TaskID:
        """A bar of `total` steps."""
        task = self.progress.add_task(what, total=total, completed=done, figures="")
        self.totals[task] = total
        return task

    def advance(self, task: TaskID, done: int, figures: str = "") -> None:
        """The bar stands at `done`."""
        self.progress.update(task, completed=done, figures=figures)
        total = self.totals[task]
        if not self.console.is_terminal and (done == total or done % max(1, total // LINES_WITHOUT_TERMINAL) == 0):
            name = next(t.description for t in self.progress.tasks if t.id == task)
            self.say(f"{name} {done}/{total} {figures}".rstrip())


def figures(runs: dict[str, Run], config: TrainConfig) -> str:
    """Loss and speed of the last steps, for the bar; of ops-math's run where there are several."""
    run = list(runs.values())[-1]
    speed = config.tokens_per_step / statistics.median(run.step_times[-8:])
    return f"loss {run.losses[-1]:.3f}  {speed:,.0f} tokens/s"


def result_table(result: Result) -> Table:
    """The table at the end."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(result.config.model, style="dim", no_wrap=True)
    for v in result.variants:
        shown.add_column(LABELS[v.name], justify="right", no_wrap=True)
    for label, cells in table.rows(result):
        shown.add_row(label, *cells)
    return shown


def show_result(result: Result, console: Console) -> None:
    """Table, notes and verdict."""
    console.print()
    console.print(result_table(result))
    for note in table.notes(result):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()
    console.print(result.verdict, style="bold", markup=False, highlight=False)
    for name, path in (("Report", result.report), ("Checkpoint", result.checkpoint)):
        if path is not None:
            console.print(f"{name}: {path}", style="dim", markup=False, highlight=False, soft_wrap=True)


def model_table() -> Table:
    """What `--model help` shows."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "description", "batch x sequence"):
        shown.add_column(heading)
    for preset in PRESETS.values():
        shown.add_row(preset.name, preset.description, f"{preset.batch} x {preset.seq}")
    return shown
