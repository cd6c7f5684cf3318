"""What a run found, in words, in a table, and in a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ops_math.cli.bench.baseline import Verdict
from ops_math.cli.bench.rivals import COMPILED, OURS
from ops_math.cli.bench.standing import Row, groups, lost, name, own, ratio, time_of, where, worst, worst_words

__all__ = ["groups", "lost", "name", "own", "picture", "ratio", "table", "tell", "tell_verdict", "time_of", "where", "worst", "worst_words"]
COLOURS = {
    OURS: "#2a6fbb",
    COMPILED: "#7fb0e3",
    "torch": "#777777",
    "compile": "#b8860b",
    "liger": "#b04a4a",
    "quack": "#4a8f4a",
    "fa4": "#7a4fa3",
}
OTHER = "#aaaaaa"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def table(rows: list[Row]) -> Table:
    """Every row; on a CPU ratios alone, since its times are worth nothing outside their run."""
    on_gpu = any("kernel_us" in row or "step_ms" in row for row in rows)
    shown = Table()
    shown.add_column("call", no_wrap=True)
    for heading in (*(("time", "rate", "share", "host") if on_gpu else ()), "× torch", "±", "first call", "runs"):
        shown.add_column(heading)
    for place, group in groups(rows).items():
        shown.add_row(place)
        for row in group:
            times = _times(row) if on_gpu else ()
            over, noise, first = ratio(row), row.get("noise"), row.get("first_call_s")
            style = "bold" if own(row) else None
            notes = [row.get("implementation") or "", "WRONG NUMBERS" if row.get("wrong") else ""]
            shown.add_row(
                f"  {name(row)}", *times,
                "" if over is None else f"{over:.2f}", "" if noise is None else f"{noise:.0%}", "" if first is None else f"{first:.1f} s",
                " ".join(note for note in notes if note), style=style,
            )  # fmt: skip
    return shown


def _times(row: Row) -> tuple[str, str, str, str]:
    if "step_ms" in row:
        return f"{row['step_ms']:.1f} ms", f"{row['tokens_per_s']:,.0f} tokens/s", f"{row['peak_gib']:.1f} GiB", ""
    if "kernel_us" not in row:
        return "", "", "", ""
    if "share" not in row:
        return f"{row['kernel_us']:,.1f} us", "", "", f"{row['host_us']:.0f} us"
    rate = f"{row['gbs']:,.0f} GB/s" if "gbs" in row else f"{row['tflops']:,.0f} TFLOP/s"
    return f"{row['kernel_us']:,.1f} us", rate, f"{row['share']:.2f}", f"{row['host_us']:.0f} us"


def tell(console: Console, rows: list[Row], missing: dict[str, str], failed: dict[str, str], live: dict[str, Any]) -> None:
    """Print the run: what was live, the table, who is missing, whose numbers are wrong, where we lose."""

    def say(words: str, style: str | None = None) -> None:
        console.print(words, style=style, highlight=False, markup=False, soft_wrap=True)

    say("; ".join(f"{key}: {value}" for key, value in live.items()))
    console.print(table(rows))
    for rival, where_missing in missing.items():
        say(f"not measured in {where_missing}: {rival}")
    for subject, why in failed.items():
        say(f"dropped out: {subject}: {why}", "red")
    for row in rows:
        if row.get("wrong"):
            say(f"wrong numbers: {name(row)} in {where(row)}: {row['wrong']}", "red")
    losses = lost(rows)
    say(f"{len(losses)} of {len(groups(rows))} calls in which a rival is faster:" if losses else "no rival that was measured is faster")
    for words in losses:
        say(f"  {words}")


def tell_verdict(console: Console, verdict: Verdict, baseline: Path) -> None:
    """Print what `--check` found."""
    for note in verdict.notes:
        console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for one in verdict.held:
        change, allowed = one.comparison
        if one.comparison.regressed:
            words = f"SLOWER: {one.name}: by {change:.0%}, and {allowed:.0%} is within the noise ({one.before} -> {one.now})"
            console.print(words, style="red", highlight=False, markup=False, soft_wrap=True)
        elif one.comparison.blind:
            words = f"too noisy to tell: {one.name}: {change:+.0%}, and only more than {allowed:.0%} would show"
            console.print(words, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for gone in verdict.gone:
        console.print(f"in the baseline and no longer measured: {gone}", style="red", highlight=False, markup=False, soft_wrap=True)
    for new in verdict.new:
        console.print(f"not in the baseline: {new}", highlight=False, markup=False, soft_wrap=True)
    if not verdict.held:
        console.print(
            "no figure of this run is in the baseline: nothing was held", style="red", highlight=False, markup=False, soft_wrap=True
        )
    calm = len(verdict.held) - len(verdict.regressed)
    console.print(
        f"{baseline}: {len(verdict.held)} figures held, {len(verdict.regressed)} slower, {calm} not",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def picture(rows: list[Row], title: str) -> str:
    """An SVG with a line of dots for each call: shares of the ceiling where they are known, else times over plain PyTorch's."""
    shown = groups(rows)
    shares = any("share" in row for row in rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 1.2 + 0.3 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(1.0, color="#cccccc", lw=1.0, zorder=0)
        labelled: set[str] = set()
        for height, group in enumerate(reversed(list(shown.values()))):
            for row in sorted(group, key=own):
                value = row.get("share") if shares else ratio(row)
                if value is None:
                    continue
                who = name(row)
                look: dict[str, Any] = {"color": COLOURS.get(who, OTHER), "marker": "D" if own(row) else "o", "s": 34, "alpha": 0.85}
                axes.scatter([value], [height], label=None if who in labelled else who, linewidths=0, **look)
                labelled.add(who)
        axes.set_yticks(range(len(shown)), list(reversed(shown)))
        axes.set_xlabel("share of the ceiling (more is better)" if shares else "time over plain PyTorch's (less is better)")
        axes.set_title(title, loc="left", fontsize=9.0)
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
        if labelled:
            figure.legend(loc="outside lower center", ncols=min(len(labelled), 6), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
