"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class RmsNormProblem(NamedTuple):
    """One call. `residual` and `weight` are dtype names, empty where the tensor is absent."""

    rows: int
    cols: int
    x: str
    residual: str
    weight: str
    out: str
    eps: float
    weight_offset: float
    need_dx: bool = True
    need_dw: bool = True


def storage(p: RmsNormProblem) -> str:
    """The dtype the problem is stored in."""
    return p.x


def cost(p: RmsNormProblem, phase: str) -> Cost:
    """Each input read once, each output written once."""
    n = p.rows * p.cols
    weight = p.cols * ITEM_SIZE.get(p.weight, 0)
    x, residual, out = n * ITEM_SIZE[p.x], n * ITEM_SIZE.get(p.residual, 0), n * ITEM_SIZE[p.out]
    total = x if p.residual else 0
    if phase == "fwd":
        return Cost(
            (("x", x), ("residual", residual), ("weight", weight)), (("y", out), ("sum", total), ("rstd", 4 * p.rows)), (("norm", 4 * n),)
        )
    read = (("dy", out), ("dsum", total), ("x", x), ("rstd", 4 * p.rows), ("weight", weight))
    return Cost(read, (("dx", x * p.need_dx), ("dweight", weight * p.need_dw)), (("norm", 9 * n),))


def _norm(rows: int, cols: int, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, cols), d.normal(cols, scale=0.5, offset=1.0)), options)


def _add(rows: int, cols: int, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, cols), d.normal(rows, cols), d.normal(cols, scale=0.5, offset=1.0)), options)


CASES = (
    Case("plain", "rms_norm", _norm(37, 256)),
    Case("odd width", "rms_norm", _norm(9, 4001)),
    Case("one column", "rms_norm", _norm(5, 1)),
    Case("width 31", "rms_norm", _norm(130, 31)),
    Case("width 69", "rms_norm", _norm(37, 69)),
    Case("width 270", "rms_norm", _norm(11, 270)),
    Case("width 1164", "rms_norm", _norm(9, 1164)),
    Case("width 2163", "rms_norm", _norm(9, 2163)),
    Case("wider than a block", "rms_norm", _norm(3, 20000), small=False),
    Case("odd and as wide as fits", "rms_norm", _norm(3, 16001), small=False),
    Case("no rows", "rms_norm", _norm(0, 64)),
    Case("three dimensions", "rms_norm", lambda d: Call((d.normal(2, 5, 96), d.normal(96)), {})),
    Case("no weight", "rms_norm", lambda d: Call((d.normal(12, 100),), {"eps": 1e-5})),
    Case("no weight, odd width", "rms_norm", lambda d: Call((d.normal(12, 101),), {})),
    Case("Gemma's 1 + w", "rms_norm", _norm(20, 160, weight_offset=1.0)),
    Case("near eps", "rms_norm", lambda d: Call((d.normal(40, 128, scale=1e-3), d.normal(128)), {"eps": 1e-6}), kind="near_eps"),
    Case("large common offset", "rms_norm", lambda d: Call((d.normal(33, 192, offset=30.0), d.normal(192)), {}), kind="cancelling"),
    Case("fp32 weight", "rms_norm", lambda d: Call((d.normal(24, 128), d.normal(128, dtype="fp32")), {}), dtypes=("bf16", "fp16")),
    Case(
        "fp32 weight, many rows",
        "rms_norm",
        lambda d: Call((d.normal(500, 48), d.normal(48, offset=1.0, dtype="fp32")), {}),
        dtypes=("bf16", "fp16"),
    ),
    Case("only the weight learns", "rms_norm", _norm(33, 128), frozen=(0,)),
    Case("only the input learns", "rms_norm", _norm(33, 128), frozen=(1,)),
    Case("add", "add_rms_norm", _add(29, 320)),
    Case("add, odd width", "add_rms_norm", _add(6, 1003)),
    Case("add, as wide as fits, odd", "add_rms_norm", _add(3, 8001), small=False),
    Case("add, wide", "add_rms_norm", _add(2, 17000), small=False),
    Case("add, no weight, 1 + w", "add_rms_norm", lambda d: Call((d.normal(11, 64), d.normal(11, 64)), {"weight_offset": 1.0})),
    Case(
        "add, fp32 residual",
        "add_rms_norm",
        lambda d: Call((d.normal(24, 128), d.normal(24, 128, dtype="fp32"), d.normal(128)), {}),
        dtypes=("bf16", "fp16"),
    ),
    Case(
        "add, fp32 residual, odd width",
        "add_rms_norm",
        lambda d: Call((d.normal(24, 131), d.normal(24, 131, dtype="fp32"), d.normal(131)), {}),
        dtypes=("bf16", "fp16"),
    ),
)
