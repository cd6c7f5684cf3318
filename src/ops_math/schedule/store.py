"""The file of measurements: readable, safe for many processes, limited in size, and never the reason why a run fails.

A file holds what belongs to one `Identity`. Writers hold a lock, read what is there, merge, and replace the file in one step, so a reader
sees an old file or a new one. What cannot be understood is set aside under the same lock, with a warning.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ops_math import files, settings
from ops_math.schedule.identity import Identity
from ops_math.schedule.record import Ceilings, Measurement, counts, from_row, to_row

FORMAT = 1
MOST_MEASUREMENTS = 4096  # in one file; the oldest go first
MOST_BYTES = 8 << 20
MOST_FILES = 64  # in the folder: other devices, other versions, and what was set aside
LOCK_SECONDS = 20.0


class ScheduleWarning(UserWarning):
    """Something about measurements that a user should know, and that stops nothing."""


class Contents(NamedTuple):
    """What a file holds."""

    measurements: dict[tuple[str, ...], Measurement]
    ceilings: Ceilings | None


NONE = Contents({}, None)


def warn(words: str) -> None:
    """Say it once a place, as Python's warnings do."""
    warnings.warn(words, ScheduleWarning, stacklevel=3)


def folder() -> Path | None:
    """Where measurements are kept: `OPS_MATH_CACHE`, else the user's cache folder; None, with a warning, where neither is known."""
    asked = settings.cache_folder()
    if asked is not None:
        return Path(asked)
    try:
        import platformdirs
    except ImportError:
        warn("schedule: platformdirs is not installed and OPS_MATH_CACHE is not set, so measurements last for this process only.")
        return None
    return Path(platformdirs.user_cache_dir("ops-math"))


def document(identity: Identity, contents: Contents) -> dict[str, Any]:
    """The contents as plain data, which JSON and `torch.save` both take."""
    rows = sorted(contents.measurements.values(), key=lambda m: m.key)
    ceilings = None if contents.ceilings is None else contents.ceilings._asdict()
    return {
        "format": FORMAT,
        "identity": identity._asdict(),
        "ceilings": ceilings,
        "measurements": [to_row(m) for m in rows],
    }


def read_document(found: Any, identity: Identity) -> tuple[Contents, str]:
    """The contents of a document, as far as they can be used here, and what is wrong with the rest (empty where all is right)."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format", "none") if isinstance(found, dict) else "none"
        return NONE, f"its format is {given!r}, and this version reads {FORMAT}"
    try:
        theirs = Identity(**found["identity"])
    except (KeyError, TypeError):
        return NONE, "it does not say which device and versions it was measured on"
    if theirs != identity:
        return NONE, f"it was measured elsewhere: {identity.difference(theirs)}"
    wrong: list[str] = []
    measurements: dict[tuple[str, ...], Measurement] = {}
    rows = found.get("measurements")
    for place, row in enumerate(rows if isinstance(rows, list) else [rows]):
        try:
            one = from_row(row)
        except ValueError as error:
            wrong.append(f"measurement {place}: {error}")
        else:
            measurements[one.key] = one
    ceilings = _ceilings(found.get("ceilings"), wrong)
    return Contents(measurements, ceilings), "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _ceilings(found: Any, wrong: list[str]) -> Ceilings | None:
    if found is None:
        return None
    numbers = found.values() if isinstance(found, dict) and set(found) == set(Ceilings._fields) else [None]
    if all(map(counts, numbers)) and found["bandwidth_gbs"]:
        return Ceilings(**found)
    wrong.append("the ceilings are not finite numbers")
    return None


def read(path: Path, identity: Identity) -> Contents:
    """What a file holds for this device; a file that cannot be used, or not in whole, is set aside with a warning.

    It is looked at again under the lock before that: what another process has put right meanwhile stays.
    """
    contents, wrong = _look(path, identity)
    if not wrong:
        return contents
    try:
        with _locked(path):
            return _usable(path, identity)
    except (ImportError, OSError) as error:
        _warn_of(path, contents, wrong, f"It is left as it is ({error}).")
        return contents


def _look(path: Path, identity: Identity) -> tuple[Contents, str]:
    """What can be used of a file, and what is wrong with it (empty where nothing is)."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return NONE, ""
    except (OSError, UnicodeDecodeError) as error:
        return NONE, f"it cannot be read ({error})"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return NONE, f"it is not JSON ({error})"
    return read_document(found, identity)


