"""The problem in plain numbers, its cost, and the cases that every implementation is tested on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math.spec import DTYPE_OF, ITEM_SIZE, Call, Case, Cost


class CrossEntropyProblem(NamedTuple):
    """One call. `logits` and `class_weight` are dtype names, the latter empty where there are none; `softcap` is 0 for none;
    `counted` says that the mean divides by a given token count."""

    rows: int
    cols: int
    logits: str
    class_weight: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    counted: bool


def storage(p: CrossEntropyProblem) -> str:
    """The dtype the problem is stored in."""
    return p.logits


def cost(p: CrossEntropyProblem, phase: str) -> Cost:
    """The logits are read once in each phase; the backward writes their gradient."""
    logits, row = p.rows * p.cols * ITEM_SIZE[p.logits], 4 * p.rows
    weight = p.cols * ITEM_SIZE.get(p.class_weight, 0)
    per_logit = 4 + (8 if p.softcap else 0) + (2 if p.label_smoothing else 0)
    flops = (("softmax", per_logit * p.rows * p.cols),)
    read = (("logits", logits), ("target", 8 * p.rows), ("class_weight", weight))
    if phase == "fwd":
        return Cost(read, (("factors", 3 * row), ("loss", row if p.reduction == "none" else 4)), flops)
    return Cost((*read, ("factors", 3 * row), ("dloss", row if p.reduction == "none" else 4)), (("dlogits", logits),), flops)


IGNORE = -100
# By how much a target may stand out in float64: beyond, autograd of the reference, which subtracts p from 1, keeps fewer than 12 digits.
SURE_ENOUGH = 11.0


def targets(d: Any, num_classes: int, *shape: int, ignored: float = 0.0, ignore_index: int = IGNORE) -> torch.Tensor:
    """Random classes, a share of them ignored."""
    y = d.ints(num_classes, *shape)
    return torch.where(d.bools(ignored, *shape), ignore_index, y) if ignored else y


def confident(d: Any, target: torch.Tensor, num_classes: int, margin: float) -> torch.Tensor:
    """Logits whose target stands out, so that its probability is near 1; in float64 by `SURE_ENOUGH` at most."""
    z, margin = d.normal(target.numel(), num_classes), min(margin, SURE_ENOUGH) if d.dtype == "fp64" else margin
    lifted = z.double().scatter_add(1, target.clamp_min(0).view(-1, 1), z.new_full((target.numel(), 1), margin, dtype=torch.float64))
    return lifted.to(z.dtype)


def sparse_rows(d: Any, rows: int, num_classes: int) -> Call:
    """Rows of -inf, each with the target finite and, in every second row, one more class."""
    target = d.ints(num_classes - 1, rows)
    z = d.normal(rows, num_classes)
    open_ = torch.zeros(rows, num_classes, dtype=torch.bool, device=z.device).scatter_(1, target[:, None], True)
    open_[::2].scatter_(1, target[::2, None] + 1, True)
    return Call((z.masked_fill(~open_, float("-inf")), target), {})


def class_weights(d: Any, num_classes: int, dtype: str | None = "fp32") -> torch.Tensor:
    """Weights in [0, 1), every fifth zero."""
    w = d.uniform(num_classes, dtype=dtype)
    w[::5] = 0
    return w


def _simple(rows: int, cols: int, ignored: float = 0.0, scale: float = 2.0, **options: Any) -> Any:
    return lambda d: Call((d.normal(rows, cols, scale=scale), targets(d, cols, rows, ignored=ignored)), options)


def _weighted(rows: int, cols: int, ignored: float = 0.0, dtype: str = "fp32", **options: Any) -> Any:
    return lambda d: Call(
        (d.normal(rows, cols, scale=2.0), targets(d, cols, rows, ignored=ignored)),
        {"class_weight": class_weights(d, cols, dtype), **options},
    )


def _confident(rows: int, cols: int, margin: float, **options: Any) -> Any:
    def make(d: Any) -> Call:
        target = d.ints(cols, rows)
        return Call((confident(d, target, cols, margin), target), options)

    return make


def _far(rows: int, cols: int, offset: float, margin: float = 0.0, weighted: bool = False, **options: Any) -> Any:
    """Logits around `offset`; with a margin the targets stand out by it."""

    def make(d: Any) -> Call:
        target = targets(d, cols, rows, ignored=0.1)
        z = confident(d, target, cols, margin).double() + offset
        given = {"class_weight": class_weights(d, cols)} if weighted else {}
        return Call((z.to(DTYPE_OF[d.dtype]), target), {**given, **options})

    return make


def _counted(d: Any, n: int, **options: Any) -> Call:
    return Call((d.normal(24, 130, scale=2.0), targets(d, 130, 24, ignored=0.3)), {"num_tokens": d.tensor(n), **options})


W = ("class_weight",)
CASES = (
    Case("mean", "cross_entropy", _simple(37, 320, ignored=0.2)),
    Case("sum", "cross_entropy", _simple(16, 257, ignored=0.2, reduction="sum")),
    Case("none", "cross_entropy", _simple(33, 200, ignored=0.2, reduction="none")),
    Case("none, three dimensions", "cross_entropy", lambda d: Call((d.normal(3, 7, 96), d.ints(96, 3, 7)), {"reduction": "none"})),
    Case("one class", "cross_entropy", _simple(5, 1, reduction="none")),
    Case("31 classes", "cross_entropy", _simple(130, 31, ignored=0.1)),
    Case("4001 classes", "cross_entropy", _simple(7, 4001, reduction="none")),
    Case("rows off 16-byte boundaries", "cross_entropy", _simple(3, 4501, ignored=0.3)),
    Case(
        "rows off 16-byte boundaries, everything",
        "cross_entropy",
        _weighted(3, 4501, label_smoothing=0.1, z_loss=1e-3, softcap=5.0, reduction="none"),
        frozen=("class_weight",),
    ),
    Case("wide rows", "cross_entropy", _simple(3, 4512, ignored=0.3)),
    Case(
        "wide rows, everything",
        "cross_entropy",
        _weighted(3, 4512, label_smoothing=0.1, z_loss=1e-3, softcap=5.0),
        frozen=("class_weight",),
    ),
    Case("wider than a block", "cross_entropy", _simple(4, 20011, ignored=0.3), small=False),
    Case("many small rows", "cross_entropy", _simple(32768, 11, ignored=0.1), small=False),
    Case("no rows, sum", "cross_entropy", _simple(0, 64, reduction="sum")),
    Case(
        "first and last rows ignored",
        "cross_entropy",
        lambda d: Call((d.normal(9, 70), d.tensor([IGNORE, 3, 69, IGNORE, 0, 1, 2, IGNORE, IGNORE])), {}),
    ),
    Case("all ignored, sum", "cross_entropy", lambda d: Call((d.normal(6, 50), d.tensor([IGNORE] * 6)), {"reduction": "sum"})),
    Case(
        "all ignored, token count", "cross_entropy", lambda d: Call((d.normal(6, 50), d.tensor([IGNORE] * 6)), {"num_tokens": d.tensor(40)})
    ),
    Case("all ignored everywhere", "cross_entropy", lambda d: Call((d.normal(6, 50), d.tensor([IGNORE] * 6)), {"num_tokens": d.tensor(0)})),
    Case("ignore a class of the vocabulary", "cross_entropy", lambda d: Call((d.normal(40, 12), d.ints(12, 40)), {"ignore_index": 0})),
    Case("token count", "cross_entropy", lambda d: _counted(d, 100)),
    Case(
        "token count, fp32",
        "cross_entropy",
        lambda d: (
            _counted(d, 100, z_loss=1e-2)
            if d.dtype != "fp32"
            else Call((d.normal(9, 70), d.ints(70, 9)), {"num_tokens": d.tensor(33.0, torch.float32)})
        ),
        frozen=("num_tokens",),
    ),
    Case("int32 targets", "cross_entropy", lambda d: Call((d.normal(20, 96), targets(d, 96, 20, ignored=0.2).int()), {})),
    Case("class weights", "cross_entropy", _weighted(40, 120, ignored=0.2), frozen=W),
    Case("class weights, none", "cross_entropy", _weighted(25, 120, reduction="none"), frozen=W),
    Case("class weights in 16 bits", "cross_entropy", _weighted(25, 120, dtype="bf16", reduction="sum"), frozen=W),
    Case("smoothing", "cross_entropy", _simple(30, 150, ignored=0.2, label_smoothing=0.1)),
    Case("smoothing, class weights", "cross_entropy", _weighted(30, 150, ignored=0.2, label_smoothing=0.2), frozen=W),
    Case("smoothing of 1", "cross_entropy", _simple(20, 64, label_smoothing=1.0, reduction="none")),
    Case("z-loss", "cross_entropy", _simple(30, 150, ignored=0.2, z_loss=1e-2)),
    Case("z-loss, class weights", "cross_entropy", _weighted(20, 99, z_loss=1e-2, reduction="none"), frozen=W),
    Case("soft cap", "cross_entropy", _simple(30, 150, scale=20.0, softcap=30.0)),
    Case("soft cap, small logits", "cross_entropy", _simple(30, 150, scale=0.5, softcap=30.0, reduction="none")),
    Case(
        "smoothing, z-loss and soft cap",
        "cross_entropy",
        _weighted(24, 131, ignored=0.2, label_smoothing=0.1, z_loss=1e-3, softcap=5.0),
        frozen=W,
    ),
    Case(
        "everything, 4001 classes",
        "cross_entropy",
        _weighted(5, 4001, ignored=0.2, label_smoothing=0.1, z_loss=1e-3, softcap=5.0, reduction="none"),
        frozen=W,
    ),
    Case("confident, 0.99", "cross_entropy", _confident(30, 200, 11.0, reduction="none"), kind="confident"),
    Case("confident, 0.9999", "cross_entropy", _confident(30, 200, 15.0), kind="confident"),
    # A probability of 1 - 1e-5 stands 17 to 20 above; bf16 has steps of 0.125 there, and of 4 at 1,000.
    Case("confident, 1 - 1e-5", "cross_entropy", _confident(30, 200, 17.3, reduction="none"), kind="confident"),
    Case("confident, 1 - 1e-5, smoothing", "cross_entropy", _confident(30, 200, 17.3, label_smoothing=1e-6), kind="confident"),
    Case("confident, 1 - 1e-5, 4501 classes", "cross_entropy", _confident(3, 4501, 20.4, z_loss=1e-8), kind="confident"),
    Case("confident, 1 - 1e-5, 4512 classes", "cross_entropy", _confident(3, 4512, 20.4, reduction="none"), kind="confident"),
    Case("logits around 1000", "cross_entropy", _far(30, 200, 1000.0), kind="cancelling"),
    Case("logits around -1000, 4501 classes", "cross_entropy", _far(5, 4501, -1000.0, reduction="none"), kind="cancelling"),
    Case("logits around 1000, 4512 classes, smoothing", "cross_entropy", _far(5, 4512, 1000.0, label_smoothing=0.1), kind="cancelling"),
    Case(
        "logits around -1000, everything",
        "cross_entropy",
        _far(24, 131, -1000.0, weighted=True, label_smoothing=0.1, z_loss=1e-6, softcap=900.0),
        frozen=W,
        kind="cancelling",
    ),
    Case("logits around 1000, confident", "cross_entropy", _far(30, 200, 1000.0, margin=17.3, reduction="none"), kind="confident"),
    Case(
        "logits around -1000, confident, class weights",
        "cross_entropy",
        _far(24, 131, -1000.0, margin=17.0, weighted=True),
        frozen=W,
        kind="confident",
    ),
    Case("large common offset", "cross_entropy", lambda d: Call((d.normal(20, 128, offset=50.0), d.ints(128, 20)), {}), kind="cancelling"),
    Case("rows of -inf", "cross_entropy", lambda d: sparse_rows(d, 20, 90)),
    Case("scores that overflow exp", "cross_entropy", _simple(16, 64, scale=200.0), kind="confident"),
    Case(
        "view of a cat",
        "cross_entropy",
        lambda d: Call((torch.cat([d.normal(12, 40), d.normal(12, 70)], 1)[:, 40:], d.ints(70, 12)), {"reduction": "none"}),
    ),
)
