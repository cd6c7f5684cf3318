"""What a long command is doing, on stderr: a line that changes in a terminal, lines one after the other elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Tell = Callable[[str], None]
SELDOM_S = 10.0  # for commands that have hundreds of things to say [s]


@contextmanager
def telling(console: Console) -> Iterator[Tell]:
    """A function that is told in a few words what is being done now."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield lines(console)


def lines(console: Console, every_s: float = 0.0) -> Tell:
    """A function that prints a line where its words are new and the last line is `every_s` ago; in a terminal it is silent, since a bar
    or a status says it."""
    said, at = "", 0.0

    def line(words: str) -> None:
        nonlocal said, at
        now = time.monotonic()
        if not console.is_terminal and words != said and (not said or now - at >= every_s):
            said, at = words, now
            console.print(words, markup=False, highlight=False, soft_wrap=True)
            console.file.flush()  # a pipe keeps what it is not made to give

    return line
