"""What a comparison found: as text, as JSON, and as one HTML file with the model as a tree coloured by error."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ops_math as om
from ops_nn.debug import casts
from ops_nn.debug.causes import Cause, first_given, likely_cause
from ops_nn.debug.compare import Comparison, Culprit, Row
from ops_nn.debug.figures import Figures
from ops_nn.debug.trace import FORWARD, INPUT, INPUT_GRADIENT, OUTPUT_GRADIENT, PARAMETER_GRADIENT, Key, replace
from ops_nn.debug.verdict import BITWISE, DIFFERENT, ROUNDING, Difference

FORMAT = 1
LOCKSTEP = "lockstep"  # how a report came about; the other way is "traces"
_SHOWN = 8
_OPERATOR = re.compile(r"([a-z_]+) \d+(\.\d+)*")  # how a trace names what a fused operator returned: `rms_norm 2.0`
_FORWARD, _BACKWARD = (FORWARD,), (INPUT_GRADIENT, PARAMETER_GRADIENT)


class Finding(NamedTuple):
    """A module whose error is its own.

    Attributes:
        key: module, call, direction and tensor.
        difference: how far B is from A there.
        given: the largest error of what the module was given.
        tied: modules that cannot be told from it, since they share the tensor.
        cause: the likely cause.
        tensors: what was seen at the call: direction and name, figures in A and in B.
    """

    key: Key
    difference: Difference
    given: float
    tied: tuple[str, ...]
    cause: Cause
    tensors: tuple[tuple[str, Figures | None, Figures | None], ...]

    @property
    def module(self) -> str:
        """The module's path, without wrappers; empty for the model."""
        return self.key.module

    @property
    def direction(self) -> str:
        """`forward`, `input gradient` or `parameter gradient`."""
        return self.key.direction

    def __str__(self) -> str:
        also = f" (or {', '.join(self.tied)}: they share the tensor; lockstep tells them apart)" if self.tied else ""
        about = "" if self.difference.exact else "about "
        sizes = f"relative error {about}{_number(self.difference.l2)} (largest element {_number(self.difference.max)})"
        limits = f"rounding explains {_number(self.difference.limit)}, its inputs differ by {_number(self.given)}"
        return f"{self.key}{also}\n    {sizes}; {limits}\n    likely cause: {self.cause}"


class Node(NamedTuple):
    """A module in the tree: its worst errors forward and backward, None where nothing was seen, and its verdict."""

    path: str
    kind: str
    forward: float | None
    backward: float | None
    verdict: str
    guilty: bool
    children: tuple[Any, ...]


