"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class DropoutProblem(NamedTuple):
    """One call: rows and columns, the dtype name, and the chance of dropping."""

    rows: int
    cols: int
    x: str
    p: float


def storage(p: DropoutProblem) -> str:
    """The dtype the problem is stored in."""
    return p.x


def cost(p: DropoutProblem, phase: str) -> Cost:
    """The input read once, the result written once; seven rounds of Philox for eight elements are integer work."""
    size = p.rows * p.cols * ITEM_SIZE[p.x]
    names = ("x", "y") if phase == "fwd" else ("dy", "dx")
    return Cost(((names[0], size), ("state", 24)), ((names[1], size),), (("scale", p.rows * p.cols),))


def _drop(*shape: int, p: float = 0.25, seed: int = 11) -> Any:
    return lambda d: Call((d.normal(*shape), p), {"rng": d.rng(seed)})


CASES = (
    Case("plain", "dropout", _drop(37, 256)),
    Case("odd width", "dropout", _drop(9, 4001)),
    Case("one column", "dropout", _drop(70, 1, p=0.5)),
    Case("width 31", "dropout", _drop(130, 31)),
    Case("width 13", "dropout", _drop(97, 13)),
    Case("width 753", "dropout", _drop(5, 753)),
    Case("width 1164", "dropout", _drop(3, 1164)),
    Case("width of eights", "dropout", _drop(21, 1000)),
    Case("width 6616", "dropout", _drop(3, 6616)),
    Case("a row longer than a tile, odd", "dropout", _drop(3, 6613)),
    Case("15 values", "dropout", _drop(15, p=0.5)),
    Case("17 values", "dropout", _drop(17, p=0.5)),
    Case("part of odd rows", "dropout", lambda d: Call((d.normal(9, 203)[:, 3:64], 0.5), {"rng": d.rng(4)})),
    Case("part of rows by four", "dropout", lambda d: Call((d.normal(9, 204)[:, 4:64], 0.5), {"rng": d.rng(4)})),
    Case("one dimension", "dropout", _drop(331)),
    Case("three dimensions", "dropout", _drop(2, 5, 96)),
    Case("no rows", "dropout", _drop(0, 64)),
    Case("no columns", "dropout", _drop(3, 0)),
    Case("wide", "dropout", _drop(2, 20000), small=False),
    Case("almost all dropped", "dropout", _drop(64, 128, p=0.9)),
    Case("almost none dropped", "dropout", _drop(64, 128, p=1e-3)),
    Case("none dropped", "dropout", _drop(7, 64, p=0.0)),
    Case("another stream", "dropout", lambda d: Call((d.normal(33, 128), 0.5), {"rng": d.rng(-3).child(2**32 - 5)})),
    Case("second half of a batch", "dropout", lambda d: Call((d.normal(33, 128), 0.5), {"rng": d.rng(5).at_row(2**31 - 7)})),
    Case("second half of a batch, odd width", "dropout", lambda d: Call((d.normal(33, 131), 0.5), {"rng": d.rng(5).at_row(2**32 - 7)})),
)
