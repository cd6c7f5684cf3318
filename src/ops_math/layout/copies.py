"""Every copy that blocks and operators still make for the sake of a layout, or blocks of a dtype, with its bytes and its reason."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Copy(NamedTuple):
    """Copies of one kind: how often, and bytes written (as many were read, more where the dtype was wider)."""

    what: str
    reason: str
    calls: int
    bytes: int


class Report(NamedTuple):
    """The copies since the start or the last `reset`, the largest first."""

    rows: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        """Bytes written by all of them."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no copy was made for a layout or a dtype"
        head = f"{self.bytes / 2**20:.1f} MiB in {sum(row.calls for row in self.rows)} copies"
        return "\n".join([head, *(f"{row.bytes / 2**20:12.1f} MiB {row.calls:8} x  {row.what}: {row.reason}" for row in self.rows)])


_SEEN: dict[tuple[str, str], list[int]] = {}


def copied(t: torch.Tensor, what: str, reason: str) -> torch.Tensor:
    """Note that `t` is a fresh copy, and return it. Code that `torch.compile` traces runs once for many calls, so it notes nothing."""
    if not torch.compiler.is_compiling():
        found = _SEEN.setdefault((what, reason), [0, 0])
        found[0] += 1
        found[1] += t.numel() * t.element_size()
    return t


def dense(t: torch.Tensor, what: str, reason: str) -> torch.Tensor:
    """`t.contiguous()`, noted where it copies."""
    return t if t.is_contiguous() else copied(t.contiguous(), what, reason)


def report() -> Report:
    """What was copied so far, the largest first.

    Copies of blocks under `torch.compile` are part of the compiled graph, which may fuse them away, and are not here; those of operators
    are, since a graph calls operators as they are.
    """
    rows = [Copy(what, reason, calls, size) for (what, reason), (calls, size) in _SEEN.items()]
    return Report(tuple(sorted(rows, key=lambda row: row.bytes, reverse=True)))


def reset() -> None:
    """Forget what was copied so far."""
    _SEEN.clear()
