"""Files that a command will write: asked for before it works for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ops_math import checks


def folder_of(command: str, option: str, path: Path) -> None:
    """The file's folder is there, made where it was missing.

    Raises: UnsupportedError where it cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        checks.refuse(f"{command}: {option}", f"the folder {path.parent} cannot be made ({error.strerror})", "Name a path elsewhere.")
    if not os.access(path.parent, os.W_OK):
        checks.refuse(f"{command}: {option}", f"the folder {path.parent} may not be written", "Name a path elsewhere.")


def write_all(writes: Iterable[Callable[[], Any]]) -> None:
    """Write every file, also after one that cannot be; to be called when what was found is already on the screen.

    Raises: OSError with all that went wrong, in one sentence.
    """
    failed = []
    for write in writes:
        try:
            write()
        except OSError as error:
            failed.append(f"{error.filename} could not be written: {error.strerror}" if error.filename else str(error))
    if failed:
        raise OSError("; ".join(failed))


def writable(command: str, option: str, path: Path | None) -> None:
    """The file, where one is named, can be written when the work is done.

    Raises: ArgumentError for a folder, a folder that does not exist, and one that may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        checks.fail(command, option, "a file", f"{path}, which is a folder", "Name a file in it.")
    if not path.parent.is_dir():
        checks.fail(command, option, "a file in a folder that exists", str(path), f"Make {path.parent} first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        checks.fail(command, option, "a file that may be written", str(path), "Name another.")
