"""What is measured: for every public function the sizes that `--shape` names, the arguments made of them, and its standard shapes."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ops_math import catalog, checks, keywords
from ops_math.spec import DTYPE_OF, Call
from ops_math.testing import Draw

ROWS = ("16384x4096", "32768x1024", "8192x8192", "8191x5003")
FEW_ROWS = ("256x256", "1024x1000")
QKV = "BATCHxSEQxHEADSxKV_HEADSxWIDTH"
WIDTHS, HEIGHTS = (64, 16384), (1, 1_000_000)  # of random shapes: columns, rows


class DeviceDraw(Draw):
    """Draws on the device itself: gigabytes of input in milliseconds."""

    def normal(self, *shape: int, scale: float = 1.0, offset: float = 0.0, dtype: str | None = None) -> torch.Tensor:
        """Normal numbers, `offset + scale * N(0, 1)`."""
        return torch.randn(*shape, device=self.device, dtype=DTYPE_OF[dtype or self.dtype]).mul_(scale).add_(offset)

    def uniform(self, *shape: int, dtype: str | None = None) -> torch.Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(*shape, device=self.device, dtype=DTYPE_OF[dtype or self.dtype])

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high)."""
        return torch.randint(0, max(high, 1), shape, device=self.device)


Sizes = tuple[int, ...]
Make = Callable[[Draw, Sizes], tuple[Any, ...]]
Keywords = dict[str, Any]


class Entry(NamedTuple):
    """How one function is measured.

    Attributes:
        sizes: what `--shape` names.
        make: its positional arguments.
        shapes: standard shapes on a GPU, with keyword arguments.
        small: the same on a CPU, of milliseconds.
        phases: `fwd`, `bwd`, or `both` (forward and backward as one call, where a rival computes gradients in its forward).
        frozen: positions that get no gradient.
        keywords: keyword arguments that follow from the sizes.
        random: whether results depend on a draw, so that two implementations cannot be compared.
    """

    sizes: str
    make: Make
    shapes: tuple[tuple[str, Keywords], ...]
    small: tuple[tuple[str, Keywords], ...]
    phases: tuple[str, ...] = ("fwd", "bwd")
    frozen: tuple[int, ...] = ()
    keywords: Callable[[Sizes], Keywords] = lambda n: {}
    random: bool = False

    @property
    def takes_rows(self) -> bool:
        """Whether its shape is rows and columns, so that random ones can be drawn."""
        return self.sizes in ("ROWSxCOLS", "ROWSxCLASSES")


def _plain(*shapes: str) -> tuple[tuple[str, Keywords], ...]:
    return tuple((shape, {}) for shape in shapes)


def _rows(make: Make, shapes: tuple[str, ...] = ROWS, small: tuple[str, ...] = FEW_ROWS, **options: Any) -> Entry:
    return Entry("ROWSxCOLS", make, _plain(*shapes), _plain(*small), **options)


def _qkv(d: Draw, n: Sizes) -> tuple[Any, ...]:
    batch, seq, heads, kv_heads, width = n
    return d.normal(batch, seq, heads, width), d.normal(batch, seq, kv_heads, width), d.normal(batch, seq, kv_heads, width)


def _packed(d: Draw, n: Sizes) -> torch.Tensor:
    batch, seq, heads, kv_heads, width = n
    return d.normal(batch, seq, (heads + 2 * kv_heads) * width)