class Report:
    """The result of `ConsistencyChecker.compare` and `.lockstep`.

    Attributes:
        verdict: `bitwise`, `within rounding` or `different`, of all that was compared.
        findings: modules whose error is their own, forward order first, then backward order.
        rows: every tensor that was compared, in the order of A.
        refusals: in lockstep, modules of B that cannot run on A's inputs, or whose dtype cannot hold A's results, with the reason.
        structure: how the models differ, the first first; notes: what is to be known of the observation.
        given: a difference of the batch, which explains all that follows.
        operators: for each fused operator that was seen (`observe="operators"`), PyTorch's functions that it stands for.
        dtypes: of A and of B, where most weights, or autocast, have another one in B; None where not.
        reproduce: how to reproduce the first finding.
        dumped: the file for `ops-math replay`, or None.
    """

    def __init__(self, comparison: Comparison, how: str, refusals: Sequence[str] = (), dtypes: tuple[str, str] | None = None) -> None:
        self.how, self.precision = how, comparison.precision
        self.rows: list[Row] = comparison.rows
        self.structure, self.given = comparison.structure, first_given(comparison)
        self.dtypes = casts.of_traces(comparison.a, comparison.b) if dtypes is None else dtypes
        self.migration = _migration(self.dtypes, how)
        self.findings = tuple(_finding(comparison, culprit) for culprit in comparison.culprits)
        self.versions = (comparison.a.versions, comparison.b.versions)
        self.notes = [f"{name}: {note}" for name, trace in (("A", comparison.a), ("B", comparison.b)) for note in trace.notes]
        self.missing = [f"{key} was seen in {'A' if who == 'B' else 'B'} only" for key, who in comparison.missing]
        self.counts = Counter(row.verdict for row in self.rows)
        self.verdict = next((v for v in (DIFFERENT, ROUNDING) if self.counts[v]), BITWISE)
        self.refusals = list(refusals)
        self.operators = _operators(comparison)
        if self.dtypes is not None and self.verdict == BITWISE:
            self.verdict = ROUNDING  # one model was cast
        if self.findings or self.refusals:
            self.verdict = DIFFERENT
        self.largest = max(self.rows, key=lambda row: row.difference.l2, default=None)
        self.tree = _tree(comparison, self.rows)
        self.reproduce = ""
        self.dumped: Path | None = None

    @property
    def first(self) -> Finding | None:
        """The first module, in the order of the forward and then of the backward, whose error is its own."""
        return self.findings[0] if self.findings else None

    def __str__(self) -> str:
        counts = ", ".join(f"{self.counts[v]} {v}" for v in (BITWISE, ROUNDING, DIFFERENT) if self.counts[v])
        lines = [f"{self.verdict}: {len(self.rows)} tensors compared ({self.how}), {counts}"]
        if self.given:
            lines.append(f"first of all: {self.given}")
        if self.migration:
            lines.append(f"dtypes: {self.migration}")
        if self.first is not None:
            lines.append(f"first: {self.first}")
            lines += [f"    {what:32} A {_figures(a)}\n    {'':32} B {_figures(b)}" for what, a, b in self.first.tensors[:_SHOWN]]
        elif self.verdict == DIFFERENT and not self.refusals:
            lines.append("no single module is to blame: every error is explained by what the module was given")
        lines += [f"then: {finding}" for finding in self.findings[1:_SHOWN]]
        if len(self.findings) > _SHOWN:
            lines.append(f"and {len(self.findings) - _SHOWN} more")
        if self.largest is not None and self.largest.difference.l2 > 0:
            lines.append(f"largest relative error: {_number(self.largest.difference.l2)} at {self.largest.key}")
        lines += [f"operator: {name} stands for {', '.join(functions)}" for name, functions in self.operators.items()]
        if self.reproduce:
            lines.append(f"to reproduce: {self.reproduce}")
        for title, words in (
            ("refused", self.refusals),
            ("models differ", self.structure),
            ("note", self.notes),
            ("missing", self.missing),
        ):
            lines += [f"{title}: {word}" for word in words[:_SHOWN]]
            if len(words) > _SHOWN:
                lines.append(f"{title}: and {len(words) - _SHOWN} more")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """As plain values, strict JSON: an infinite error is the word `inf`."""
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "how": self.how,
            "precision": self.precision,
            "counts": dict(self.counts),
            "given": None if self.given is None else self.given._asdict(),
            "dtypes": None if self.dtypes is None else list(self.dtypes),
            "findings": [_plain_finding(finding) for finding in self.findings],
            "rows": [
                {
                    "key": list(r.key),
                    "verdict": r.verdict,
                    "l2": _strict(r.difference.l2),
                    "max": _strict(r.difference.max),
                    "limit": r.difference.limit,
                }
                for r in self.rows
            ],
            "operators": {name: list(functions) for name, functions in self.operators.items()},
            "refusals": self.refusals,
            "structure": self.structure,
            "notes": self.notes,
            "missing": self.missing,
            "versions": list(self.versions),
            "reproduce": self.reproduce,
            "dumped": None if self.dumped is None else str(self.dumped),
        }

    def to_html(self) -> str:
        """One page that needs nothing else, light and dark."""
        import jinja2

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("ops_nn.debug", "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        template = environment.get_template("comparison.html.jinja")
        return template.render(report=self, number=_number, shade=_shade, figures=_figures, verdicts=(BITWISE, ROUNDING, DIFFERENT))

    def save(self, folder: str | Path) -> Path:
        """Write `comparison.txt`, `comparison.json` and `comparison.html` into a folder, which is made; returns it."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        texts = {"txt": f"{self}\n", "json": json.dumps(self.to_json(), allow_nan=False, indent=2) + "\n", "html": self.to_html()}
        for kind, text in texts.items():
            replace(place / f"comparison.{kind}", lambda path, text=text: path.write_text(text, encoding="utf-8"))  # type: ignore[misc]
        return place


def _migration(dtypes: tuple[str, str] | None, how: str) -> str:
    """What to do about two dtypes, and what was done in lockstep."""
    if dtypes is None:
        return ""
    said = f"A is in {dtypes[0]} and B in {dtypes[1]}"
    if "autocast" in "".join(dtypes):
        bare, other = ("A", "B") if dtypes[0].startswith("no ") else ("B", "A")
        return f"{said}, which every module shows: trace {bare} once more under the autocast of {other}, and compare {other} with that"
    own, other = getattr(torch, dtypes[0]), getattr(torch, dtypes[1])
    wide, narrow, dtype = ("B", "A", dtypes[0]) if casts.wide_is_b((own, other)) else ("A", "B", dtypes[1])
    if how == LOCKSTEP:
        return f"{said}: {wide}'s modules ran cast to {dtype}, as {narrow}'s are, so that what differs is not the dtype's doing"
    return (
        f"{said}, which every module shows, and traces do not tell it from a fault. Trace {wide} once more after "
        f"model_{wide.lower()}.to(torch.{dtype}) and compare {narrow} with that; or run checker.lockstep(model_a, model_b, "
        f"lambda model: model(...).loss), which casts {wide}'s modules"
    )


def _operators(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    """The fused operators whose results either run shows, in the order in which they were seen, with what they stand for."""
    found: dict[str, tuple[str, ...]] = {}
    for key in (*comparison.a.records, *comparison.b.records):
        named = _OPERATOR.fullmatch(key.name) if key.direction == FORWARD else None
        if named is not None and named[1] not in found:
            try:
                found[named[1]] = om.stands_for(named[1])
            except om.ArgumentError:  # an operator of the version that wrote the trace
                found[named[1]] = ("something that this version does not know",)
    return found


def _finding(comparison: Comparison, culprit: Culprit) -> Finding:
    key = culprit.key
    seen = []
    keys = dict.fromkeys((*comparison.a.records, *comparison.b.records))
    for direction in (INPUT, FORWARD, OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT):
        for own in keys:
            if own.direction == direction and own.module == key.module and (own.call == key.call or direction == PARAMETER_GRADIENT):
                pair = [None if (r := t.records.get(own)) is None else r.figures for t in (comparison.a, comparison.b)]
                seen.append((f"{direction} {own.name}".strip(), pair[0], pair[1]))
    return Finding(key, culprit.difference, culprit.given, culprit.tied, likely_cause(comparison, culprit), tuple(seen))


def _plain_finding(finding: Finding) -> dict[str, Any]:
    return {
        "module": finding.key.module,
        "call": finding.key.call,
        "direction": finding.key.direction,
        "tensor": finding.key.name,
        "l2": _strict(finding.difference.l2),
        "max": _strict(finding.difference.max),
        "limit": finding.difference.limit,
        "given": _strict(finding.given),
        "exact": finding.difference.exact,
        "tied": list(finding.tied),
        "cause": finding.cause._asdict(),
        "tensors": [{"what": what, "A": _figures(a), "B": _figures(b)} for what, a, b in finding.tensors],
    }


def _strict(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.3g}"


def _figures(figures: Figures | None) -> str:
    if figures is None:
        return "not seen"
    broken = "".join(f", {count} {what}" for count, what in ((figures.nans, "NaN"), (figures.infinities, "infinite")) if count)
    first = ", ".join(f"{v:.4g}" for v in figures.samples[:3])
    return f"l2 {figures.l2:.6g}, max {figures.max:.6g}{broken}, bits {figures.fingerprint[:8]}, from {first}"


def _shade(value: float | None) -> int:
    """A step from 0 to 6 for an error: nothing, then by decades from 1e-7 to 1e-1."""
    if value is None or value == 0:
        return 0
    return max(1, min(6, 8 + math.floor(math.log10(value)))) if math.isfinite(value) else 6


def _tree(comparison: Comparison, rows: list[Row]) -> list[Node]:
    """A's modules with their worst errors."""
    worst: dict[str, dict[str, float]] = {}
    verdicts: dict[str, str] = {}
    rank = (BITWISE, ROUNDING, DIFFERENT)
    for row in rows:
        side = "forward" if row.key.direction in _FORWARD else "backward" if row.key.direction in _BACKWARD else ""
        if side:
            found = worst.setdefault(row.key.module, {})
            found[side] = max(found.get(side, 0.0), row.difference.l2)
            verdicts[row.key.module] = max(verdicts.get(row.key.module, BITWISE), row.verdict, key=rank.index)
    guilty = {culprit.key.module for culprit in comparison.culprits}
    below: dict[str, list[str]] = {}
    for path in comparison.a.modules:
        if path:
            below.setdefault(path.rpartition(".")[0], []).append(path)

    def node(path: str) -> Node:
        kind = comparison.a.modules[path]["facts"]["class"].rpartition(".")[2]
        own = worst.get(path, {})
        children = tuple(node(child) for child in below.get(path, ()))
        return Node(path, kind, own.get("forward"), own.get("backward"), verdicts.get(path, "not seen"), path in guilty, children)

    return [node("")] if "" in comparison.a.modules else []
