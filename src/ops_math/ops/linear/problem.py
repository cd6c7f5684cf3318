"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math.spec import ITEM_SIZE, Call, Case, Cost


class LinearProblem(NamedTuple):
    """One call. `x`, `weight`, `bias` and `out` are dtype names, `bias` empty where there is none; operands are rounded to `store`.

    `products` is how fp32 products multiply. `parts_k` and `parts_n` say in how many equal parts the sums over inputs (forward) and over
    outputs (gradient of x) are taken, to be added in pairs.
    """

    rows: int
    inputs: int
    outputs: int
    x: str
    weight: str
    bias: str
    store: str
    out: str
    products: str
    parts_k: int
    parts_n: int
    need_dx: bool = True
    need_dw: bool = True
    need_db: bool = True


def storage(p: LinearProblem) -> str:
    """The dtype the problem is stored in."""
    return p.store


def cost(p: LinearProblem, phase: str) -> Cost:
    """One product forward, two backward; each matrix moved once."""
    x, w, y = p.rows * p.inputs, p.outputs * p.inputs, p.rows * p.outputs
    one = 2 * p.rows * p.inputs * p.outputs
    bias = p.outputs * ITEM_SIZE.get(p.bias, 0)
    read = (("x", x * ITEM_SIZE[p.x]), ("weight", w * ITEM_SIZE[p.weight]))
    if phase == "fwd":
        return Cost((*read, ("bias", bias)), (("y", y * ITEM_SIZE[p.out]),), (("product", one),))
    written = (("dx", x * ITEM_SIZE[p.x] * p.need_dx), ("dweight", w * ITEM_SIZE[p.weight] * p.need_dw), ("dbias", bias * p.need_db))
    flops = (("product dx", one * p.need_dx), ("product dweight", one * p.need_dw))
    return Cost((*read, ("dy", y * ITEM_SIZE[p.out])), written, flops)


def _layer(*shape: int, outputs: int, bias: bool = False, weight: str | None = None, **options: Any) -> Any:
    def make(d: Any) -> Call:
        x, w = d.normal(*shape), d.normal(outputs, shape[-1], scale=shape[-1] ** -0.5, dtype=weight)
        return Call((x, w, d.normal(outputs, dtype=weight)) if bias else (x, w), options)

    return make


def _cancelling(d: Any) -> Call:
    """Each row of x is followed by its negative, so that sums cancel to what the last input adds."""
    x = d.normal(19, 40)
    x[:, 20:] = -x[:, :20]
    w = d.normal(24, 40)
    w[:, 20:39] = w[:, :19]
    return Call((x, w), {})


def _biased(d: Any) -> Call:
    """An fp32 bias beside exact products, which shows whether it is rounded."""
    return Call((d.normal(17, 64), d.normal(32, 64, scale=0.125), d.normal(32, scale=4.0, dtype="fp32")), {"wide": True})


CASES = (
    Case("plain", "linear", _layer(37, 64, outputs=48)),
    Case("with bias", "linear", _layer(21, 96, outputs=40, bias=True)),
    Case("fp32 weight", "linear", _layer(33, 64, outputs=32, bias=True, weight="fp32"), dtypes=("bf16", "fp16")),
    Case("three dimensions", "linear", _layer(2, 9, 32, outputs=80)),
    Case("one dimension", "linear", _layer(64, outputs=24)),
    Case("odd sizes", "linear", _layer(31, 129, outputs=67, bias=True)),
    Case("one input", "linear", _layer(9, 1, outputs=5)),
    Case("one output", "linear", _layer(130, 33, outputs=1)),
    Case("parts", "linear", _layer(18, 64, outputs=48, parts=(4, 2))),
    Case("a wide result", "linear", _layer(17, 64, outputs=32, bias=True, wide=True)),
    Case("a wide result, fp32 bias", "linear", _biased, dtypes=("bf16", "fp16")),
    Case("cancelling", "linear", _cancelling, "cancelling"),
    Case("many rows", "linear", _layer(1031, 160, outputs=96), small=False),
    Case("no rows", "linear", _layer(0, 64, outputs=32, bias=True)),
)
