"""`ops-math calibrate`: measure, for a model of the command line, which implementation is fastest for each problem of its step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ops_math import checks, schedule
from ops_math.backends import kernel_cache
from ops_math.cli.device import chosen
from ops_math.cli.paths import writable
from ops_math.cli.progress import SELDOM_S, lines
from ops_math.cli.train import capacity
from ops_math.cli.train.config import check_length, resolve
from ops_nn.adopt import adopt
from ops_nn.models import PRESETS, build

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def step_of(name: str, batch: int, seq: int, dtype: str, autocast: bool, device: torch.device) -> Any:
    """A training step of a model with ops-math in it: forward and backward on random tokens."""
    preset = PRESETS[name]
    weights = torch.float32 if autocast else DTYPES[dtype]
    model = build(name, device=device, dtype=weights).train()
    adopt(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, preset.config.vocab_size, (batch, seq), generator=generator).to(device)
    labels = ids if preset.masked else torch.cat([ids[:, 1:], ids.new_full((batch, 1), -100)], 1)
    region = torch.autocast(device.type, DTYPES[dtype]) if autocast else contextlib.nullcontext()

    def step() -> None:
        with region:
            loss = model(ids, labels=labels).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _check_sizes(model: str, batch: int, seq: int, autocast: str, place: torch.device) -> None:
    """What cannot run is said before the step runs."""
    config = resolve({"model": None})
    config = dataclasses.replace(config, model=model, batch=batch, seq=seq, dtype=autocast, device=str(place), compare=False)
    check_length("calibrate", model, seq)
    capacity.check(config, "calibrate", optimizer=False)


def calibrate(
    model: Annotated[str, typer.Option(help="Model size: " + ", ".join(PRESETS) + ".")] = "llama-tiny",
    batch: Annotated[int | None, typer.Option(help="Sequences a step.", show_default="the model's")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens a sequence.", show_default="the model's")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    parameters: Annotated[
        bool, typer.Option("--parameters/--autocast", help="With a 16-bit dtype: parameters in it, or fp32 ones under autocast.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cuda where there is a GPU")] = None,
    seconds: Annotated[float, typer.Option(help="Time for measuring [s].")] = 60.0,
    anew: Annotated[bool, typer.Option("--anew", help="Measure problems again that are in the record.")] = False,
    export: Annotated[Path | None, typer.Option(help="Write the record to this file too.")] = None,
    kernel_cache_gib: Annotated[
        float, typer.Option("--kernel-cache", help="Most that Triton's folder of compiled kernels may hold [GiB]; those unused longest go.")
    ] = 8.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Measure every problem of a model's training step, and keep in the user's cache folder which implementation is fastest."""
    checks.one_of("calibrate", "--model", model, tuple(PRESETS))
    checks.one_of("calibrate", "--dtype", dtype, tuple(DTYPES))
    for name, value in (("--batch", batch), ("--seq", seq)):
        if value is not None:
            checks.positive("calibrate", name, value)
    if not kernel_cache_gib >= 0:
        checks.fail("calibrate", "--kernel-cache", "at least 0", str(kernel_cache_gib), "Give gibibytes.")
    checks.positive("calibrate", "--seconds", seconds)
    writable("calibrate", "--export", export)
    place = chosen("calibrate", device)
    autocast = dtype != "fp32" and not parameters
    sizes = batch or PRESETS[model].batch, seq or PRESETS[model].seq
    _check_sizes(model, *sizes, dtype if autocast else "fp32", place)
    step = step_of(model, *sizes, dtype, autocast, place)
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, line = bar.add_task("one step, to see its problems", total=None), lines(console, SELDOM_S)

        def tell(words: str, done: int, total: int) -> None:
            bar.update(task, description=words[:100], completed=done, total=total)
            line(f"{done}/{total} {words}" if total else words)

        found = schedule.calibrate(step, seconds=seconds, anew=anew, progress=tell)
    trimmed = kernel_cache.trim(int(kernel_cache_gib * 2**30))
    if trimmed.removed:
        console.print(f"removed {trimmed.removed} compiled kernels, {(trimmed.before - trimmed.after) / 2**30:.2f} GiB")
    if as_json:
        rows = [{**m._asdict(), "ties": list(m.ties)} for m in found.measurements]
        sys.stdout.write(
            json.dumps({"measurements": rows, "known": found.known, "skipped": found.skipped, "model_close": found.model_close}, indent=2)
            + "\n"
        )
    else:
        Console().print(str(found), highlight=False, markup=False, soft_wrap=True)
    if export is not None:
        sys.stdout.flush()
        schedule.export(export)
