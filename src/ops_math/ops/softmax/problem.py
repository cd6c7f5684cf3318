"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class SoftmaxProblem(NamedTuple):
    """One call over the last dimension: rows, columns, dtype names of the input and of the result."""

    rows: int
    cols: int
    x: str
    out: str


def storage(p: SoftmaxProblem) -> str:
    """The dtype the problem is stored in."""
    return p.x


def cost(p: SoftmaxProblem, phase: str) -> Cost:
    """Each input read once, the result written once."""
    n = p.rows * p.cols
    x, out = n * ITEM_SIZE[p.x], n * ITEM_SIZE[p.out]
    if phase == "fwd":
        return Cost((("x", x),), (("y", out),), (("softmax", 5 * n),))
    return Cost((("dy", out), ("y", out)), (("dx", x),), (("softmax", 4 * n),))


def _soft(*shape: int, scale: float = 1.0, offset: float = 0.0, **options: Any) -> Any:
    return lambda d: Call((d.normal(*shape, scale=scale, offset=offset),), options)


def _partly_masked(d: Any) -> Call:
    x = d.normal(33, 160)
    hidden = d.bools(0.4, 33, 160)
    hidden[:, 7] = False  # a row that is masked in full has no softmax
    return Call((x.masked_fill(hidden, float("-inf")),), {})


def _one_tall_logit(d: Any) -> Call:
    x = d.normal(40, 192)
    x[torch.arange(40, device=x.device), d.ints(192, 40)] += 12.0
    return Call((x,), {})


CASES = (
    Case("plain", "softmax", _soft(37, 256)),
    Case("odd width", "softmax", _soft(9, 4001)),
    Case("one column", "softmax", _soft(5, 1)),
    Case("width 31", "softmax", _soft(130, 31)),
    Case("width 69", "softmax", _soft(37, 69)),
    Case("width 498", "softmax", _soft(9, 498)),
    Case("width 1164", "softmax", _soft(9, 1164)),
    Case("odd and as wide as fits", "softmax", _soft(3, 16001), small=False),
    Case("wider than a block", "softmax", _soft(3, 40000), small=False),
    Case("no rows", "softmax", _soft(0, 64)),
    Case("no columns", "softmax", _soft(3, 0)),
    Case("one dimension", "softmax", _soft(331)),
    Case("first dimension", "softmax", _soft(65, 24, dim=0)),
    Case("middle dimension", "softmax", _soft(3, 48, 5, dim=-2)),
    Case("confident", "softmax", _one_tall_logit, kind="confident"),
    Case("wide range", "softmax", _soft(40, 192, scale=30.0), kind="confident"),
    Case("large common offset", "softmax", _soft(33, 192, offset=300.0), kind="cancelling"),
    Case("partly masked by -inf", "softmax", _partly_masked),
)
