"""What runs where nothing was calibrated is what an H200 measured as the fastest, or close to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops_math import backends, catalog
from ops_math.backends import launch as launching

pytest.importorskip("triton", reason="missing capability: Triton")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = backends.NAMED["h200"]
NORMS = re.compile(r"(\w+) +(fwd|bwd) (\(\d+, \d+\)) +(\(.*?\)) .* share ([\d.]+)  error")
UNITS = re.compile(r"glu_packed (fwd|bwd) (\d+)x(\d+) .*\| (.*)")
UNIT = re.compile(r"(\d+)x(\d+)(?:x(True|False))?: ([\d.]+)")
CLOSE = 0.94  # of the best: one sweep differs from another by 2 %, and a rule by shape is worth the rest
Measured = dict[tuple[str, str, int, int], dict[tuple[Any, ...], float]]


def told(config: tuple[Any, ...]) -> tuple[Any, ...]:
    """A configuration without the fields at its end that ask for nothing: files from before such a field was there lack it."""
    last = max(i for i, value in enumerate(config) if value)
    return tuple(config[: last + 1])


def norms(name: str) -> Measured:
    """The share of a copy of each configuration, by operator, phase, rows and columns."""
    found: Measured = {}
    for line in (RESULTS / name).read_text().splitlines():
        if seen := NORMS.match(line):
            operator, phase, shape, config, share = seen.groups()
            found.setdefault((operator, phase, *ast.literal_eval(shape)), {})[told(ast.literal_eval(config))] = float(share)
    return found


def units(name: str) -> Measured:
    """The same of packed gated units."""
    found: Measured = {}
    for line in (RESULTS / name).read_text().splitlines():
        if seen := UNITS.match(line):
            phase, rows, cols, rest = seen.groups()
            shares = {told((int(b), int(w), fours == "True")): float(share) for b, w, fours, share in UNIT.findall(rest)}
            found["glu_packed", phase, int(rows), int(cols)] = shares
    return found


def configs_of(operator: str, phase: str, rows: int, cols: int, level_2: bool = False) -> list[tuple[Any, ...]]:
    """What is offered for a problem of the sweeps, in its order."""
    known, add = catalog.operators(), operator.startswith("add_")
    name = "glu" if operator == "glu_packed" else operator.removeprefix("add_")
    third, problems = "bf16" if add else "", known[name].file("problem")
    if name == "glu":
        problem: Any = problems.GluProblem(rows, cols, "bf16", "", "bf16", "silu", "halves")
    elif name == "softmax":
        problem = problems.SoftmaxProblem(rows, cols, "bf16", "bf16")
    elif name == "rms_norm":
        problem = problems.RmsNormProblem(rows, cols, "bf16", third, "bf16", "bf16", 1e-6, 0.0)
    else:
        dtypes = ("bf16", third if phase == "fwd" else "", "bf16", "bf16" if phase == "fwd" else "", "", "bf16", 1e-5, 0.0)
        problem = problems.LayerNormProblem(rows, cols, *dtypes, third if phase == "bwd" else "")
    kernels = next(i for i in known[name].implementations() if i.name == "triton_gpu").module
    return [told(c) for c in (kernels.invariant_configs if level_2 else kernels.configs)(problem, H200, phase)]


def shortfalls(measured: Measured, level_2: bool = False) -> Iterator[str]:
    """Where the first is far behind, or nobody measured it."""
    for key, shares in measured.items():
        offered = configs_of(*key, level_2=level_2)
        best = max((c for c in offered if c in shares), key=lambda c: shares[c])
        share = shares.get(offered[0], 0.0)
        if not level_2 and share < CLOSE * max(shares.values()):
            yield f"{key}: {offered[0]} with {share:.2f} of a copy where the best has {max(shares.values()):.2f}"
        if share < CLOSE * shares[best]:
            yield f"{key}: {offered[0]} with {share:.2f} of a copy stands before {best} with {shares[best]:.2f}"


@pytest.fixture(autouse=True)
def the_compiler_that_was_measured(monkeypatch):
    """The order of configurations may follow what Triton's compiler makes of them."""
    monkeypatch.setattr(launching, "triton_minor", lambda: "3.6")


FAR, LIMITS = "h200_norms_far_2026-11-30b.txt", "h200_norms_limits_2026-11-30.txt"
PACKED = ("h200_glu_packed_2026-11-30.txt", "h200_glu_packed_2026-11-30b.txt")


def test_of_norms_and_softmax():
    measured = norms(FAR)
    assert len(measured) == 26
    assert all(len(shares) >= 7 for shares in measured.values())
    assert list(shortfalls(measured)) == []


def test_of_rows_in_registers_of_which_a_thread_may_take_fewer():
    measured = norms(LIMITS)
    assert len(measured) == 16
    assert sum(len({c[:5] for c in shares}) < len(shares) for shares in measured.values()) >= 8, "with and without a limit"
    assert list(shortfalls(measured)) == []


def test_limits_that_nobody_tried_with_this_compiler_are_candidates_behind_all_others(monkeypatch):
    monkeypatch.setattr(launching, "triton_minor", lambda: "3.7")
    for name, cols in (("layer_norm", 8192), ("layer_norm", 16384), ("rms_norm", 8192), ("rms_norm", 4096)):
        offered = configs_of(name, "fwd", 8192, cols)
        limited = [len(c) == (10 if name == "layer_norm" else 9) for c in offered]
        assert any(limited)
        assert limited == sorted(limited), name


def test_of_norms_whose_order_of_sums_may_not_follow_a_rows_place():
    assert list(shortfalls(norms(FAR), level_2=True)) == []


def test_of_packed_gated_units():
    measured = {**units(PACKED[0]), **units(PACKED[1])}
    assert len(measured) == 12
    assert all(len(shares) >= 5 for shares in measured.values())
    assert list(shortfalls(measured)) == []
