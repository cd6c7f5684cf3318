"""`ops-math verify`: proof of our operators on this device, and of anybody else's against a reference."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ops_math import catalog, checks
from ops_math.cli.device import chosen as chosen_device
from ops_math.cli.progress import SELDOM_S, lines
from ops_math.testing.proof import prove
from ops_math.testing.report import Report
from ops_math.testing.verify import DTYPES, TOUGH
from ops_math.testing.verify import verify as verify_call

EVERYTHING = "all"


def found(argument: str, path: str) -> Any:
    """What `module:name` names."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        checks.fail("verify", argument, "MODULE:NAME", repr(path), "Write it like mypackage.norms:rms_norm.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, so that a file beside the user is found
    try:
        value = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, SyntaxError) as error:
        checks.fail("verify", argument, "something that can be imported", f"{path!r} ({error})", "Run from its folder, or install it.")
    except SystemExit as error:  # a script without `if __name__ == "__main__":`
        do = 'Guard what it runs by `if __name__ == "__main__":`.'
        checks.fail("verify", argument, "something that can be imported", f"{path!r}, which ends the process (code {error.code})", do)
    return value


def ours(name: str, implementation: str | None, device: str, dtypes: tuple[str, ...], faults: bool, say: Any) -> list[Report]:
    """A report for each implementation that the device can run."""
    operators = catalog.operators()
    public = {fn: op for op in operators.values() for fn in op.public}
    if name != EVERYTHING and name not in operators and name not in public:
        own = "For a function of your own write MODULE:NAME and give --reference and --inputs."
        do = f"{checks.nearest(name, (*operators, *public, EVERYTHING))} {own}".lstrip()
        checks.fail("verify", "OP", "all or one of " + ", ".join(operators), repr(name), do)
    chosen = list(operators.values()) if name == EVERYTHING else [operators.get(name) or public[name]]
    reports = []
    for operator in chosen:
        names = [i.name for i in operator.implementations()]
        if implementation is not None and name != EVERYTHING:
            checks.one_of("verify", "--implementation", implementation, tuple(names))
        for one in operator.implementations():
            if implementation in (None, one.name):
                with _one_thread():
                    reports.append(prove(operator, one.name, device, dtypes, faults=faults, say=say))
    return reports


@contextmanager
def _one_thread() -> Iterator[None]:
    """The cases are small: on busy cores threads that wait for each other take ten times as long (softmax: 55 s and 4 s)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def verify(
    op: Annotated[str, typer.Argument(metavar="OP", help="An operator of ours, all, or MODULE:NAME of any function.")],
    reference: Annotated[str | None, typer.Option(help="MODULE:NAME of the definition, in differentiable torch.")] = None,
    inputs: Annotated[str | None, typer.Option(help="MODULE:NAME of a function of a draw, or of several: see docs/verify.md.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtypes: Annotated[str, typer.Option(help="Of fp32,bf16,fp16.")] = "fp32,bf16",
    implementation: Annotated[str | None, typer.Option(help="Of an operator of ours, this one alone: triton_gpu, vendor, eager.")] = None,
    frozen: Annotated[str, typer.Option(help="Positions and keywords that get no gradient: 2,3,mask.")] = "",
    tempers: Annotated[str, typer.Option(help="What is done to plain numbers: " + ", ".join(TOUGH) + ".")] = ",".join(TOUGH),
    compiled: Annotated[str, typer.Option("--compile", help="A backend of torch.compile to hold to the same budget.")] = "",
    far: Annotated[bool, typer.Option("--far", help="Offsets past 2^31 elements too (4 to 8 GiB).")] = False,
    faults: Annotated[bool, typer.Option("--faults/--no-faults", help="Plant faults, and see that each is caught.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not say what is being done.")] = False,
) -> None:
    """Prove an operator right on this device, or say what is wrong with it: then the exit code is 1."""
    chosen = tuple(part.strip() for part in dtypes.split(",") if part.strip())
    for dtype in chosen:
        checks.one_of("verify", "--dtypes", dtype, DTYPES)
    if not chosen:
        checks.fail("verify", "--dtypes", "at least one of " + ", ".join(DTYPES), repr(dtypes), "Leave it out for fp32,bf16.")
    device = str(chosen_device("verify", device))
    terminal = Console(stderr=True)
    seldom = lines(terminal, SELDOM_S)

    def say(words: str) -> None:
        if not quiet and terminal.is_terminal:
            terminal.print(words, style="dim", highlight=False)
        elif not quiet:
            seldom(words)

    if ":" in op:
        if reference is None or inputs is None:
            missing = "--reference" if reference is None else "--inputs"
            checks.fail("verify", missing, "MODULE:NAME, for a function that is not ours", "nothing", "See docs/verify.md.")
        held = tuple(int(part) if part.isdigit() else part for part in frozen.replace(" ", "").split(",") if part)
        tough = tuple(part.strip() for part in tempers.split(",") if part.strip())
        given = found("OP", op), found("--reference", reference), found("--inputs", inputs)
        reports = [
            verify_call(
                given[0], reference=given[1], inputs=given[2], device=device, dtypes=chosen, frozen=held, tempers=tough,
                faults=None if faults else (), compile=compiled, far=far, name=op, progress=say,
            )
        ]  # fmt: skip
    else:
        for option, value in (
            ("--reference", reference),
            ("--inputs", inputs),
            ("--frozen", frozen),
            ("--compile", compiled),
            ("--far", far),
        ):
            if value:
                checks.fail("verify", option, "left out for an operator of ours", "it", "It belongs to MODULE:NAME; ours bring their own.")
        reports = ours(op, implementation, device, chosen, faults, say)
    if as_json:
        sys.stdout.write(json.dumps([r.to_json() for r in reports], indent=2) + "\n")
    else:
        sys.stdout.write("\n\n".join(str(r) for r in reports) + "\n")
    judged = [r for r in reports if r.judged]
    if not judged or not all(r.ok for r in judged):
        raise typer.Exit(1)
