"""The report folder: report.html, one file that needs nothing else, and report.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from ops_math import checks, files
from ops_math.cli.train import charts, table
from ops_math.cli.train.config import COMMAND, LABELS, OPS_MATH, PLAIN
from ops_math.cli.train.result import Result

HTML_NAME, JSON_NAME = "report.html", "report.json"
FORMAT = 1


class Headline(NamedTuple):
    """One of the figures at the top."""

    figure: str
    name: str
    detail: str


def write(folder: Path, result: Result) -> None:
    """Write both files, each in one step.

    Raises:
        UnsupportedError: when they cannot be written.
    """
    try:
        files.replace(folder / JSON_NAME, json.dumps(to_json(result), indent=2) + "\n")
        files.replace(folder / HTML_NAME, to_html(result))
    except OSError as error:
        checks.refuse(
            f"{COMMAND}: the report in {folder}", f"it cannot be written ({error.strerror})", "Free space or choose another --report folder"
        )


def to_json(result: Result) -> dict[str, Any]:
    """The result as plain values: strict JSON, a number that is none becomes null."""
    plain: dict[str, Any] = _strict({"format": FORMAT, "command": COMMAND, **dataclasses.asdict(result)})
    return plain


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_html(result: Result) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ops_math.cli.train", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [chart | {"svg": Markup(chart["svg"])} for chart in charts.charts(result)]
    return environment.get_template("report.html.jinja").render(
        result=result,
        config=result.config.to_json(),
        headlines=headlines(result),
        columns=[{"name": v.name, "label": LABELS[v.name]} for v in result.variants],
        rows=table.rows(result),
        notes=table.notes(result),
        charts=drawn,
        mebibytes=table.mebibytes,
    )


def headlines(result: Result) -> list[Headline]:
    """Three figures: against plain PyTorch when that ran, else of the run itself."""
    ours, plain = result.variant(OPS_MATH), result.variant(PLAIN)
    if ours is None or not ours.losses:
        return []
    if plain is None or not plain.losses:
        peak = table.measured(ours, lambda m: table.mebibytes(m.peak_bytes))
        return [
            Headline(
                table.loss(ours.losses[-1]),
                "last loss",
                f"from {table.loss(ours.losses[0])}, validation {table.loss(ours.validation_loss)}",
            ),
            Headline(table.milliseconds(ours.median), "a step", f"{ours.tokens_per_s:,.0f} tokens/s" if ours.tokens_per_s else ""),
            Headline(peak, "peak memory", "of one training step"),
        ]
    return [_speed(result), _memory(result), _agreement(result)]


def _speed(result: Result) -> Headline:
    ours, plain = result.variant(OPS_MATH), result.variant(PLAIN)
    found = result.ratios.get(OPS_MATH)
    if found is None or ours is None or plain is None:
        return Headline(table.MISSING, "speed", "no step was timed")
    detail = f"{table.milliseconds(ours.median)} a step against {table.milliseconds(plain.median)}"
    return Headline(f"{1.0 / found.median:.2f}×", "the speed of plain PyTorch", detail)


def _memory(result: Result) -> Headline:
    measured = [v.measurement for v in (result.variant(OPS_MATH), result.variant(PLAIN)) if v is not None]
    if len(measured) < 2 or any(m is None or m.error for m in measured):
        return Headline(table.MISSING, "of its peak memory", "not measured")
    ours, plain = (m.peak_bytes for m in measured if m is not None)
    return Headline(
        f"{ours / plain:.0%}".replace("%", " %"), "of its peak memory", f"{table.mebibytes(ours)} against {table.mebibytes(plain)}"
    )


def _agreement(result: Result) -> Headline:
    ours = result.variant(OPS_MATH)
    if ours is None or ours.window_difference is None:
        gap = None if ours is None else ours.largest_difference
        return Headline(table.small(gap), "largest loss difference", "no noise floor was measured")
    return Headline(table.small(ours.window_difference), "largest loss difference", f"noise floor {table.small(result.noise_floor)}")