def _angles(d: Draw, n: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    return d.uniform(n[1], n[4] // 2), d.uniform(n[1], n[4] // 2)


def _heads(n: Sizes) -> Keywords:
    return {"num_heads": n[2], "num_kv_heads": n[3]}


def _head(d: Draw, n: Sizes) -> tuple[Any, ...]:
    rows, hidden, classes = n
    return d.normal(rows, hidden), d.normal(classes, hidden, scale=hidden**-0.5), d.ints(classes, rows)


CAUSAL, FULL = {"causal": True}, {"causal": False}
ATTENTION = (
    ("4x4096x32x8x128", CAUSAL),
    ("1x16384x32x8x128", CAUSAL),
    ("8x2048x32x8x64", CAUSAL),
    ("4x4096x32x32x128", FULL),
    ("32x512x16x16x64", FULL),
)
FEW_ATTENTION = (("2x128x4x2x64", CAUSAL), ("4x64x4x4x64", FULL))
ROPE, FEW_ROPE = _plain("4x4096x32x8x128", "8x2048x32x8x64"), _plain("2x256x4x2x64")

CALLS: dict[str, Entry] = {
    "linear": Entry(
        "ROWSxINPUTSxOUTPUTS",
        lambda d, n: (d.normal(n[0], n[1]), d.normal(n[2], n[1], scale=n[1] ** -0.5)),
        _plain("8192x4096x4096", "16384x2048x8192"),
        _plain("256x256x256"),
    ),
    "rms_norm": _rows(lambda d, n: (d.normal(*n), d.normal(n[1]))),
    "add_rms_norm": _rows(lambda d, n: (d.normal(*n), d.normal(*n), d.normal(n[1]))),
    "layer_norm": _rows(lambda d, n: (d.normal(*n), d.normal(n[1]), d.normal(n[1]))),
    "add_layer_norm": _rows(lambda d, n: (d.normal(*n), d.normal(*n), d.normal(n[1]), d.normal(n[1]))),
    "softmax": _rows(lambda d, n: (d.normal(*n),)),
    "dropout": _rows(lambda d, n: (d.normal(*n), 0.1), random=True),
    "swiglu": _rows(lambda d, n: (d.normal(*n), d.normal(*n)), ("8192x14336",), ("512x1376",)),
    "swiglu_packed": _rows(lambda d, n: (d.normal(n[0], 2 * n[1]),), ("8192x14336",), ("512x1376",)),
    "geglu": _rows(lambda d, n: (d.normal(*n), d.normal(*n)), ("8192x14336",), ("512x1376",)),
    "geglu_packed": _rows(lambda d, n: (d.normal(n[0], 2 * n[1]),), ("8192x14336",), ("512x1376",)),
    "gelu": _rows(lambda d, n: (d.normal(*n),), ("16384x4096", "8192x14336")),
    "rope": Entry(QKV, lambda d, n: (*_qkv(d, n)[:2], *_angles(d, n)), ROPE, FEW_ROPE, frozen=(2, 3)),
    "rope_qkv": Entry(QKV, lambda d, n: (_packed(d, n), *_angles(d, n)), ROPE, FEW_ROPE, frozen=(1, 2), keywords=_heads),
    "cross_entropy": Entry(
        "ROWSxCLASSES", lambda d, n: (d.normal(*n), d.ints(n[1], n[0])), _plain("8192x128256", "16384x30522"), _plain("256x8192"),
        phases=("fwd", "bwd", "both"),
    ),
    "linear_cross_entropy": Entry(
        "ROWSxHIDDENxCLASSES", _head, _plain("8192x4096x128256", "16384x2048x128256"), _plain("256x128x4096"), phases=("both",)
    ),
    "attention": Entry(QKV, _qkv, ATTENTION, FEW_ATTENTION),
    "attention_qkv": Entry(QKV, lambda d, n: (_packed(d, n),), ATTENTION[2:3] + ATTENTION[4:], FEW_ATTENTION[:1], keywords=_heads),
}  # fmt: skip


def sizes_of(function: str, shape: str) -> Sizes:
    """The numbers of a shape such as `16384x4096`."""
    wanted = CALLS[function].sizes
    parts = shape.lower().split("x")
    if len(parts) != wanted.count("x") + 1 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        checks.fail("bench", "--shape", f"{wanted} for {function}", repr(shape), "Write it like 16384x4096.")
    return tuple(int(part) for part in parts)


def keywords_of(given: list[str]) -> Keywords:
    """`causal=true eps=1e-5` as keyword arguments."""
    found: Keywords = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or not name:
            checks.fail("bench", "--with", "KEYWORD=VALUE", repr(one), "Write it like causal=true.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def check_keywords(function: str, given: Keywords) -> None:
    """The function takes these keywords and values of this kind, and none of them is what is drawn for it.

    Raises: ArgumentError, with the keyword that is meant where one is.
    """
    if not given:
        return
    entry, public = CALLS[function], catalog.public_functions()[function].public[function]
    sizes = sizes_of(function, entry.small[0][0])
    drawn = (*keywords.in_order(public)[: len(entry.make(DeviceDraw(0, "fp32", torch.device("cpu")), sizes))], *entry.keywords(sizes))
    names = tuple(inspect.signature(public).parameters)
    for name, value in given.items():
        if name not in names:
            checks.fail("bench", "--with", f"a keyword of {function}", name, keywords.advice(function, name, names))
        if name in drawn:
            checks.fail("bench", "--with", f"a keyword of {function} beside {', '.join(drawn)}", name, "Those follow from --shape.")
        said = keywords.unfit(public, name, value)
        if said is not None:
            checks.fail("bench", "--with", f"{name}= and {said[0]} for {function}", said[1], said[2])


def call_of(function: str, shape: str, dtype: str, device: torch.device, keywords: Keywords) -> Call:
    """The arguments of a call, drawn anew from the device's generator."""
    entry, sizes = CALLS[function], sizes_of(function, shape)
    return Call(entry.make(DeviceDraw(0, dtype, device), sizes), {**entry.keywords(sizes), **keywords})


def label(shape: str, keywords: Keywords) -> str:
    """A shape as rows name it: `1x16384x32x8x128 causal=True`."""
    return " ".join([shape, *(f"{name}={value}" for name, value in keywords.items())])


def random_shapes(function: str, count: int, seed: int, most_numbers: int) -> list[str]:
    """Shapes with widths of 64 to 16,384 and 1 to 1,000,000 rows, each as likely in every octave.

    Args:
        function: one that takes rows and columns.
        count: how many.
        seed: the same shapes for the same seed, whatever the function; memory only takes rows away.
        most_numbers: rows times columns at most.
    """
    if not CALLS[function].takes_rows:
        able = ", ".join(name for name, entry in CALLS.items() if entry.takes_rows)
        checks.fail("bench", "--random", "used with an operator of rows and columns", function, f"Such are {able}.")
    source = random.Random(seed)
    shapes = []
    for _ in range(count):
        cols, rows = (round(math.exp(source.uniform(math.log(low), math.log(high)))) for low, high in (WIDTHS, HEIGHTS))
        shapes.append(f"{max(1, min(rows, most_numbers // cols))}x{cols}")
    return shapes
