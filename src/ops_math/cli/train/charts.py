"""Charts as SVG fragments for the report. Colours are CSS variables of the page, so one drawing serves light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ops_math.cli.train.config import COMPILED, OPS_MATH, PLAIN
from ops_math.cli.train.result import Result, VariantResult, difference

# matplotlib wants colours that it knows: each stands for a variable of the page and is replaced in the SVG's text.
INK, MUTED, GRID, NOISE = "#010203", "#020304", "#030405", "#040506"
COLOUR = {PLAIN: "#050607", COMPILED: "#060708", OPS_MATH: "#070809"}
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    NOISE: "var(--noise)",
    COLOUR[PLAIN]: "var(--plain)",
    COLOUR[COMPILED]: "var(--compiled)",
    COLOUR[OPS_MATH]: "var(--ops-math)",
}
# The runs lie on top of each other when all is well: a broad band, and two dashed lines that fill each other's gaps.
LINE: dict[str, dict[str, Any]] = {
    PLAIN: {"lw": 6.0, "alpha": 0.35},
    COMPILED: {"lw": 2.0, "linestyle": (0, (5, 5)), "dash_capstyle": "butt"},
    OPS_MATH: {"lw": 2.0, "linestyle": (5, (5, 5)), "dash_capstyle": "butt"},
}
WIDTH, HEIGHT = 6.4, 3.3
MOST_POINTS = 400
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 11.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "lines.solid_capstyle": "round",
}


def draw(name: str, title: str, paint: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """One chart as an SVG element; `title` is what a screen reader says."""
    style: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _for_page(buffer.getvalue(), name, title)


def _for_page(svg: str, name: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{title}">', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    # matplotlib numbers the parts of every figure alike; only ids that something refers to are kept, and those are salted.
    used = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def charts(result: Result) -> list[dict[str, str]]:
    """The charts that the result has data for: each with `title`, `caption` and `svg`."""
    ran = [v for v in result.variants if v.losses]
    made = []
    if ran:
        made.append(
            _chart("loss", "Loss", "Cross entropy in nats per token, before each step's update.", lambda axes: paint_losses(axes, ran))
        )
    if len(ran) > 1:
        caption = (
            "Distance of each loss curve from plain PyTorch's, on a logarithmic scale. Steps on which two losses are equal are not drawn."
        )
        if result.noise_losses:
            masks = " and other dropout masks" if result.config.dropout else ""
            caption += f" Noise floor: plain PyTorch against itself with weights moved by one ulp{masks}."
        made.append(_chart("difference", "Loss difference", caption, lambda axes: paint_differences(axes, ran, result.noise_losses)))
    if any(v.timed for v in ran):
        caption = "Each dot is a step; the bar spans the middle half, the tick is the median."
        made.append(_chart("times", "Step time", caption, lambda axes: paint_times(axes, ran)))
    weighed = [v for v in ran if v.measurement is not None and not v.measurement.error]
    if weighed:
        caption = "Upper bar: peak of one training step. Lower bar: what the forward keeps for the backward."
        made.append(_chart("memory", "Memory", caption, lambda axes: paint_memory(axes, weighed)))
    return made


def _chart(name: str, title: str, caption: str, paint: Callable[[Axes], None]) -> dict[str, str]:
    return {"title": title, "caption": caption, "svg": draw(name, f"{title}. {caption}", paint)}


def paint_losses(axes: Axes, variants: list[VariantResult]) -> None:
    """Loss curves over steps."""
    for v in variants:
        look = LINE[v.name] if len(variants) > 1 else {"lw": 2.0}
        axes.plot(range(1, len(v.losses) + 1), v.losses, color=COLOUR[v.name], label=v.label, **look)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    if len(variants) > 1:
        legend_above(axes)


def paint_differences(axes: Axes, variants: list[VariantResult], noise: list[float]) -> None:
    """Distance from the plain run, step by step, and the same of the run from disturbed weights."""
    plain = next(v.losses for v in variants if v.name == PLAIN)
    if noise:
        floor = _nonzero(noise, plain)
        axes.plot(range(1, len(floor) + 1), floor, color=NOISE, lw=6, alpha=0.35, label="noise floor")
    for v in variants:
        if v.name != PLAIN:
            gaps = _nonzero(v.losses, plain)
            axes.plot(range(1, len(gaps) + 1), gaps, color=COLOUR[v.name], lw=1.4, marker="o", ms=2.6, label=v.label)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    legend_above(axes)


def legend_above(axes: Axes) -> None:
    """One line of names over the picture, where no curve can pass under it."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=4, columnspacing=1.4, handlelength=2.2, handletextpad=0.6, borderpad=0.2
    )


def _nonzero(losses: list[float], plain: list[float]) -> list[float]:
    gaps = (difference(a, b) for a, b in zip(losses, plain, strict=False))
    return [gap if 0.0 < gap < float("inf") else float("nan") for gap in gaps]


def paint_times(axes: Axes, variants: list[VariantResult]) -> None:
    """A row of dots for each run, with its quartiles."""
    shown = [v for v in variants if v.timed]
    limit = max(_quantile(v.timed, 0.95) for v in shown) * 1.25
    for row, v in enumerate(reversed(shown)):
        times = v.timed[:: max(1, len(v.timed) // MOST_POINTS)]
        inside = [t * 1e3 for t in times if t <= limit]
        # A fixed scatter by the golden ratio: no two neighbours at one height, and the same picture every time.
        heights = [row - 0.3 + 0.2 * ((i * 0.618034) % 1.0 - 0.5) for i in range(len(inside))]
        axes.scatter(inside, heights, s=9, color=COLOUR[v.name], alpha=0.5, lw=0)
        if v.median is not None and v.p25 is not None and v.p75 is not None:
            axes.barh(row, (v.p75 - v.p25) * 1e3, left=v.p25 * 1e3, height=0.22, color=COLOUR[v.name], alpha=0.45)
            axes.plot([v.median * 1e3] * 2, [row - 0.16, row + 0.16], color=COLOUR[v.name], lw=3)
            beyond = sum(t > limit for t in v.timed)
            more = f"   {beyond} slower, out of the picture" if beyond else ""
            axes.text(v.median * 1e3, row + 0.24, f"{v.median * 1e3:,.0f} ms{more}", ha="center", va="bottom", color=INK)
    axes.set_yticks(range(len(shown)), [v.label for v in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlim(0, limit * 1e3)
    axes.set_xlabel("milliseconds a step")
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def paint_memory(axes: Axes, variants: list[VariantResult]) -> None:
    """Peak and saved bytes of each run."""
    largest = max(v.measurement.peak_bytes for v in variants if v.measurement)
    unit, name = (2**30, "GiB") if largest >= 10 * 2**30 else (2**20, "MiB")
    for row, v in enumerate(reversed(variants)):
        if v.measurement is None:
            continue
        for size, place, alpha in ((v.measurement.peak_bytes, row + 0.15, 1.0), (v.measurement.saved_bytes, row - 0.17, 0.5)):
            axes.barh(place, size / unit, height=0.28, color=COLOUR[v.name], alpha=alpha)
            axes.annotate(_amount(size / unit), (size / unit, place), (5, 0), textcoords="offset points", va="center", color=INK)
    axes.set_yticks(range(len(variants)), [v.label for v in reversed(variants)])
    axes.set_ylim(-0.6, len(variants) - 0.4)
    axes.set_xlim(0, largest / unit * 1.15)
    axes.set_xlabel(name)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
