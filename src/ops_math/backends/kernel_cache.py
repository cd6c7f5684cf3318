"""The folder in which Triton keeps compiled kernels: how large it is, and a cap on it, which Triton itself does not have."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import NamedTuple

from ops_math import settings

LEAST_AGE_S = 24 * 3600.0  # a younger kernel may be in use by a process that is starting


class Trimmed(NamedTuple):
    """Bytes [B] before and after, and how many compiled kernels went."""

    before: int
    after: int
    removed: int


def folder() -> Path:
    """Where Triton keeps compiled kernels."""
    variables = settings.environment(("TRITON_CACHE_DIR", "TRITON_HOME"))
    if "TRITON_CACHE_DIR" in variables:
        return Path(variables["TRITON_CACHE_DIR"])
    return Path(variables.get("TRITON_HOME", Path.home())) / ".triton" / "cache"


def trim(limit_bytes: int, now: float | None = None) -> Trimmed:
    """Remove the kernels that were used longest ago until the folder is within `limit_bytes` [B]; none that is younger than a day.

    Every entry is a folder that Triton makes anew when it needs it. An entry that cannot be removed stays.
    """
    now = time.time() if now is None else now
    entries = []
    place = folder()
    for entry in place.iterdir() if place.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            facts = [file.stat() for file in entry.rglob("*") if file.is_file()]
            entries.append((max((max(f.st_atime, f.st_mtime) for f in facts), default=0.0), sum(f.st_size for f in facts), entry))
    before = after = sum(size for _, size, _ in entries)
    removed = 0
    for used, size, entry in sorted(entries):
        if after <= limit_bytes or now - used < LEAST_AGE_S:
            break
        shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():
            after, removed = after - size, removed + 1
    return Trimmed(before, after, removed)
