"""The README's table of measured figures, made from `benchmarks/results` and from nothing else.

    python scripts/measured_table.py             # print it
    python scripts/measured_table.py --update    # write it between the markers of README.md

Each row names its source: the last pair of runs of one commit in `h200.jsonl`, or a line of a sweep's text. The better figure is bold,
whosever it is; a row in which plain PyTorch is better stays.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
STEPS, NORMS, ATTENTION = "h200.jsonl", "h200_norms_2026-11-30c.txt", "h200_attention_2026-11-29.txt"


class Model(NamedTuple):
    """A model, how the README words its numbers, the rate that its users quote, and which variants it shows, with what is said of each."""

    name: str
    words: str
    unit: str
    variants: tuple[tuple[str, str], ...] = (("ops", ""),)
    gradients: bool = True


MODELS = (
    Model("llama-1b", "bf16", "tokens", (("packed+adamw", ""), ("packed+lean+adamw", "norms made again"))),
    Model(
        "bert-large",
        "bf16 autocast, dropout 0.1",
        "samples",
        (("ops+adamw", ""), ("ops+lean+graphed+adamw", "norms made again, one graph")),
    ),
    Model("llama-tiny", "fp32", "tokens", gradients=False),
)


class Row(NamedTuple):
    """A line of the table: what, and the cells of plain PyTorch and of ops-math. `better` is 0, 1, or None where nothing is compared."""

    what: str
    cells: tuple[str, str]
    better: int | None

    def markdown(self) -> str:
        """The line."""
        cells = [f"**{cell}**" if place == self.better else cell for place, cell in enumerate(self.cells)]
        return f"| {self.what} | " + " | ".join(cells) + " |"


class MissingResultError(Exception):
    """A figure that the table shows and the results do not have."""


def the_one(lines: list[str], pattern: str, where: str) -> re.Match[str]:
    """The only line that matches."""
    found = [match for match in (re.search(pattern, line) for line in lines) if match]
    if len(found) != 1:
        raise MissingResultError(f"{where}: {len(found)} lines match {pattern!r}, and one is needed")
    return found[0]


def last(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """The newest row with these values; the file is append-only."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise MissingResultError(f"{STEPS}: no row has {wanted}")
    return found[-1]


def together(rows: list[dict[str, Any]], model: str, variants: Sequence[str] = ("ops",)) -> list[dict[str, Any]]:
    """Plain PyTorch and variants of the newest run that has them all: figures of two runs are never put side by side."""
    wanted = ("plain", *variants)
    steps = [row for row in rows if row.get("benchmark") == "step" and row["model"] == model]
    for one in reversed(steps):
        run = {key: one[key] for key in ("commit", "command", "device")}.items()
        found = {row["variant"]: row for row in steps if run <= row.items()}
        if set(wanted) <= set(found):
            return [found[variant] for variant in wanted]
    raise MissingResultError(f"{STEPS}: no run of {model} has {', '.join(wanted)}")


def step_rows(rows: list[dict[str, Any]], model: Model) -> list[Row]:
    """Speed and memory, and the gradients' error, of one model."""
    plain, *ours = together(rows, model.name, [variant for variant, _ in model.variants])
    rates = [row[f"{model.unit}_per_s"] for row in (plain, *ours)]
    cells = [f"{rate:,.0f}, {row['peak_gib']:.1f} GiB" for rate, row in zip(rates, (plain, *ours), strict=True)]
    told = [f"{cell} ({said})" if said else cell for cell, (_, said) in zip(cells[1:], model.variants, strict=True)]
    speed = Row(f"{model.name}: {model.unit}/s, peak memory", (cells[0], "; ".join(told)), int(max(rates) > rates[0]))
    if not model.gradients:
        return [speed]
    errors = last(rows, benchmark="gradients", model=model.name)
    measured_with = "" if errors["commit"] == ours[0]["commit"] else f" ({errors['commit'].split()[0]})"
    return [
        speed,
        Row(
            f"{model.name}: gradient error against fp32, worst and median parameter{measured_with}",
            ("1 and 1", f"{errors['worst_ratio']:.2f} and {errors['median_ratio']:.2f}"),
            None,
        ),
    ]


def adamw_row(rows: list[dict[str, Any]]) -> Row:
    """A step of AdamW on 1.2 billion bf16 parameters: the faster of PyTorch's two, and ours."""
    wanted = {"benchmark": "optimizer", "model": "llama1b", "kind": "bf16"}
    ours = last(rows, **wanted, variant="ours")
    theirs = max((last(rows, **wanted, variant=v, commit=ours["commit"]) for v in ("torch fused", "torch foreach")), key=lambda r: r["gbs"])
    cells = [f"{row['gbs']:,.0f}, {row['share']:.2f}" for row in (theirs, ours)]
    return Row("AdamW, 1.2 billion bf16 parameters: GB/s, share of a copy", (cells[0], cells[1]), int(ours["gbs"] > theirs["gbs"]))


