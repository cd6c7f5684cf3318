"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math.spec import DTYPE_OF, ITEM_SIZE, Call, Case, Cost, dtype_name


class LayerNormProblem(NamedTuple):
    """One call. `residual`, `weight`, `bias`, `x_bias` and `dsum` are dtype names, empty where the tensor is absent.

    In the backward `need_dtotal` asks for the gradient of the sum (of x where there is no residual), `need_dx` for that of x where it
    is another tensor: after dropout, or in another dtype. `narrow` is the dtype of a second copy of y, and of its gradient.
    """

    rows: int
    cols: int
    x: str
    residual: str
    weight: str
    bias: str
    x_bias: str
    out: str
    eps: float
    dropout_p: float
    dsum: str = ""
    need_dtotal: bool = True
    need_dx: bool = False
    need_dw: bool = True
    need_db: bool = True
    need_dx_bias: bool = False
    narrow: str = ""


def total_dtype(p: LayerNormProblem) -> torch.dtype:
    """The dtype of what is normalised: of x, or the wider of x and the residual."""
    return torch.promote_types(DTYPE_OF[p.x], DTYPE_OF[p.residual]) if p.residual else DTYPE_OF[p.x]


def storage(p: LayerNormProblem) -> str:
    """The dtype the problem is stored in."""
    return p.x


def cost(p: LayerNormProblem, phase: str) -> Cost:
    """Each input read once, each output written once."""
    n = p.rows * p.cols
    x, residual, out, narrow = n * ITEM_SIZE[p.x], n * ITEM_SIZE.get(p.residual, 0), n * ITEM_SIZE[p.out], n * ITEM_SIZE.get(p.narrow, 0)
    total = n * ITEM_SIZE[dtype_name(total_dtype(p))]
    weight, bias, x_bias = (p.cols * ITEM_SIZE.get(name, 0) for name in (p.weight, p.bias, p.x_bias))
    if phase == "fwd":
        return Cost(
            (("x", x), ("residual", residual), ("weight", weight), ("bias", bias), ("x_bias", x_bias)),
            (("y", out), ("narrow", narrow), ("sum", total if p.residual else 0), ("moments", 8 * p.rows)),
            (("norm", 8 * n),),
        )
    dsum = n * ITEM_SIZE.get(p.dsum, 0)
    written = (
        ("dsum", total * p.need_dtotal),
        ("dx", x * p.need_dx),
        ("dweight", weight * p.need_dw),
        ("dbias", bias * p.need_db),
        ("dx_bias", x_bias * p.need_dx_bias),
    )
    read = (("dy", out), ("dy_narrow", narrow), ("dsum", dsum), ("sum", total), ("moments", 8 * p.rows), ("weight", weight))
    return Cost(read, written, (("norm", 14 * n),))


