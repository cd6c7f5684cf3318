"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

from ops_math.ops.cross_entropy.problem import IGNORE, SURE_ENOUGH, CrossEntropyProblem, class_weights, targets
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Call, Case, Cost


class LinearCrossEntropyProblem(NamedTuple):
    """One call. `x`, `weight`, `bias` and `class_weight` are dtype names, the latter two empty where there are none; `store` is the
    dtype of the products' operands. `when` says when gradients are computed: `forward`, `backward`, or `never`."""

    rows: int
    hidden: int
    cols: int
    x: str
    weight: str
    bias: str
    class_weight: str
    store: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    counted: bool
    when: str
    need_dx: bool
    need_dw: bool
    need_db: bool

    @property
    def loss(self) -> CrossEntropyProblem:
        """The problem of the loss alone, on logits that were stored."""
        return CrossEntropyProblem(
            self.rows,
            self.cols,
            self.store,
            self.class_weight,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.softcap,
            self.reduction,
            self.counted,
        )


def storage(p: LinearCrossEntropyProblem) -> str:
    """The dtype the problem is stored in."""
    return p.store


def cost(p: LinearCrossEntropyProblem, phase: str) -> Cost:
    """Operands read once, gradients written once; the logits need not exist. A backward after gradients in the forward scales them."""
    x, weight, bias = p.rows * p.hidden, p.cols * p.hidden, p.cols
    inputs = (
        ("x", x * ITEM_SIZE[p.x]),
        ("weight", weight * ITEM_SIZE[p.weight]),
        ("bias", bias * ITEM_SIZE.get(p.bias, 0)),
        ("target", 8 * p.rows),
    )
    wide = 8 if p.store == "fp64" else 4
    needed = (("dx", x * p.need_dx), ("dweight", weight * p.need_dw), ("dbias", bias * p.need_db))
    one = 2 * p.rows * p.hidden * p.cols
    learning = (("dx", one * p.need_dx), ("dweight", one * p.need_dw))
    softmax = ("softmax", 8 * p.rows * p.cols)
    if phase == "fwd":
        now = p.when == "forward"
        written = tuple((name, n * wide) for name, n in needed) if now else ()
        return Cost(inputs, (*written, ("factors", 12 * p.rows)), (("logits", one), softmax, *(learning if now else ())))
    sizes = {"dx": ITEM_SIZE[p.x], "dweight": ITEM_SIZE[p.weight], "dbias": ITEM_SIZE.get(p.bias, 0)}
    results = tuple((name, n * sizes[name]) for name, n in needed)
    if p.when == "forward":
        return Cost(tuple((name, n * wide) for name, n in needed), results, (("scale", sum(n for _, n in needed)),))
    return Cost((*inputs, ("factors", 12 * p.rows)), results, (("logits", one), softmax, *learning))


def _made(d: Any, rows: int, hidden: int, cols: int, ignored: float, scale: float, weight_dtype: str | None) -> tuple[Any, ...]:
    return (
        d.normal(rows, hidden),
        d.normal(cols, hidden, scale=scale * hidden**-0.5, dtype=weight_dtype),
        targets(d, cols, rows, ignored=ignored),
    )


def _simple(
    rows: int, hidden: int, cols: int, ignored: float = 0.0, scale: float = 2.0, weight_dtype: str | None = None, **options: Any
) -> Any:
    return lambda d: Call(_made(d, rows, hidden, cols, ignored, scale, weight_dtype), options)


def _weighted(rows: int, hidden: int, cols: int, **options: Any) -> Any:
    return lambda d: Call(_made(d, rows, hidden, cols, 0.2, 2.0, None), {"class_weight": class_weights(d, cols), **options})


def _biased(rows: int, hidden: int, cols: int, bias_dtype: str | None = None, **options: Any) -> Any:
    return lambda d: Call(_made(d, rows, hidden, cols, 0.2, 2.0, None), {"bias": d.normal(cols, dtype=bias_dtype), **options})


def _confident(d: Any, rows: int, hidden: int, cols: int) -> Call:
    """Each row of x is nearly its target's weight row, whose squared norm of about 12 stands out."""
    weight, target = d.normal(cols, hidden, scale=(12.0 / hidden) ** 0.5), d.ints(cols, rows)
    return Call((weight[target].clone(), weight, target), {})


def _outstanding(rows: int, hidden: int, cols: int, margin: float, offset: float = 0.0, **options: Any) -> Any:
    """Each row of x is its target's weight row, whose squared norm is `margin`; a bias lifts all logits by `offset`.

    Norms are equal, since else the few rows that are least sure would be all of the gradient. In float64 the margin is at most
    `SURE_ENOUGH`.
    """

    def make(d: Any) -> Call:
        weight = d.normal(cols, hidden, dtype="fp64")
        square = min(margin, SURE_ENOUGH) if d.dtype == "fp64" else margin
        weight = (weight * (square**0.5 / weight.norm(dim=1, keepdim=True))).to(DTYPE_OF[d.dtype])
        target = d.ints(cols, rows)
        given = {"bias": d.normal(cols, offset=offset)} if offset else {}
        return Call((weight[target].clone(), weight, target), {**given, **options})

    return make


