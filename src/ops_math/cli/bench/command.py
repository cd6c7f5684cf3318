"""The options of `ops-math bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

from ops_math import checks, files
from ops_math.cli.bench import baseline, calls, contenders, driver, liger, live, optimizer, rivals, show, steps
from ops_math.cli.bench import floor as floors
from ops_math.cli.bench.clock import clock_for
from ops_math.cli.device import chosen as chosen_device
from ops_math.cli.paths import folder_of, writable, write_all
from ops_math.cli.progress import telling
from ops_math.spec import DTYPE_OF

ALL, STEP = "all", "step"
HELD_SESSIONS = 5  # with --save and --check: enough to see how much a row moves from session to session
FAILED = 1
STEP_OF = {"torch": steps.PLAIN, "compile": steps.COMPILE, "liger": steps.LIGER}
STEP_OURS = (steps.OURS, steps.PACKED)


class Found(NamedTuple):
    """What a run found: rows, what a baseline keeps of them, who is missing and why (and where), who dropped out and why."""

    rows: list[dict[str, Any]]
    kept: dict[str, Any]
    missing: dict[str, str]
    failed: dict[str, str]
    ours_failed: bool


class Asked(NamedTuple):
    """What is to be measured, after the options were checked."""

    function: str
    device: torch.device
    dtype: str
    names: tuple[str, ...]
    shapes: list[str]
    keywords: dict[str, Any]
    seconds: float
    sessions: int
    random: int
    seed: int
    compiled: bool
    model: str
    variants: tuple[str, ...] = ()
    floor: bool = False


def plans(asked: Asked) -> list[driver.Plan]:
    """The calls to measure."""
    functions = list(calls.CALLS) if asked.function == ALL else [name for name in (asked.function,) if name in calls.CALLS]
    if asked.function == ALL and asked.random:
        functions = [name for name in functions if calls.CALLS[name].takes_rows]
    found = []
    if asked.function in (ALL, optimizer.NAME) and not asked.random:
        shapes = asked.shapes or (optimizer.SMALL if asked.device.type == "cpu" else optimizer.SHAPES)
        found = [driver.Plan(optimizer.NAME, shape, {}, asked.dtype, asked.device, asked.names) for shape in shapes]
        for shape in shapes:
            optimizer.sizes_of(shape)
    for function in functions:
        entry = calls.CALLS[function]
        if asked.random:
            most = driver.most_numbers(asked.device, asked.dtype)
            posed = [(shape, asked.keywords) for shape in calls.random_shapes(function, asked.random, asked.seed, most)]
        elif asked.shapes:
            posed = [(shape, asked.keywords) for shape in asked.shapes]
        else:
            standard = entry.small if asked.device.type == "cpu" else entry.shapes
            posed = [(shape, {**keywords, **asked.keywords}) for shape, keywords in standard]
        for shape, keywords in posed:
            calls.sizes_of(function, shape)
            found.append(driver.Plan(function, shape, keywords, asked.dtype, asked.device, asked.names, asked.compiled))
    return found


def measure_operators(asked: Asked, facts: dict[str, Any], console: Console) -> Found:
    """Measure every call; one that cannot be measured at all is named and fails the command."""
    found = Found([], {}, {}, {}, False)
    posed = plans(asked)
    clock = clock_for(asked.device)
    with telling(console) as tell:
        for number, plan in enumerate(posed):

            def progress(words: str, plan: driver.Plan = plan, number: int = number) -> None:
                tell(f"{number + 1}/{len(posed)} {plan.label}" + (f": {words}" if console.is_terminal else ""))

            measure = optimizer.measure if plan.function == optimizer.NAME else driver.measure
            outcome = measure(plan, clock, asked.seconds, asked.sessions, progress)
            found.rows.extend(driver.rows_of(outcome))
            found.kept.update(driver.kept(outcome, facts))
            for rival, why in outcome.missing.items():
                known = f"{rival}: {why}"
                found.missing[known] = (found.missing[known] + ", " if known in found.missing else "") + plan.function
            found.failed.update({f"{name} in {plan.label}": why for name, why in outcome.failed.items()})
            own = [name for name in {**outcome.failed, **outcome.wrong} if name in (rivals.OURS, rivals.COMPILED, driver.CLOCK)]
            found = found._replace(ours_failed=found.ours_failed or bool(own))
    missing = {known: ", ".join(dict.fromkeys(where.split(", "))) for known, where in found.missing.items()}
    return found._replace(missing=missing)


def measure_step(asked: Asked, facts: dict[str, Any], console: Console) -> Found:
    """Measure whole steps of a model."""
    rivals_of = [STEP_OF[name] for name in asked.names if name in STEP_OF]
    ours = list(dict.fromkeys([*STEP_OURS, *asked.variants]))
    missing = {f"{name}: no whole step of it is measured here": STEP for name in asked.names if name not in STEP_OF}
    if steps.LIGER in rivals_of:
        try:
            liger.installed()
        except rivals.AbsentError as error:
            missing[f"{steps.LIGER}: {error}"] = STEP
            rivals_of.remove(steps.LIGER)
    with telling(console) as tell:
        found = steps.measure(
            asked.model, list(dict.fromkeys([*rivals_of, *ours])), asked.device.type, sessions=asked.sessions, tell=tell,
            with_floor=asked.floor,
        )  # fmt: skip
    call, kept = f"{asked.model} step", {}
    for variant in (name for name in ours if found.sessions and name in found.sessions[0]):
        metrics = {"time over that of torch": steps.ratios(found.sessions, variant)}
        kept[f"{call} {variant}"] = {"op": STEP, "call": call, "metrics": metrics, "facts": facts}
    return Found(found.rows, kept, missing, found.failed, False)


def check_options(
    function: str, vs: str | None, shapes: list[str], dtype: str | None, device: str | None, seconds: float,
    sessions: int | None, held: bool, random: int, keywords: list[str], seed: int, compiled: bool | None, model: str | None,
    variants: str = "", floor: bool = False,
) -> Asked:  # fmt: skip
    """The options as they are meant, or an error in words."""
    checks.one_of("bench", "OP", function, (*calls.CALLS, optimizer.NAME, ALL, STEP))
    if function == optimizer.NAME and (random or keywords):
        given = "--random" if random else "--with"
        checks.fail("bench", given, "left out for adamw", "it", "Its sizes are " + optimizer.SIZES + "; it takes no keywords here.")
    place = chosen_device("bench", device)
    gpu = place.type == "cuda"
    checks.one_of("bench", "--dtype", dtype or "bf16", tuple(DTYPE_OF))
    if shapes and (function in (ALL, STEP) or random):
        checks.fail(
            "bench", "--shape", "used with one operator and without --random", function, "Name one: ops-math bench rms_norm --shape 64x64"
        )
    if not seconds > 0:
        checks.fail("bench", "--seconds", "positive", str(seconds), "Give seconds for each phase and session.")
    for name, value in (("--sessions", sessions), ("--random", random or None)):
        if value is not None:
            checks.positive("bench", name, value)
    if held and sessions is not None and sessions < baseline.FEWEST_SESSIONS:
        words = f"at least {baseline.FEWEST_SESSIONS} with --save or --check"
        checks.fail("bench", "--sessions", words, str(sessions), "Fewer do not show how much a row moves from session to session.")
    chosen = model or ("llama-1b" if gpu else "llama-tiny")
    checks.one_of("bench", "--model", chosen, tuple(steps.SETUPS))
    posed = tuple(name for name in variants.split(",") if name)
    for name in posed:
        contenders.variant_of(name)
    if (posed or floor) and function != STEP:
        given = "--variants" if posed else "--floor"
        checks.fail("bench", given, "used with step", function, "Leave it out, or measure a step: ops-math bench step --floor.")
    everyone = ",".join(rivals.NAMES) if gpu and function != STEP else "torch,compile" if gpu else "torch"
    return Asked(
        function, place, dtype or ("bf16" if gpu else "fp32"), rivals.asked(everyone if vs is None else vs), shapes,
        calls.keywords_of(keywords), seconds, sessions or (HELD_SESSIONS if held else 1), random, seed,
        gpu if compiled is None else compiled, chosen, posed, floor,
    )  # fmt: skip


def bench(
    function: Annotated[
        str, typer.Argument(metavar="OP|all|step", help="A public function (rms_norm, attention, ...), all of them, or a step.")
    ],
    vs: Annotated[
        str | None,
        typer.Option(help="Rivals: " + ", ".join((*rivals.NAMES, rivals.EACH)) + ".", show_default="all on a GPU, torch on a CPU"),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Sizes: 16384x4096; for attention " + calls.QKV + ". May be repeated.")] = None,
    keywords: Annotated[list[str] | None, typer.Option("--with", help="A keyword argument: causal=true. May be repeated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64.", show_default="bf16 on a GPU, fp32 on a CPU")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda where there is a GPU")] = None,
    save: Annotated[str | None, typer.Option(help="Keep the figures under this name, for this device; or in a .json file.")] = None,
    check: Annotated[str | None, typer.Option(help="Hold the figures against those saved; exit code 1 where one is slower.")] = None,
    random: Annotated[int, typer.Option(help="Draw this many shapes: 64 to 16,384 columns, 1 to 1,000,000 rows.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random shapes.")] = 0,
    seconds: Annotated[float, typer.Option(help="Time for each phase and session [s].")] = 0.5,
    sessions: Annotated[
        int | None, typer.Option(help="Times that everything is set up anew.", show_default="1; 5 with --save, --check")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--no-compiled", help="Time ours under torch.compile too.", show_default="on a GPU")
    ] = None,
    model: Annotated[str | None, typer.Option(help="For step: " + ", ".join(steps.SETUPS) + ".")] = None,
    variants: Annotated[
        str, typer.Option(help=f"For step: more variants of ours, separated by commas; each {contenders.HOW}.", show_default="none")
    ] = "",
    floor: Annotated[bool, typer.Option(help="For step: the least time of a step, part by part, and each variant's share.")] = False,
    results: Annotated[Path | None, typer.Option(help="Append rows to this JSON-lines file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write an SVG.", show_default="beside a saved baseline")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure operators or a whole step against plain PyTorch and rivals, interleaved in one run.

    On a GPU: kernel time from the profiler with cold caches, share of the ceiling, host time. On a CPU: ratios only. Exit code 1 where
    ours fails, has wrong numbers, or is slower than the baseline of --check.
    """
    asked = check_options(
        function, vs, shape or [], dtype, device, seconds, sessions, bool(save or check), random, keywords or [], seed, compiled, model,
        variants, floor,
    )  # fmt: skip
    facts = live.facts(asked.device)
    kept_at = _files(save, results, picture, facts["device"])
    before = baseline.read(baseline.path_of(check, facts["device"])) if check is not None else None
    console = Console(stderr=True)
    if asked.device.index is not None:
        torch.cuda.set_device(asked.device)
    found = (measure_step if function == STEP else measure_operators)(asked, facts, console)
    surroundings = {**facts, **live.surroundings(asked.device)}
    verdict = None if before is None else baseline.hold(before, found.kept)
    if as_json:
        sys.stdout.write(json.dumps(_plain(found, surroundings, verdict), indent=2) + "\n")
    else:
        _tell(found, surroundings, asked)
        if verdict is not None and check is not None:
            show.tell_verdict(Console(), verdict, baseline.path_of(check, facts["device"]))
    _keep(found, facts, asked, kept_at, picture, results)
    if found.ours_failed or (verdict is not None and verdict.failed):
        raise typer.Exit(FAILED)


