"""What `verify` found: findings in words, margins, and the faults that were planted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ops_math import checks

STATISTICS = {
    "max": "largest element",
    "l2": "all elements",
    "gain": "scale",
    "rows": "scale of each row",
    "columns": "scale of each column",
    "row": "worst row",
    "column": "worst column",
    "size": "size of what cancels",
}


class Finding(NamedTuple):
    """One thing that is wrong. `output` is an output or gradient, `cases` where it was seen, `smallest` the smallest input that shows it,
    `snippet` Python that shows it again."""

    check: str
    output: str
    words: str
    cases: tuple[str, ...]
    smallest: str = ""
    snippet: str = ""

    def __str__(self) -> str:
        seen = f"seen in {len(self.cases)} case{'s' if len(self.cases) > 1 else ''}, first in: {self.cases[0]}"
        lines = [f"WRONG  {self.check}: {self.output + ' ' if self.output else ''}{self.words}", f"       {seen}"]
        if self.smallest:
            lines.append(f"       smallest input that fails: {self.smallest}")
        if self.snippet:
            lines += ["       to see it:", *("           " + line for line in self.snippet.splitlines())]
        return "\n".join(lines)


class Margin(NamedTuple):
    """The largest error of one statistic as a share of its limit (1 would be at it), and where it was."""

    share: float
    where: str


class Report(NamedTuple):
    """The proof of one implementation, or what it lacks.

    `tried` are checks with the number of times they were made; `margins` are by statistic; `caught` are planted faults with the case that
    caught them, `alive` those that no case caught; `refused` are calls that the function refuses in words; `skipped` are those that could
    not be judged, with the reason.
    """

    name: str
    implementation: str
    device: str
    dtypes: tuple[str, ...]
    tried: tuple[tuple[str, int], ...]
    margins: tuple[tuple[str, Margin], ...]
    findings: tuple[Finding, ...]
    caught: tuple[tuple[str, str], ...]
    alive: tuple[str, ...]
    refused: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def judged(self) -> bool:
        """Whether there was anything to judge."""
        return any(count for _, count in self.tried) or bool(self.findings)

    @property
    def ok(self) -> bool:
        """Whether something was judged, nothing is wrong, and no planted fault lived."""
        return self.judged and not self.findings and not self.alive

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            **self._asdict(),
            "ok": self.ok,
            "tried": dict(self.tried),
            "margins": {k: m._asdict() for k, m in self.margins},
            "findings": [f._asdict() for f in self.findings],
            "caught": dict(self.caught),
        }

    def require(self) -> None:
        """Raise where something is wrong.

        Raises: VerificationError with the report.
        """
        if not self.ok:
            checks.unproved(self.name, str(self))

    def __str__(self) -> str:
        who = self.name + (f" ({self.implementation})" if self.implementation else "")
        total = sum(count for _, count in self.tried)
        if not self.judged:
            return f"{who} on {self.device} in {', '.join(self.dtypes)}: nothing could be judged" + "".join(
                f"\nskipped {t}" for t in gathered(self.skipped)
            )
        lines = [f"{who} on {self.device} in {', '.join(self.dtypes)}: {'right' if self.ok else 'WRONG'} ({total} checks)"]
        lines.append("tried   " + ", ".join(f"{name} {count}x" for name, count in self.tried))
        lines += [f"margin  {m.share:6.2f} of its limit  {STATISTICS[k]}: {m.where}" for k, m in self.margins]
        if self.caught or self.alive:
            lines.append(f"faults  {len(self.caught)} of {len(self.caught) + len(self.alive)} planted faults caught")
        lines += [f"ALIVE   {name}: no case shows this fault; give inputs on which it matters" for name in self.alive]
        lines += [str(f) for f in self.findings]
        lines += [f"refuses {text}" for text in gathered(self.refused)]
        lines += [f"skipped {text}" for text in gathered(self.skipped)]
        return "\n".join(lines)


def gathered(texts: Iterable[str]) -> list[str]:
    """Lines "case: reason", each reason once, with the number of its cases and the first of them."""
    cases: dict[str, list[str]] = {}
    for text in texts:
        case, _, reason = text.partition(": ")
        cases.setdefault(reason, []).append(case)
    return [f"{own[0] if len(own) == 1 else f'{len(own)} cases, the first {own[0]}'}: {reason}" for reason, own in cases.items()]


def worst(margins: dict[str, Margin], found: Iterable[tuple[str, float]], where: str) -> None:
    """Keep the largest share of each statistic; NaN counts as endless."""
    for statistic, share in found:
        share = math.inf if share != share else share
        if statistic in STATISTICS and (statistic not in margins or share > margins[statistic].share):
            margins[statistic] = Margin(share, where)


def in_order(margins: Mapping[str, Margin]) -> tuple[tuple[str, Margin], ...]:
    """Margins in the order of `STATISTICS`."""
    return tuple((k, margins[k]) for k in STATISTICS if k in margins)
