"""The table at the end, as text cells that the terminal and the report both show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ops_math.cli.train.config import PLAIN
from ops_math.cli.train.result import UNTIMED, Result, VariantResult

MISSING = "–"


class Row(NamedTuple):
    """One line: what it says, and a cell for each variant."""

    label: str
    cells: list[str]


def rows(result: Result) -> list[Row]:
    """The lines of the table; one column for each variant."""
    cuda = result.config.torch_device.type == "cuda"
    window = len(result.noise_losses)
    lines: list[tuple[str, Callable[[VariantResult], str]]] = [
        ("step time, median", lambda v: milliseconds(v.median)),
        ("  middle half", spread),
        ("tokens/s", lambda v: MISSING if v.tokens_per_s is None else f"{v.tokens_per_s:,.0f}"),
        ("peak memory", lambda v: measured(v, lambda m: mebibytes(m.peak_bytes))),
        ("kernel launches a step" if cuda else "operator calls a step", lambda v: measured(v, lambda m: f"{m.calls:,}")),
        ("saved for backward", lambda v: measured(v, lambda m: mebibytes(m.saved_bytes))),
        ("first loss", lambda v: loss(v.losses[0] if v.losses else None)),
        ("last loss", lambda v: loss(v.losses[-1] if v.losses else None)),
        ("validation loss", lambda v: loss(v.validation_loss)),
    ]
    if result.config.compare:
        lines.insert(2, ("step time / plain", lambda v: relative(result, v)))
        lines.insert(3, ("  95 % interval", lambda v: interval(result, v)))
        if window and window != result.steps_done:
            lines.append((f"loss difference, {window} steps", lambda v: gap(v, v.window_difference)))
        lines.append((f"loss difference, {result.steps_done} steps", lambda v: gap(v, v.largest_difference)))
    table = [Row(label, [MISSING if v.unavailable else cell(v) for v in result.variants]) for label, cell in lines]
    if result.config.compare and window:
        floor = f"noise floor, {window} steps"
        table.append(Row(floor, [small(result.noise_floor) if v.name == PLAIN else "" for v in result.variants]))
    return table


def notes(result: Result) -> list[str]:
    """What the figures mean and how they were found, in sentences."""
    said = []
    for v in result.variants:
        if v.unavailable:
            said.append(f"{v.label} did not run: {v.unavailable}.")
        elif v.measurement is not None and v.measurement.error:
            said.append(f"{v.label}: memory was not measured, {v.measurement.error}.")
    if result.stopped:
        said.append(result.stopped)
    if result.config.compare:
        said.append("The runs took turns, step by step, in the order A B C, C B A, and so on, on the same batches from the same weights.")
    said.append(f"Times leave out the first {UNTIMED} steps after each start (compilation, first use of memory).")
    methods = sorted({v.measurement.method for v in result.variants if v.measurement is not None and v.measurement.method})
    said.extend(f"Peak memory: {method}, in a process of its own for each run." for method in methods)
    if result.noise_losses:
        said.append(
            "Loss difference: the largest distance from plain PyTorch's loss on any step. Noise floor: the same between "
            f"plain PyTorch and itself from weights moved by one ulp{' with other dropout masks' if result.config.dropout else ''}, "
            f"over the first {len(result.noise_losses)} steps; compare it with the difference over as many."
        )
    return said


def milliseconds(seconds: float | None) -> str:
    """A time in ms, or s from 10 s on."""
    if seconds is None:
        return MISSING
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def spread(v: VariantResult) -> str:
    """The interquartile range."""
    if v.p25 is None or v.p75 is None:
        return MISSING
    low, high = milliseconds(v.p25), milliseconds(v.p75)
    unit = low.partition(" ")[2]
    return f"{low.removesuffix(' ' + unit)}–{high}" if high.endswith(" " + unit) else f"{low} – {high}"


def relative(result: Result, v: VariantResult) -> str:
    """Step time relative to plain PyTorch."""
    found = result.ratios.get(v.name)
    return "1" if v.name == PLAIN else MISSING if found is None else f"{found.median:.3f}"


def interval(result: Result, v: VariantResult) -> str:
    """The interval of the relative step time."""
    found = result.ratios.get(v.name)
    if v.name == PLAIN:
        return ""
    return MISSING if found is None or found.low is None or found.high is None else f"{found.low:.3f}–{found.high:.3f}"


def measured(v: VariantResult, show: Callable[..., str]) -> str:
    """A figure of the measurement, when there is one."""
    return MISSING if v.measurement is None or v.measurement.error else show(v.measurement)


def mebibytes(size: int) -> str:
    """A size in MiB, or GiB from 10 GiB on."""
    return f"{size / 2**30:.1f} GiB" if size >= 10 * 2**30 else f"{size / 2**20:,.0f} MiB"


def loss(value: float | None) -> str:
    """A loss [nats per token]."""
    return MISSING if value is None else f"{value:.4f}"


def gap(v: VariantResult, value: float | None) -> str:
    """A difference of losses; the baseline has none."""
    return "" if v.name == PLAIN else small(value)


def small(value: float | None) -> str:
    """A small number."""
    if value is None:
        return MISSING
    return "0" if value == 0.0 else f"{value:.1e}" if math.isfinite(value) else "not a number"