def _files(save: str | None, results: Path | None, picture: Path | None, device: str) -> Path | None:
    """Where a baseline goes, if anywhere; and all that will be written can be, before anything is measured for it."""
    writable("bench", "--results", results)
    writable("bench", "--picture", picture)
    if save is None:
        return None
    path = baseline.path_of(save, device)
    folder_of("bench", "--save", path)
    if path.exists():
        baseline.read(path, "--save")  # its other rows stay, so it must be one
    return path


def _keep(found: Found, facts: dict[str, Any], asked: Asked, kept_at: Path | None, picture: Path | None, results: Path | None) -> None:
    """Write what was asked for, when all of it is on the screen."""
    sys.stdout.flush()
    writes: list[Callable[[], Any]] = []
    if kept_at is not None:
        writes.append(partial(_save, kept_at, found.kept))
        picture = picture or kept_at.with_suffix(".svg")
    if picture is not None:
        drawn = show.picture(found.rows, f"{facts['device']}, torch {facts['torch']}, {facts['commit']}")
        writes.append(partial(files.replace, picture, drawn))
    if results is not None:
        writes.append(partial(live.append, results, found.rows, asked.device))
    write_all(writes)


def _save(path: Path, rows: dict[str, Any]) -> None:
    baseline.write(path, rows)
    Console(stderr=True).print(f"saved {len(rows)} rows in {path}", highlight=False, markup=False, soft_wrap=True)


def _tell(found: Found, surroundings: dict[str, Any], asked: Asked) -> None:
    """Everything for people."""
    out = Console()
    show.tell(out, found.rows, found.missing, found.failed, surroundings)
    for row in found.rows:
        if row["benchmark"] == floors.NAME:
            out.print(floors.describe(row), highlight=False, markup=False, soft_wrap=True)
    if asked.random:
        out.print(show.worst_words(found.rows), highlight=False, markup=False, soft_wrap=True)


def _plain(found: Found, surroundings: dict[str, Any], verdict: baseline.Verdict | None) -> dict[str, Any]:
    """Everything as plain data."""
    held = None
    if verdict is not None:
        held = {
            "held": [
                {"name": one.name, **one.comparison._asdict(), "slower": one.comparison.regressed, "too_noisy": one.comparison.blind}
                for one in verdict.held
            ],
            "new": verdict.new, "gone": verdict.gone, "notes": verdict.notes, "failed": verdict.failed,
        }  # fmt: skip
    worst = show.worst(found.rows)
    return {
        "live": surroundings, "rows": found.rows, "missing": found.missing, "failed": found.failed, "lost": show.lost(found.rows),
        "worst": None if worst is None else show.worst_words([worst]), "check": held,
    }  # fmt: skip
