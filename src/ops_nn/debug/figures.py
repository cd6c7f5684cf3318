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
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor, int64

import ops_math as om

SKETCH, SAMPLES = 64, 16


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

    def distance(self, other: Figures) -> float:
        """An estimate of the relative l2 distance, good to a third; 0 where both have the same bits.

        Infinite where one has NaN or infinities that the other has not.
        """
        if self.fingerprint == other.fingerprint:
            return 0.0
        if (self.nans, self.infinities) != (other.nans, other.infinities):
            return math.inf
        size = max(self.l2, 1e-300)
        apart = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(self.sketch, other.sketch, strict=True)))
        return max(apart, abs(self.l2 - other.l2)) / size

    def ratio(self, other: Figures) -> tuple[float, float]:
        """The factor k for which k times this is nearest to the other, and the relative distance that is left then."""
        power = math.fsum(a * a for a in self.sketch)
        if not power:
            return 0.0, math.inf
        k = math.fsum(a * b for a, b in zip(self.sketch, other.sketch, strict=True)) / power
        left = math.sqrt(math.fsum((b - k * a) ** 2 for a, b in zip(self.sketch, other.sketch, strict=True)))
        return k, left / max(other.l2, 1e-300)


def measure(t: Tensor) -> Tensor:
    """The figures of one tensor [86] as `om.FigureTable` gives them, on the CPU."""
    table = om.FigureTable()
    table.add(t)
    return table.fetch()[0]


def unpack(row: Tensor, count: int) -> Figures:
    """Figures from a row that has arrived on the CPU.

    Args:
        row: as from `measure`.
        count: elements that the tensor has.
    """
    squares, top, nans, infinities, *numbers = row[:-2].tolist()
    high, low = row[-2:].contiguous().view(int64).tolist()
    return Figures(
        f"{high & (2**64 - 1):016x}{low & (2**64 - 1):016x}",
        math.sqrt(squares),
        top,
        int(nans),
        int(infinities),
        tuple(numbers[:SKETCH]),
        tuple(numbers[SKETCH : SKETCH + min(count, SAMPLES)]),
    )