def _parameters(d: Any, cols: int, dtype: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return d.normal(cols, scale=0.5, offset=1.0, dtype=dtype), d.normal(cols, dtype=dtype)


def _norm(*shape: int, scale: float = 1.0, offset: float = 0.0, params: str | None = None, **options: Any) -> Any:
    return lambda d: Call((d.normal(*shape, scale=scale, offset=offset), *_parameters(d, shape[-1], params)), options)


def _add(rows: int, cols: int, *, offset: float = 0.0, residual: str | None = None, params: str | None = None, **options: Any) -> Any:
    """`rng` gives a seed, `x_bias` its presence; `narrow` asks for y in the residual's dtype and a copy in that of x."""

    def make(d: Any) -> Call:
        named = dict(options)
        if "rng" in options:
            named["rng"] = d.rng(options["rng"])
        if "x_bias" in options:
            named["x_bias"] = d.normal(cols, dtype=params)
        x, other = d.normal(rows, cols, offset=offset), d.normal(rows, cols, offset=offset, dtype=residual)
        if named.pop("narrow", False):
            named |= {"out_dtype": other.dtype, "narrow_dtype": x.dtype}
        return Call((x, other, *_parameters(d, cols, params)), named)

    return make


def _neighbours(d: Any, rows: int, cols: int) -> torch.Tensor:
    """256, and one in a hundred the next number in bf16, 258: at least one in a row.

    One pass over E[x^2] - E[x]^2 is off by 2^-24 * 256^2 = 0.004 in fp32, where the variance is 4 * 0.01: a tenth of it. Noise of a grid
    step or more around any mean hides it in bf16, where the step is 2^-7 of the mean and the error 2^-10 of the variance.
    """
    seldom = d.normal(rows, cols)
    seldom[torch.arange(rows, device=seldom.device), torch.arange(rows, device=seldom.device) % cols] = 9.0
    return torch.where(seldom > 2.33, 258.0, 256.0).to(seldom.dtype)


HALVES = ("bf16", "fp16")
ONE_BY_ONE = "PyTorch's CPU kernel adds the rows of a parameter's gradient one after another in fp32"
CASES = (
    Case("plain", "layer_norm", _norm(37, 256)),
    Case("odd width", "layer_norm", _norm(9, 4001)),
    Case("one column", "layer_norm", _norm(5, 1)),
    Case("width 31", "layer_norm", _norm(130, 31), looser=(("max", 1.5),), reason=ONE_BY_ONE),
    Case("width 69", "layer_norm", _norm(37, 69)),
    Case("width 1164", "layer_norm", _norm(9, 1164)),
    Case("width 2163", "layer_norm", _norm(9, 2163)),
    Case("wider than a block", "layer_norm", _norm(3, 20000), small=False),
    Case("odd and as wide as fits", "layer_norm", _norm(3, 16001), small=False),
    Case("no rows", "layer_norm", _norm(0, 64)),
    Case("three dimensions", "layer_norm", _norm(2, 5, 96)),
    Case("no weight", "layer_norm", lambda d: Call((d.normal(12, 100),), {"eps": 1e-6})),
    Case("no bias", "layer_norm", lambda d: Call((d.normal(12, 100), d.normal(100)), {})),
    Case("bias without weight", "layer_norm", lambda d: Call((d.normal(12, 100), None, d.normal(100)), {})),
    Case("near eps", "layer_norm", _norm(40, 128, scale=3e-3), kind="near_eps"),
    Case("constant rows", "layer_norm", lambda d: Call((d.normal(20, 1).expand(20, 96).clone(), *_parameters(d, 96)), {}), kind="near_eps"),
    Case("large common offset", "layer_norm", _norm(33, 192, offset=30.0), kind="cancelling"),
    Case(
        "neighbouring numbers",
        "layer_norm",
        lambda d: Call((_neighbours(d, 33, 250), *_parameters(d, 250)), {}),
        kind="cancelling",
        dtypes=HALVES,
    ),
    Case("fp32 parameters", "layer_norm", _norm(24, 128, params="fp32"), dtypes=HALVES),
    Case("fp32 parameters, many rows", "layer_norm", _norm(500, 48, params="fp32"), dtypes=HALVES),
    Case("only the weight learns", "layer_norm", _norm(33, 128), frozen=(0, 2)),
    Case("only the bias learns", "layer_norm", _norm(33, 128), frozen=(0, 1)),
    Case("only the input learns", "layer_norm", _norm(33, 128), frozen=(1, 2)),
    Case("add", "add_layer_norm", _add(29, 320)),
    Case("add, odd width", "add_layer_norm", _add(6, 1003)),
    Case("add, one column", "add_layer_norm", _add(6, 1, rng=3, dropout_p=0.5)),
    Case("add, no rows", "add_layer_norm", _add(0, 64, rng=3, dropout_p=0.5, x_bias=True)),
    Case("add, odd and as wide as fits", "add_layer_norm", _add(3, 8001), small=False),
    Case("add, wide", "add_layer_norm", _add(2, 17000, rng=4, dropout_p=0.1, x_bias=True), small=False),
    Case("add, no parameters", "add_layer_norm", lambda d: Call((d.normal(11, 64), d.normal(11, 64)), {})),
    Case("add, large common offset", "add_layer_norm", _add(20, 96, offset=25.0), kind="cancelling"),
    Case(
        "add, neighbouring numbers",
        "add_layer_norm",
        lambda d: Call((_neighbours(d, 20, 130), torch.zeros_like(d.normal(20, 130)), *_parameters(d, 130)), {}),
        kind="cancelling",
        dtypes=HALVES,
    ),
    Case("add, fp32 residual", "add_layer_norm", _add(24, 128, residual="fp32", params="fp32"), dtypes=HALVES),
    Case("add, fp32 residual, odd width", "add_layer_norm", _add(24, 131, residual="fp32", params="fp32"), dtypes=HALVES),
    Case("add, dropout", "add_layer_norm", _add(40, 256, rng=7, dropout_p=0.25)),
    Case("add, dropout, width 31", "add_layer_norm", _add(70, 31, rng=8, dropout_p=0.5)),
    Case("add, dropout, fp32 residual", "add_layer_norm", _add(24, 128, rng=9, dropout_p=0.1, residual="fp32"), dtypes=HALVES),
    Case("add, narrow copy", "add_layer_norm", _add(24, 128, residual="fp32", params="fp32", narrow=True), dtypes=HALVES),
    Case("add, narrow copy, odd width", "add_layer_norm", _add(7, 1003, residual="fp32", params="fp32", narrow=True), dtypes=HALVES),
    Case(
        "add, narrow copy, dropout, x_bias",
        "add_layer_norm",
        _add(40, 96, rng=11, dropout_p=0.1, residual="fp32", params="fp32", x_bias=True, narrow=True),
        dtypes=HALVES,
    ),
    Case(
        "add, narrow copy, wide",
        "add_layer_norm",
        _add(2, 17000, rng=4, dropout_p=0.1, residual="fp32", params="fp32", x_bias=True, narrow=True),
        dtypes=HALVES,
        small=False,
    ),
    Case("add, x_bias", "add_layer_norm", _add(40, 160, x_bias=True)),
    Case("add, x_bias, dropout", "add_layer_norm", _add(40, 160, rng=10, dropout_p=0.1, x_bias=True, params="fp32")),
    Case("add, only x_bias learns", "add_layer_norm", _add(40, 160, rng=10, dropout_p=0.1, x_bias=True), frozen=(0, 1, 2, 3)),
    Case("add, only the residual learns", "add_layer_norm", _add(40, 160, rng=10, dropout_p=0.1), frozen=(0, 2, 3)),
    Case("add, only x learns", "add_layer_norm", _add(40, 160, rng=10, dropout_p=0.1), frozen=(1, 2, 3)),
)
