"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class GluProblem(NamedTuple):
    """One call. `cols` is the width of the output; `up` is empty when both inputs are packed in one tensor, and `packing` then
    says how: `halves` or `interleaved`. `activation` is `silu`, `gelu` or `gelu_tanh`. `keep` is whether activation(gate) is kept
    for the backward instead of being computed again."""

    rows: int
    cols: int
    gate: str
    up: str
    out: str
    activation: str
    packing: str
    need_dgate: bool = True
    need_dup: bool = True
    need_y: bool = False
    keep: bool = False


def storage(p: GluProblem) -> str:
    """The dtype the problem is stored in."""
    return p.gate


def cost(p: GluProblem, phase: str) -> Cost:
    """Each input read once, each output written once."""
    n = p.rows * p.cols
    gate, up, out = n * ITEM_SIZE[p.gate], n * ITEM_SIZE[p.up or p.gate], n * ITEM_SIZE[p.out]
    if phase == "fwd":
        return Cost((("gate", gate), ("up", up)), (("y", out), ("activation", out * p.keep)), (("activation", 5 * n),))
    written = (("dgate", gate * p.need_dgate), ("dup", up * p.need_dup), ("y", out * p.need_y))
    return Cost((("dy", out), ("gate", gate), ("up", up), ("activation", out * p.keep)), written, (("activation", 12 * n),))


def _pair(rows: int, cols: int, scale: float = 1.5, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, cols, scale=scale), d.normal(rows, cols)), options)


def _packed(rows: int, cols: int, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, 2 * cols, scale=1.5),), options)


def _halves_of_one(d: Any) -> Call:
    return Call(tuple(d.normal(17, 192).chunk(2, -1)), {})


def _same_twice(d: Any) -> Call:
    x = d.normal(19, 80)
    return Call((x, x), {})


def _large(d: Any) -> Call:
    return Call((d.normal(24, 128, scale=60.0), d.normal(24, 128)), {})


def _far_ends(d: Any) -> Call:
    """Gates around which exp overflows fp32, vanishes, or is subnormal."""
    gate = d.tensor([[80.0, -80.0, 88.9, -88.9, 104.0, -104.0, 1e-30, -1e-40, 0.0, 300.0, -300.0, 30000.0, -30000.0, 20.0, -20.0, 5.0]])
    return Call((gate.to(d.normal(1).dtype).expand(8, 16), d.normal(8, 16)), {})


def _left(d: Any) -> Call:
    """Rows of gates around -4, -8, ... -40, where unit and slope are 1e-1 to 1e-16: not seen beside others in a row."""
    levels = -torch.tensor([4.0, 8.0, 12.0, 16.0, 24.0, 40.0], device=d.normal(1).device).repeat(2)[:, None]
    gate = d.normal(12, 96, scale=0.3)
    return Call(((gate + levels).to(gate.dtype), d.normal(12, 96)), {})


CASES = (
    Case("plain", "swiglu", _pair(37, 256)),
    Case("odd width", "swiglu", _pair(5, 4001)),
    Case("width 31", "swiglu", _pair(130, 31)),
    Case("one element", "swiglu", _pair(1, 1)),
    Case("15 values", "swiglu", _pair(3, 5)),
    Case("17 values", "swiglu", _pair(1, 17)),
    Case("width 13", "swiglu", _pair(97, 13)),
    Case("width 753", "swiglu", _pair(3, 753)),
    Case("width 1164", "swiglu", _pair(3, 1164)),
    Case("halves of one tensor, width 52", "swiglu", lambda d: Call(tuple(d.normal(17, 104).chunk(2, -1)), {})),
    Case("part of rows by two", "swiglu", lambda d: Call((d.normal(9, 206)[:, 2:64], d.normal(9, 62)), {})),
    Case("no rows", "swiglu", _pair(0, 64)),
    Case("no columns", "swiglu", _pair(3, 0)),
    Case("three dimensions", "swiglu", lambda d: Call((d.normal(2, 5, 96), d.normal(2, 5, 96)), {})),
    Case("one dimension", "swiglu", lambda d: Call((d.normal(300), d.normal(300)), {})),
    Case("longer than a block", "swiglu", _pair(7, 8200), small=False),
    Case("halves of one tensor", "swiglu", _halves_of_one),
    Case("expanded gate", "swiglu", lambda d: Call((d.normal(1, 96).expand(12, 96), d.normal(12, 96)), {})),
    Case("transposed up", "swiglu", lambda d: Call((d.normal(12, 64), d.normal(64, 12).t()), {})),
    Case("the same tensor twice", "swiglu", _same_twice),
    Case("large gates", "swiglu", _large, kind="confident"),
    Case("far ends of exp", "swiglu", _far_ends, kind="confident", dtypes=("fp32", "bf16")),
    Case("rows of far negative gates", "swiglu", _left, kind="confident", dtypes=("fp32", "bf16")),
    Case(
        "gates around -24 alone",
        "swiglu",
        lambda d: Call((d.normal(12, 96, scale=0.5, offset=-24.0), d.normal(12, 96)), {}),
        kind="confident",
        dtypes=("fp32", "bf16"),
    ),
    Case("fp32 up", "swiglu", lambda d: Call((d.normal(9, 128), d.normal(9, 128, dtype="fp32")), {}), dtypes=("bf16", "fp16")),
    Case("only up learns", "swiglu", _pair(33, 128), frozen=(0,)),
    Case("only the gate learns", "swiglu", _pair(33, 128), frozen=(1,)),
    Case("packed halves", "swiglu_packed", _packed(21, 96)),
    Case("packed halves, odd width", "swiglu_packed", _packed(5, 1003)),
    Case("packed pairs", "swiglu_packed", _packed(21, 96, interleaved=True)),
    Case("packed pairs, odd width", "swiglu_packed", _packed(5, 1003, interleaved=True)),
    Case("packed pairs, part of rows", "swiglu_packed", lambda d: Call((d.normal(9, 200)[:, 8:136],), {"interleaved": True})),
    Case("packed pairs, 15 values", "swiglu_packed", _packed(3, 5, interleaved=True)),
    Case("packed pairs, part of rows by two", "swiglu_packed", lambda d: Call((d.normal(9, 206)[:, 2:126],), {"interleaved": True})),
    Case("packed, no rows", "swiglu_packed", _packed(0, 32)),
    Case("geglu tanh", "geglu", _pair(23, 160)),
    Case("geglu exact", "geglu", _pair(23, 160, approximate="none")),
    Case("geglu tanh, large gates", "geglu", _pair(16, 128, scale=30.0), kind="confident"),
    Case("geglu exact, large gates", "geglu", _pair(16, 128, scale=30.0, approximate="none"), kind="confident"),
    Case("geglu exact, only up learns", "geglu", _pair(16, 128, approximate="none"), frozen=(0,)),
    Case("geglu packed", "geglu_packed", _packed(11, 224)),
    Case("geglu packed exact", "geglu_packed", _packed(11, 224, approximate="none")),
    Case("geglu packed pairs", "geglu_packed", _packed(11, 224, interleaved=True)),
    Case("geglu packed pairs exact", "geglu_packed", _packed(7, 31, approximate="none", interleaved=True)),
)
