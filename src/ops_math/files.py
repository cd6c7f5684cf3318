"""Text files that are either as they were or as they should be: a full disk or a second writer leaves no half of one."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace(path: str | Path, text: str, *, keep_mode: bool = True) -> None:
    """Write a file in one step: others see what was there before, or all of `text` (UTF-8).

    Devices and pipes are written as they are, and so is a file that is there in a folder that may not be written.

    Args:
        path: the file; through a symbolic link the file it leads to.
        text: all that it will hold.
        keep_mode: permissions of a file that is there stay; otherwise, and for a new one, they are those of any new file (the umask's).

    Raises:
        OSError: it cannot be written, naming the file; what was there before is as it was.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not (place.is_file() and os.access(place.parent, os.W_OK)):
        with _named(path), place.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    temporary = place.with_name(f".{place.name}-{secrets.token_hex(8)}.part")
    try:
        with _named(path), open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if keep_mode and place.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
            os.fsync(file.fileno())
        with _named(path):
            temporary.replace(place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append(path: str | Path, text: str) -> None:
    """Add text (UTF-8) to the end of a file, all or nothing.

    Raises:
        OSError: it cannot be written, naming the file; what was there before is as it was.
    """
    with _named(path), Path(path).open("ab", buffering=0) as file:
        end, left = os.fstat(file.fileno()), memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
            if stat.S_ISREG(end.st_mode):
                os.fsync(file.fileno())
        except OSError:
            if stat.S_ISREG(end.st_mode):
                os.ftruncate(file.fileno(), end.st_size)
            raise


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Errors of a write carry no name of their own."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
