"""What ops-math ran and why, in the form that the report shows: the one place that knows the library's counters."""

from __future__ import annotations

from typing import Any

import ops_math


def forget() -> None:
    """Start counting anew."""
    ops_math.reset_stats()


def used() -> list[dict[str, Any]]:
    """One dictionary for each operator, phase and implementation that ran.

    Keys: `op`, `phase`, `implementation`, `calls`, `bytes` [B], `reason`, `rejected` (pairs of implementation and reason),
    `fallback` (why the device's own implementation did not run, or ""), `problem` (the first it was chosen for).
    """
    return [row | {"rejected": [list(pair) for pair in row["rejected"]]} for row in ops_math.stats().to_json()]