def _named(shape: tuple[int, ...], target: Any, **options: Any) -> Any:
    """96 classes, 24 features, and targets as given."""
    return lambda d: Call((d.normal(*shape, 24), d.normal(96, 24, scale=0.4), target(d)), options)


def _counted(rows: int, count: int, ignored: float) -> Any:
    return lambda d: Call(_made(d, rows, 32, 130, ignored, 2.0, None), {"num_tokens": d.tensor(count)})


def _everything(**options: Any) -> Any:
    fixed = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}
    return lambda d: Call(
        _made(d, 24, 32, 131, 0.2, 2.0, None), {"class_weight": class_weights(d, 131), "bias": d.normal(131), **fixed, **options}
    )


CASES = (
    Case("mean", "linear_cross_entropy", _simple(37, 48, 320, ignored=0.2)),
    Case("sum", "linear_cross_entropy", _simple(16, 40, 257, ignored=0.2, reduction="sum")),
    Case("none", "linear_cross_entropy", _simple(33, 32, 200, ignored=0.2, reduction="none")),
    Case("mean, recomputed", "linear_cross_entropy", _simple(37, 48, 320, ignored=0.2, recompute=True)),
    Case("sum, recomputed", "linear_cross_entropy", _simple(21, 32, 130, reduction="sum", recompute=True)),
    Case("none, three dimensions", "linear_cross_entropy", _named((3, 7), lambda d: d.ints(96, 3, 7), reduction="none")),
    Case("none, few classes", "linear_cross_entropy", _simple(640, 32, 24, reduction="none")),
    Case("one class", "linear_cross_entropy", _simple(5, 16, 1, reduction="none")),
    Case("31 classes", "linear_cross_entropy", _simple(130, 33, 31, ignored=0.1)),
    Case("4001 classes", "linear_cross_entropy", _simple(7, 24, 4001)),
    Case("several chunks", "linear_cross_entropy", _simple(600, 24, 5000, ignored=0.2), small=False),
    Case("several chunks, recomputed", "linear_cross_entropy", _simple(600, 24, 5000, reduction="none"), small=False),
    Case("no rows, sum", "linear_cross_entropy", _simple(0, 24, 64, reduction="sum")),
    Case("no rows, none", "linear_cross_entropy", _simple(0, 24, 64, reduction="none")),
    Case("first and last rows ignored", "linear_cross_entropy", _named((5,), lambda d: d.tensor([IGNORE, 3, 95, 0, IGNORE]))),
    Case("all ignored, token count", "linear_cross_entropy", _counted(6, 40, ignored=1.0)),
    Case("token count", "linear_cross_entropy", _counted(24, 100, ignored=0.3)),
    Case("int32 targets", "linear_cross_entropy", _named((20,), lambda d: d.ints(96, 20).int())),
    Case("bias", "linear_cross_entropy", _biased(33, 32, 150)),
    Case("bias, none", "linear_cross_entropy", _biased(33, 32, 131, reduction="none")),
    Case("fp32 weight", "linear_cross_entropy", _simple(24, 32, 128, weight_dtype="fp32"), dtypes=("bf16", "fp16")),
    Case("fp32 bias", "linear_cross_entropy", _biased(24, 32, 128, bias_dtype="fp32"), dtypes=("bf16", "fp16")),
    Case("class weights", "linear_cross_entropy", _weighted(40, 32, 120), frozen=("class_weight",)),
    Case("smoothing", "linear_cross_entropy", _simple(30, 32, 150, ignored=0.2, label_smoothing=0.1)),
    Case("z-loss", "linear_cross_entropy", _simple(30, 32, 150, ignored=0.2, z_loss=1e-2)),
    Case("soft cap", "linear_cross_entropy", _simple(30, 32, 150, scale=10.0, softcap=30.0)),
    Case("everything", "linear_cross_entropy", _everything(), frozen=("class_weight",)),
    Case("everything, none", "linear_cross_entropy", _everything(reduction="none"), frozen=("class_weight",)),
    Case("confident", "linear_cross_entropy", lambda d: _confident(d, 40, 64, 100), kind="confident"),
    Case("confident, 1 - 1e-5", "linear_cross_entropy", _outstanding(40, 256, 100, 17.5), kind="confident"),
    Case("confident, 1 - 1e-5, none", "linear_cross_entropy", _outstanding(40, 256, 100, 17.5, reduction="none"), kind="confident"),
    Case("logits around 1000", "linear_cross_entropy", _outstanding(40, 64, 100, 3.0, 1000.0), kind="cancelling"),
    Case(
        "logits around -1000, recomputed",
        "linear_cross_entropy",
        _outstanding(40, 64, 100, 3.0, -1000.0, label_smoothing=0.1, z_loss=1e-6, recompute=True),
        kind="cancelling",
    ),
    Case("only x learns", "linear_cross_entropy", _simple(33, 32, 128), frozen=(1,)),
    Case("only the weight learns", "linear_cross_entropy", _simple(33, 32, 128), frozen=(0,)),
    Case("only the weight learns, none", "linear_cross_entropy", _simple(33, 32, 128, reduction="none"), frozen=(0,)),
)
