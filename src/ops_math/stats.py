"""What ran: per operator and implementation the calls, the bytes, the reason of the choice, and every fallback."""

from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One line of `om.stats()`. `bytes` [B] is the least traffic of all its calls; `fallback` says why the device's own
    implementation did not run; `problem` is the first problem it ran. Of a block (phase `block`) only calls that ran otherwise than they
    might are counted: `module`, as it is, or `fused, unpacked`, after packed weights were moved apart."""

    op: str
    phase: str
    implementation: str
    calls: int
    bytes: int
    reason: str
    rejected: tuple[tuple[str, str], ...]
    fallback: str
    problem: str


class Stats(NamedTuple):
    """A snapshot of the counters."""

    rows: tuple[Row, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Rows as dictionaries."""
        return [row._asdict() for row in self.rows]

    def __str__(self) -> str:
        if not self.rows:
            return "no operator of ops_math has run"
        head = ("operator", "phase", "implementation", "calls", "MiB", "why")
        cells = [head] + [
            (r.op, r.phase, r.implementation, str(r.calls), f"{r.bytes / 2**20:.1f}", r.fallback or r.reason) for r in merged(self.rows)
        ]
        widths = [max(len(c[i]) for c in cells) for i in range(5)]
        lines = ["  ".join(c[i].ljust(widths[i]) for i in range(5)) + "  " + c[5] for c in cells]
        return "\n".join(lines)


def merged(rows: tuple[Row, ...]) -> list[Row]:
    """Rows of one operator, phase, implementation and reason added up over problems."""
    total: dict[tuple[str, ...], Row] = {}
    for r in rows:
        key = (r.op, r.phase, r.implementation, r.fallback or r.reason)
        old = total.get(key)
        total[key] = r if old is None else old._replace(calls=old.calls + r.calls, bytes=old.bytes + r.bytes, problem=old.problem)
    return sorted(total.values())


class Counter:
    """Counts the calls of one implementation; the hot path adds to `calls` and `bytes`."""

    __slots__ = ("bytes", "calls", "fallback", "implementation", "op", "phase", "problem", "reason", "rejected")

    def __init__(
        self, op: str, phase: str, implementation: str, reason: str, rejected: tuple[tuple[str, str], ...], fallback: str, problem: str
    ) -> None:
        self.op, self.phase, self.implementation = op, phase, implementation
        self.reason, self.rejected, self.fallback, self.problem = reason, rejected, fallback, problem
        self.calls = self.bytes = 0

    def row(self) -> Row:
        """The counter as a row."""
        return Row(
            self.op, self.phase, self.implementation, self.calls, self.bytes, self.reason, self.rejected, self.fallback, self.problem
        )


_COUNTERS: dict[tuple[str, ...], Counter] = {}


def counter(
    op: str,
    phase: str,
    implementation: str,
    reason: str = "",
    rejected: tuple[tuple[str, str], ...] = (),
    fallback: str = "",
    problem: str = "",
) -> Counter:
    """The counter for an implementation and a reason, made when new. `problem` is the first problem it was made for."""
    key = (op, phase, implementation, reason, fallback)
    found = _COUNTERS.get(key)
    if found is None:
        found = _COUNTERS[key] = Counter(op, phase, implementation, reason, rejected, fallback, problem)
    return found


def note(op: str, implementation: str, reason: str) -> None:
    """Count one call that did not reach an operator, e.g. a block that ran its module as it is, with the reason."""
    counter(op, "block", implementation, reason="", fallback=reason).calls += 1


def stats() -> Stats:
    """What ran since the start or the last `reset_stats()`: calls, implementation, fallbacks with reasons, bytes."""
    return Stats(tuple(sorted(c.row() for c in _COUNTERS.values() if c.calls)))


def reset_stats() -> None:
    """Set every counter to zero."""
    for c in _COUNTERS.values():
        c.calls = c.bytes = 0
