"""What was measured: times of implementations on problems, by device, keyed so that a wrong match is impossible."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Times [us] of implementations at one point. It holds for problems of this operator, phase, dtype and device name whose size
    [B, least traffic] is within `size_low` and `size_high`."""

    op: str
    phase: str
    device: str
    dtype: str
    size_low: int
    size_high: int
    times_us: dict[str, float]
    source: str


class Record(NamedTuple):
    """A set of measurements."""

    entries: tuple[Entry, ...]

    def lookup(self, op: str, phase: str, device: str, dtype: str, size: int) -> Entry | None:
        """The first entry that covers the problem."""
        for e in self.entries:
            if e.op == op and e.phase == phase and e.device == device and e.dtype == dtype and e.size_low <= size <= e.size_high:
                return e
        return None


EMPTY = Record(())


def parse(rows: list[dict[str, Any]]) -> Record:
    """A record from rows as in `measured.json`."""
    return Record(tuple(Entry(**row) for row in rows))


@lru_cache(maxsize=1)
def load_shipped() -> Record:
    """The measurements that come with the library, losses included."""
    return parse(json.loads(resources.files("ops_math.schedule").joinpath("measured.json").read_text()))