def _usable(path: Path, identity: Identity) -> Contents:
    """What a file holds, by one who holds its lock: a file that is wrong is moved aside, what is good in it stays in its place."""
    contents, wrong = _look(path, identity)
    if not wrong:
        return contents
    kept = next(p for p in (path.with_name(f"{path.stem}.set-aside-{n}.json") for n in range(1, 10**6)) if not p.exists())
    try:
        path.rename(kept)  # a copy would need room
        where = f"A copy is at {kept}."
        if contents.measurements:
            replace(path, document(identity, contents))
    except OSError as error:
        where = (
            f"It is at {kept}, and what is good in it could not be put back ({error.strerror or error})."
            if kept.exists()
            else f"It stays ({error})."
        )
    _warn_of(path, contents, wrong, where)
    return contents


def _warn_of(path: Path, contents: Contents, wrong: str, where: str) -> None:
    used = f"{len(contents.measurements)} of its measurements are used."
    rest = used if contents.measurements else "Problems are predicted until measured."
    warn(f"schedule: the record {path} was set aside: {wrong}. {where} {rest}")


def _locked(path: Path) -> Any:
    """The lock of a file. Who may write the folder may take it: a cache can be shared.

    Raises: ImportError without filelock; OSError where it cannot be made, or (a Timeout) another holds it for too long.
    """
    from filelock import FileLock

    return FileLock(str(path) + ".lock", timeout=LOCK_SECONDS, mode=path.parent.stat().st_mode & 0o666)


def write(path: Path, identity: Identity, found: Iterable[Measurement], ceilings: Ceilings | None) -> Contents:
    """Merge measurements into a file and return all that it then holds; newer ones replace older ones of the same key.

    A folder that cannot be written, is full, or stays locked costs a warning; what was found is returned all the same.
    """
    new = Contents({m.key: m for m in found}, ceilings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            merged = merge(_usable(path, identity), new)
            replace(path, document(identity, merged))
            _limit_files(path.parent)
        return merged
    except ImportError:
        warn("schedule: filelock is not installed, so measurements last for this process only.")
        return new
    except OSError as error:
        warn(f"schedule: measurements could not be kept in {path} ({error.strerror or error}). They last for this process only.")
        return merge(NONE, new)


def merge(first: Contents, second: Contents) -> Contents:
    """Both together; the newer of two with one key, and at most `MOST_MEASUREMENTS` and `MOST_BYTES`, the newest kept."""
    together = dict(first.measurements)
    for key, one in second.measurements.items():
        if key not in together or one.when >= together[key].when:
            together[key] = one
    newest = sorted(together.values(), key=lambda m: (m.when, m.key), reverse=True)[:MOST_MEASUREMENTS]
    size, kept = 0, {}
    for one in newest:
        size += len(json.dumps(to_row(one))) + 4
        if size > MOST_BYTES:
            break
        kept[one.key] = one
    return Contents(kept, second.ceilings or first.ceilings)


def replace(path: Path, found: dict[str, Any]) -> None:
    """Write a document so that others see the old file or the new one: a file beside it, flushed, takes its place."""
    rows = ",\n  ".join(json.dumps(row, sort_keys=True) for row in found["measurements"])
    head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items() if k != "measurements")
    text = "{" + head + ',\n "measurements": [' + (f"\n  {rows}\n " if rows else "") + "]}\n"
    files.replace(path, text, keep_mode=False)  # a shared folder is shared: files of before 0.1 were their writer's alone


def _limit_files(place: Path) -> None:
    """Drop the oldest records of the folder beyond `MOST_FILES`: versions and devices that are gone."""
    with os.scandir(place) as found:
        files = [
            (entry.stat().st_mtime, entry.path) for entry in found if re.fullmatch(r"schedule-.*\.json", entry.name) and entry.is_file()
        ]
    for _, old in sorted(files, reverse=True)[MOST_FILES:]:
        Path(old).unlink(missing_ok=True)
