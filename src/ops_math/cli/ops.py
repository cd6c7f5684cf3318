"""`ops-math ops`: which implementation of which operator runs on which device in which dtype, asked of the operators themselves.

The problems put to each implementation are those of the operator's test cases, forward and backward; nothing is listed by hand.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from ops_math import backends, catalog, checks, features, files
from ops_math.dispatch import Operator
from ops_math.schedule.choose import reason_against
from ops_math.spec import Device, Implementation
from ops_math.testing.crosscompile import calls_of

BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
EVERYDAY = ("fp32", "bf16", "fp16")
DTYPES = (*EVERYDAY, "fp64")
HEADINGS = {"cpu": "CPU", "cuda": "NVIDIA, sm_80 and newer", "hip": "AMD, gfx942"}


class Cell(NamedTuple):
    """One implementation on one device in one dtype. `support` is all, some or none of the problems; `reasons` say why not."""

    operator: str
    implementation: str
    device: str
    dtype: str
    support: str
    reasons: tuple[str, ...]


def devices() -> dict[str, Device]:
    """The devices of the matrix; a GPU need not be here to be asked about."""
    cpu = backends.device_of(torch.device("cpu"))._replace(kind="cpu")
    return {"cpu": cpu, "cuda": backends.NAMED["h200"], "hip": backends.NAMED["mi300x"]}


def problems(operator: Operator, dtype: str) -> list[tuple[str, Any]]:
    """The different problems, with their phase, that the operator's small cases pose in a dtype."""
    found: dict[tuple[str, Any], None] = {}
    for case in operator.file("problem").CASES:
        wanted = "fp32" if dtype == "fp64" else dtype
        if case.small and wanted in case.dtypes:
            for call in calls_of(operator, case, dtype):
                found[call.phase, operator.phases[call.phase].problem_of(*call.args)] = None
    return list(found)


def cell(implementation: Implementation, device: Device, kind: str, dtype: str, posed: list[tuple[str, Any]]) -> Cell:
    """Put every problem to one implementation, as a build of torch for that device would have it."""
    with contextlib.nullcontext() if kind == "cpu" else features.assumed(device.kind):
        answers = [reason_against(implementation, problem, device, phase, 0) for phase, problem in posed]
    reasons = tuple(sorted({answer for answer in answers if answer is not None}))
    support = "all" if not reasons else ("some" if None in answers else "none")
    return Cell(implementation.operator, implementation.name, kind, dtype, support, reasons)


def matrix() -> list[Cell]:
    """Every cell, in the order of the catalogue."""
    cells = []
    for operator in catalog.operators().values():
        posed = {dtype: problems(operator, dtype) for dtype in DTYPES}
        for implementation in operator.implementations():
            for kind, device in devices().items():
                cells += [cell(implementation, device, kind, dtype, posed[dtype]) for dtype in DTYPES]
    return cells


def grouped(cells: Iterable[Cell]) -> dict[tuple[str, str, str], dict[str, str]]:
    """Support by dtype for each (operator, implementation, device)."""
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in cells:
        groups.setdefault((one.operator, one.implementation, one.device), {})[one.dtype] = one.support
    return groups


def in_short(name: str, support: dict[str, str]) -> str:
    """`name`, with what differs from the everyday dtypes in full; empty where nothing runs."""
    taken = [dtype for dtype in DTYPES if support[dtype] != "none"]
    if not taken:
        return ""
    star = r"\*" if "some" in support.values() else ""
    if tuple(taken) == DTYPES:
        return f"{name}⁺{star}"
    return f"{name}{star}" if tuple(taken) == EVERYDAY else f"{name}{star} ({' '.join(taken)})"


def markdown(cells: list[Cell]) -> str:
    """The matrix for the README: a row for each operator, its implementations in order of preference."""
    groups = grouped(cells)
    lines = ["| functions | " + " | ".join(HEADINGS.values()) + " |", "|---" * (len(HEADINGS) + 1) + "|"]
    for operator in catalog.operators().values():
        columns = []
        for kind in HEADINGS:
            names = [i.name for i in operator.implementations()]
            columns.append(", ".join(filter(None, (in_short(name, groups[operator.name, name, kind]) for name in names))) or "no")
        lines.append("| " + ", ".join(f"`{name}`" for name in operator.public) + " | " + " | ".join(columns) + " |")
    legend = (
        "`vendor`: PyTorch's own kernels; `eager`: plain PyTorch. fp32, bf16 and fp16 unless said; ⁺ fp64 too; "
        r"\* not every call, and `ops-math ops --json` gives the reasons."
    )
    return "\n".join([*lines, "", legend])


def replace_between_markers(text: str, content: str, where: str) -> str:
    """The text with what stands between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        checks.fail(
            "ops", "--update", f"a file with one {BEGIN} and, after it, one {END}", where, "Put both markers where the matrix belongs."
        )
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def show(cells: list[Cell]) -> None:
    """Print the matrix in the terminal."""
    groups = grouped(cells)
    table = Table("operator", "implementation", *HEADINGS.values())
    last = ""
    for operator in catalog.operators().values():
        for implementation in operator.implementations():
            row = []
            for kind in HEADINGS:
                support = groups[operator.name, implementation.name, kind]
                row.append(" ".join(dtype + ("*" if how == "some" else "") for dtype, how in support.items() if how != "none") or "-")
            table.add_row(operator.name if operator.name != last else "", implementation.name, *row)
            last = operator.name
    console = Console()
    console.print(table)
    console.print("* not every call; `ops-math ops --json` gives the reasons")


def ops(
    as_json: Annotated[bool, typer.Option("--json", help="Print every cell with its reasons.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
    update: Annotated[Path | None, typer.Option(help="With --markdown: write the table between the markers of this file.")] = None,
) -> None:
    """Show the support matrix: operator, implementation, device, dtype."""
    if update is not None and not as_markdown:
        checks.fail("ops", "--update", "used with --markdown", "--update alone", "Say: ops-math ops --markdown --update README.md")
    cells = matrix()
    if as_json:
        sys.stdout.write(json.dumps([one._asdict() for one in cells], indent=2) + "\n")
    elif update is not None:
        files.replace(update, replace_between_markers(update.read_text(), markdown(cells), str(update)))
    elif as_markdown:
        sys.stdout.write(markdown(cells) + "\n")
    else:
        show(cells)
