"""What is kept of a tensor in light mode: a fingerprint of its bits and a few sums, computed where the tensor is by `om.FigureTable`.

| part | numbers | what it tells |
|---|---|---|
| fingerprint | 2 x 64 bits | whether two tensors hold the same bits in the same places |
| l2, max | 2 | size; of the finite elements |
| NaN, infinity | 2 | counts |
| sketch | 64 | how far two tensors are apart, wherever they differ |
| samples | 16 | values to look at, evenly spaced from the first element to the last |

The sketch adds up the elements with pseudo-random signs into 64 sums, so that one wrong row in a thousand is seen, which neither l2 nor
samples would show.

Of a large weight a light trace reads an element of every row (`thinned`): weights are what a step is given, and reading all of them took as
long as reading all of their gradients, 3 % of a small model's step on a CPU. Weights of another start, a row, a column, a rounding and an
exchange are seen so; of a few single elements only what they do to results and gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import ops_math as om

SIZES, SKETCH, SAMPLES = 4, 64, 16
SLAB_BYTES = 2**15  # as `om.FigureTable` cuts a tensor
MASK = 2**64 - 1
WHOLE_BELOW = 2**14  # elements: smaller weights and buffers, as norms', biases and the angles of positions, are read whole
FEWEST, STEP = 256, 251  # elements that are read of a weight, and how far they are apart where rows are shorter: a prime


class Figures(NamedTuple):
    """What is known of a tensor's values.

    Attributes:
        fingerprint: 128 bits in hexadecimal.
        l2, max: of the finite elements.
        nans, infinities: counts.
        sketch: 64 signed sums.
        samples: up to 16 values.
    """

    fingerprint: str
    l2: float
    max: float
    nans: int
    infinities: int
    sketch: tuple[float, ...]
    samples: tuple[float, ...]

    def distance(self, other: Figures, alike: bool = True) -> float:
        """An estimate of the relative l2 distance, good to a third; 0 where both have the same bits.

        Infinite where one has NaN or infinities that the other has not. Sketches that are not `alike`, as `sketched_alike` says, are sums
        of other elements: there the samples and the sizes must do, which know the distance to a factor of two.
        """
        if self.fingerprint == other.fingerprint:
            return 0.0
        if (self.nans, self.infinities) != (other.nans, other.infinities):
            return math.inf
        sizes = abs(self.l2 - other.l2) / max(self.l2, 1e-300)
        pairs = self._pairs(other, alike)
        scale = self.l2 if alike else math.sqrt(math.fsum(a * a for a, _ in pairs))
        return max(math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs)) / max(scale, 1e-300), sizes)

    def ratio(self, other: Figures, alike: bool = True) -> tuple[float, float]:
        """The factor k for which k times this is nearest to the other, and the relative distance that is left then."""
        pairs = self._pairs(other, alike)
        power, theirs = math.fsum(a * a for a, _ in pairs), math.sqrt(math.fsum(b * b for _, b in pairs))
        if not power:
            return 0.0, math.inf
        k = math.fsum(a * b for a, b in pairs) / power
        left = math.sqrt(math.fsum((b - k * a) ** 2 for a, b in pairs))
        return k, left / max(other.l2 if alike else theirs, 1e-300)

    def _pairs(self, other: Figures, alike: bool) -> list[tuple[float, float]]:
        """Sums of both, or samples that are numbers in both."""
        if alike:
            return list(zip(self.sketch, other.sketch, strict=True))
        return [(a, b) for a, b in zip(self.samples, other.samples, strict=True) if math.isfinite(a) and math.isfinite(b)]


def sketched_alike(count: int, a: torch.dtype, b: torch.dtype) -> bool:
    """Whether sketches of `count` elements in two dtypes add up the same elements with the same signs: signs go by bytes beyond 32 KiB."""
    return a.itemsize == b.itemsize or count * max(a.itemsize, b.itemsize) <= SLAB_BYTES


def measure(t: Tensor) -> Tensor:
    """The figures of one tensor [86] as `om.FigureTable` gives them, on the CPU."""
    table = om.FigureTable()
    table.add(t)
    return table.fetch()[0]


@functools.lru_cache(maxsize=1024)
def step_of(shape: tuple[int, ...]) -> int:
    """How far the elements are apart that a light trace reads of a weight; 1 where it reads them all.

    One less than a row is long: so each row is read, the first and the last too, and one column after the other. Of rows shorter than 252
    not all are read, and of few long ones more than an element each.
    """
    count = math.prod(shape)
    if len(shape) < 2 or count < WHOLE_BELOW:
        return 1
    width = shape[-1]
    of_each = -(-FEWEST * width // count)
    step = max(width // of_each - 1, STEP) if count >= FEWEST * STEP else max(width // of_each - 1, 1)
    return step + (step % width == 0)


def thinned(t: Tensor) -> Tensor:
    """The elements of a weight that a light trace reads [N], in the order of the weight; the weight itself where that is all."""
    step = step_of(t.shape)
    return t if step == 1 else t.detach().reshape(-1)[::step]


def unpack(row: Tensor, count: int) -> Figures:
    """Figures from a row that has arrived on the CPU.

    Args:
        row: as from `measure`.
        count: elements that the tensor has.
    """
    return unpack_all(row.view(1, -1), [count])[0]


def unpack_all(rows: Tensor, counts: Sequence[int]) -> list[Figures]:
    """The same for many rows [N, 86] and the elements of each."""
    marks = rows[:, -2:].contiguous().view(torch.int64).tolist()
    return [
        Figures(
            f"{high & MASK:016x}{low & MASK:016x}",
            math.sqrt(numbers[0]),
            numbers[1],
            int(numbers[2]),
            int(numbers[3]),
            tuple(numbers[SIZES : SIZES + SKETCH]),
            tuple(numbers[SIZES + SKETCH : SIZES + SKETCH + min(count, SAMPLES)]),
        )
        for numbers, (high, low), count in zip(rows.tolist(), marks, counts, strict=True)
    ]