def norm_row(lines: list[str]) -> Row:
    """The backward of RMSNorm: PyTorch's, and the best of our configurations, with the share of a copy of as many bytes."""
    start = r"^rms_norm\s+bwd \(16384, 4096\)\s+"
    theirs = the_one(lines, start + r"torch\s.*\s(\d+) GB/s\s+share ([\d.]+)", NORMS)
    ours = [m for m in (re.search(start + r"\(.*\)\s.*\s(\d+) GB/s\s+share ([\d.]+)", line) for line in lines) if m]
    if not ours:
        raise MissingResultError(f"{NORMS}: no configuration of rms_norm bwd (16384, 4096)")
    best = max(ours, key=lambda match: int(match[1]))
    shares = [Decimal(match[2]).quantize(Decimal("0.01"), ROUND_HALF_UP) for match in (theirs, best)]
    cells = [f"{int(match[1]):,}, {share}" for match, share in zip((theirs, best), shares, strict=True)]
    better = int(int(best[1]) > int(theirs[1]))
    return Row("rms_norm backward [16384, 4096] bf16: GB/s, share of a copy", (cells[0], cells[1]), better)


def attention_row(lines: list[str]) -> Row:
    """The forward of causal attention: the best that PyTorch has, and our own kernel."""
    start = r"^B1 S16384 H32/8 D128 causal\s+"
    theirs = [m for m in (re.search(start + r"(cudnn|flash|efficient) fwd\s.*\s([\d.]+) TFLOP/s", line) for line in lines) if m]
    if not theirs:
        raise MissingResultError(f"{ATTENTION}: none of PyTorch's own ran B1 S16384 forward")
    best = max(theirs, key=lambda match: float(match[2]))
    ours = float(the_one(lines, start + r"BEST fwd\s+([\d.]+) TFLOP/s", ATTENTION)[1])
    name = {"cudnn": "cuDNN", "flash": "Flash"}.get(best[1], best[1])
    better = int(ours > float(best[2]))
    chosen = ", which we therefore choose" if not better else ""
    figure = f"{float(best[2]):.0f} ({name}{chosen})"
    return Row("attention forward, 16k causal, D 128: TFLOP/s", (figure, f"{ours:.0f} (our own kernel)"), better)


def floor_words(rows: list[dict[str, Any]]) -> str:
    """How near whole steps are to what they are made of, run in a row at the clocks that the device holds."""
    told = []
    for model in MODELS[:2]:
        found = last(rows, benchmark="floor", model=model.name)
        best = max(found["held_shares"].values())
        told.append(
            f"{model.name} {best:.2f} ({found['floor_ms']:.1f} ms alone, {found['held_ms']:.1f} held; {found['commit'].split()[0]})"
        )
    return f"The same products, attention and bytes in a row, under the power cap, over a step's time: {', '.join(told)}. "


def source(lines: list[str], where: str) -> str:
    """`tools/gpu/norm_sweep.py` (b366028), as a sweep's first line has it."""
    found = the_one(lines[:1], r"commit (\w+); .*python3? (tools/gpu/\w+\.py)", where)
    return f"`{found[2]}` ({found[1]})"


def table(read: Callable[[str], list[str]] = lambda name: (RESULTS / name).read_text().splitlines()) -> str:
    """What stands between the markers; `read` gives a result file's lines."""
    rows = [json.loads(line) for line in read(STEPS) if line]
    norms, attention = read(NORMS), read(ATTENTION)
    shown = [row for model in MODELS for row in step_rows(rows, model)]
    shown += [adamw_row(rows), norm_row(norms), attention_row(attention)]
    ran, dates = [], set()
    for model in MODELS:
        facts = together(rows, model.name, [variant for variant, _ in model.variants])[1]
        dates.add(facts["date"])
        size = f"{facts['batch']} x {facts['seq']} tokens"
        names = ",".join(["plain", *(variant for variant, _ in model.variants)])
        ran.append(f"`--model {model.name} --variants {names}` ({size}, {model.words}; {facts['commit'].split()[0]})")
    facts = together(rows, MODELS[0].name, [variant for variant, _ in MODELS[0].variants])[1]
    live = f"One {facts['device']}, torch {facts['torch'].split('+')[0]}, Triton {facts['triton']}, {' and '.join(sorted(dates))}."
    head = f"{live} Whole steps, interleaved in one run of `python benchmarks/steps.py`: " + "; ".join(ran) + "."
    command = last(rows, benchmark="optimizer", model="llama1b", kind="bf16", variant="ours")["command"].split(" --results")[0]
    foot = (
        f"{floor_words(rows)}AdamW: `{command}`. "
        f"The last two rows come from {source(norms, NORMS)} and {source(attention, ATTENTION)}. "
        "All rows, losses too, are in [benchmarks/results](benchmarks/results)."
    )
    return "\n".join([head, "", "| | plain PyTorch | ops-math |", "|---|---|---|", *(row.markdown() for row in shown), "", foot])


def refreshed(text: str, content: str) -> str:
    """The text with what stands between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise MissingResultError(f"README.md needs one {BEGIN} and, after it, one {END}")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{content}\n{END}{text.split(END)[1]}"


def main() -> None:
    """Print the table, or write it into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write it between the markers of README.md")
    if parser.parse_args().update:
        readme = ROOT / "README.md"
        readme.write_text(refreshed(readme.read_text(), table()))
    else:
        print(table())


if __name__ == "__main__":
    main()
