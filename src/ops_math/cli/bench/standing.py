"""How our rows stand among the others: where a rival is faster, and which of ours is worst."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ops_math.cli.bench.rivals import OURS
from ops_math.schedule.timing import TIE

Row = dict[str, Any]
STEP_NAMES = {"plain": "torch", "ops": OURS}
RIVALS_OF_STEP = ("plain", "compile", "liger")


def where(row: Row) -> str:
    """The call and phase of a row: `rms_norm 16384x4096 bf16 fwd`, or the model of a step."""
    if row["benchmark"] == "step":
        return f"{row['model']} {row['batch']} x {row['seq']}"
    return f"{row['op']} {row['shape']} {row['dtype']} {row['phase']}"


def own(row: Row) -> bool:
    """Whether the subject is ours."""
    if row["benchmark"] == "step":
        return row["variant"].split("+")[0] not in RIVALS_OF_STEP
    return bool(row["variant"].startswith(OURS))


def name(row: Row) -> str:
    """The subject's name: `ops_math packed graphed`."""
    words = str(STEP_NAMES.get(row["variant"], row["variant"])).replace("+", " ")
    return f"{OURS} {words}" if row["benchmark"] == "step" and own(row) and words != OURS else words


def ratio(row: Row) -> float | None:
    """Time over plain PyTorch's, in the same run."""
    found = row.get("ratio_to_torch", row.get("ratio_to_plain"))
    return None if found is None else float(found)


def time_of(row: Row) -> float | None:
    """What subjects of one call are compared by: kernel time where there is one, else the ratio to plain PyTorch."""
    return row.get("kernel_us") or row.get("step_ms") or ratio(row)


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by call and phase."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["benchmark"] in ("operator", "step"):
            found.setdefault(where(row), []).append(row)
    return found


def lost(rows: Iterable[Row]) -> list[str]:
    """Where a rival with right numbers is faster than ours, beyond a tie and the noise: `rms_norm ...: liger takes 0.93 of our time`."""
    words = []
    for place, group in groups(rows).items():
        ours = next((row for row in group if row["variant"] in (OURS, "ops")), None)
        times = [(time_of(row), row) for row in group if not own(row) and not row.get("wrong")]
        known = [(time, row) for time, row in times if time is not None]
        mine = None if ours is None else time_of(ours)
        if ours is None or mine is None or not known:
            continue
        best, rival = min(known, key=lambda pair: pair[0])
        if best < mine * (1 - max(TIE, ours.get("noise", 0.0), rival.get("noise", 0.0))):
            words.append(f"{place}: {name(rival)} takes {best / mine:.2f} of our time")
    return words


def worst(rows: Iterable[Row]) -> Row | None:
    """Our own row with the smallest share of the ceiling; where there are no shares, that with the largest ratio to plain PyTorch."""
    ours = [row for row in rows if row.get("variant") == OURS]
    shared = [row for row in ours if "share" in row]
    if shared:
        return min(shared, key=lambda row: float(row["share"]))
    known = [row for row in ours if ratio(row) is not None]
    return max(known, key=lambda row: ratio(row) or 0.0) if known else None


def worst_words(rows: Iterable[Row]) -> str:
    """The worst row as a sentence."""
    row = worst(rows)
    if row is None:
        return "nothing of ours was measured"
    if "share" in row:
        return f"worst share of the ceiling: {row['share']:.2f} ({where(row)})"
    return f"worst ratio to plain PyTorch: {ratio(row):.2f} ({where(row)})"
