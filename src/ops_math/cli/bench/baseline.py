"""Named baselines: what was measured on one device, kept in a readable file, and held against a later run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from ops_math import checks, files
from ops_math.cli.bench.spread import Comparison, compare
from ops_math.schedule import store

FORMAT = 1
LARGEST = 1e12  # of ratios; what is further from one was written by hand, and its exponential may not be a number
VERSIONS = ("torch", "triton", "python")
FEWEST_SESSIONS = 3  # fewer do not show how much a row moves from session to session


class Held(NamedTuple):
    """A row held against its baseline. `before` and `now` say where each comes from."""

    name: str
    comparison: Comparison
    before: str
    now: str


class Verdict(NamedTuple):
    """What `--check` found.

    Attributes:
        held: every row that both runs have.
        new: rows that the baseline does not have.
        gone: rows of the baseline, of operators that were measured, that this run does not have.
        notes: how the two runs' surroundings differ, in words.
    """

    held: tuple[Held, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def regressed(self) -> tuple[Held, ...]:
        """The rows that are slower beyond the noise."""
        return tuple(one for one in self.held if one.comparison.regressed)

    @property
    def failed(self) -> bool:
        """Whether the command must end with exit code 1: a row is slower, is no longer measured, or there was none to hold."""
        return bool(self.regressed or self.gone or not self.held)


def path_of(name: str, device: str) -> Path:
    """Where a baseline is: the name itself where it is a path, else in the cache folder, a file a device."""
    if name.endswith(".json") or os.sep in name:
        return Path(name)
    folder = store.folder()
    if folder is None:
        checks.refuse("bench: the baseline", "no cache folder is known", "Give a path that ends in .json, or set OPS_MATH_CACHE")
    slug = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / "bench" / f"{name}-{slug}.json"


def read(path: Path, option: str = "--check") -> dict[str, Any]:
    """A baseline's rows by name: each with `metrics` (ratios by session, by metric) and the facts of its run.

    Raises: ArgumentError, naming the option that asked for it, for a file that is none.
    """
    save = "Save it anew, with --save NAME." if option == "--check" else "Move it away, or save under another name."
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        checks.fail("bench", "--check", "a baseline that was saved on this device", f"none at {path}", "Save one first, with --save NAME.")
    except (OSError, ValueError, RecursionError) as error:
        checks.fail("bench", option, "a baseline that can be read", f"{path}, {error}", save)
    rows = found.get("rows") if isinstance(found, dict) and found.get("format") == FORMAT else None
    if not isinstance(rows, dict) or not all(_is_row(row) for row in rows.values()):
        checks.fail("bench", option, f"a baseline of format {FORMAT}", f"{path}, which is none", save)
    return rows


def _is_row(row: Any) -> bool:
    metrics = row.get("metrics") if isinstance(row, dict) else None
    if not isinstance(metrics, dict) or not isinstance(row.get("facts"), dict):
        return False
    if not isinstance(row.get("op"), str) or not isinstance(row.get("call"), str):
        return False
    return bool(metrics) and all(isinstance(runs, list) and runs and all(map(_is_session, runs)) for runs in metrics.values())


def _is_session(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(_is_ratio(number) for number in found)


def _is_ratio(number: Any) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 1 / LARGEST < number < LARGEST


def write(path: Path, rows: dict[str, Any]) -> None:
    """Keep rows under their names; rows of other operators in the file stay. The file is replaced in one step."""
    kept = read(path, "--save") if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, json.dumps({"format": FORMAT, "rows": kept | rows}, indent=1) + "\n")


def hold(before: dict[str, Any], now: dict[str, Any]) -> Verdict:
    """Hold a run against a baseline, row by row and metric by metric."""
    held, notes = [], {}
    for name in now.keys() & before.keys():
        for metric in now[name]["metrics"].keys() & before[name]["metrics"].keys():
            facts = [row["facts"] for row in (before[name], now[name])]
            one, other = (f"{fact.get('commit')}, {fact.get('date')}" for fact in facts)
            held.append(Held(f"{name}: {metric}", compare(before[name]["metrics"][metric], now[name]["metrics"][metric]), one, other))
            for key in VERSIONS:
                if facts[0].get(key) != facts[1].get(key):
                    notes[key] = f"the baseline was measured with {key} {facts[0].get(key)}, this run with {facts[1].get(key)}"
    measured = {row["call"] for row in now.values()}
    gone = [name for name, row in before.items() if name not in now and row.get("call") in measured]
    return Verdict(tuple(sorted(held)), tuple(sorted(now.keys() - before.keys())), tuple(sorted(gone)), tuple(notes.values()))
