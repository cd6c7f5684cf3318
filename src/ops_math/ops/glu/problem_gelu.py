"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class GeluProblem(NamedTuple):
    """One call. `bias` is a dtype name, empty where there is none; `approximate` is `none` or `tanh`."""

    rows: int
    cols: int
    x: str
    bias: str
    out: str
    approximate: str
    need_dx: bool = True
    need_dbias: bool = False
    need_y: bool = False


def storage(p: GeluProblem) -> str:
    """The dtype the problem is stored in."""
    return p.x


def cost(p: GeluProblem, phase: str) -> Cost:
    """Each input read once, each output written once."""
    n = p.rows * p.cols
    x, out, bias = n * ITEM_SIZE[p.x], n * ITEM_SIZE[p.out], p.cols * ITEM_SIZE.get(p.bias, 0)
    if phase == "fwd":
        return Cost((("x", x), ("bias", bias)), (("y", out),), (("activation", 5 * n),))
    written = (("dx", x * p.need_dx), ("dbias", bias * p.need_dbias), ("y", out * p.need_y))
    return Cost((("dy", out), ("x", x), ("bias", bias)), written, (("activation", 12 * n),))


def _alone(rows: int, cols: int, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, cols, scale=1.5),), options)


def _biased(rows: int, cols: int, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, cols), d.normal(cols)), options)


CASES = (
    Case("plain", "gelu", _alone(37, 256)),
    Case("tanh", "gelu", _alone(37, 256, approximate="tanh")),
    Case("odd width", "gelu", _alone(3, 4001)),
    Case("one element", "gelu", _alone(1, 1)),
    Case("15 values", "gelu", _alone(3, 5)),
    Case("17 values, tanh", "gelu", _alone(1, 17, approximate="tanh")),
    Case("width 13", "gelu", _alone(97, 13)),
    Case("width 753", "gelu", _alone(3, 753)),
    Case("width 1164", "gelu", _alone(3, 1164)),
    Case("part of rows by four", "gelu", lambda d: Call((d.normal(9, 204)[:, 4:64],), {})),
    Case("part of odd rows", "gelu", lambda d: Call((d.normal(9, 203)[:, 3:64],), {})),
    Case("no rows", "gelu", _alone(0, 64)),
    Case("one dimension", "gelu", lambda d: Call((d.normal(500),), {})),
    Case("large inputs", "gelu", lambda d: Call((d.normal(16, 96, scale=30.0),), {}), kind="confident"),
    Case("large inputs, tanh", "gelu", lambda d: Call((d.normal(16, 96, scale=30.0),), {"approximate": "tanh"}), kind="confident"),
    Case("part of rows", "gelu", lambda d: Call((d.normal(9, 200)[:, 8:136],), {})),
    Case("bias", "gelu", _biased(70, 192)),
    Case("bias, tanh", "gelu", _biased(70, 192, approximate="tanh")),
    Case("bias, width 31", "gelu", _biased(41, 31)),
    Case("bias, width by four", "gelu", _biased(7, 1164)),
    Case("bias, width by two", "gelu", _biased(7, 654)),
    Case("bias, odd width", "gelu", _biased(3, 1003)),
    Case("bias, three dimensions", "gelu", lambda d: Call((d.normal(2, 7, 64), d.normal(64)), {})),
    Case("bias, no rows", "gelu", _biased(0, 64)),
    Case("bias, part of rows", "gelu", lambda d: Call((d.normal(9, 200)[:, 8:136], d.normal(128)), {})),
    Case("bias, transposed input", "gelu", lambda d: Call((d.normal(64, 24).t(), d.normal(64)), {})),
    Case("bias, many rows", "gelu", _biased(1500, 16)),
    Case(
        "bias cancels the input", "gelu", lambda d: Call((d.normal(40, 64, offset=8.0), d.normal(64, offset=-8.0)), {}), kind="cancelling"
    ),
    Case("fp32 bias", "gelu", lambda d: Call((d.normal(24, 128), d.normal(128, dtype="fp32")), {}), dtypes=("bf16", "fp16")),
    Case(
        "large fp32 bias, many rows",
        "gelu",
        lambda d: Call((d.normal(600, 32), d.normal(32, offset=5.0, dtype="fp32")), {}),
        dtypes=("bf16", "fp16"),
    ),
    Case("only the bias learns", "gelu", _biased(33, 128), frozen=(0,)),
    Case("only the input learns", "gelu", _biased(33, 128), frozen=(1,)),
)
