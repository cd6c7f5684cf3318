"""What is kept of a tensor in light mode: a fingerprint of its bits and a few sums, computed where the tensor is.

| part | numbers | what it tells |
|---|---|---|
| fingerprint | 2 x 64 bits | whether two tensors hold the same bits in the same places |
| l2, max | 2 | size; of the finite elements |
| NaN, infinity | 2 | counts |
| sketch | 64 | how far two tensors are apart, wherever they differ |
| samples | 16 | values to look at, evenly spaced from the first element to the last |

The sketch adds up the elements with pseudo-random signs into 64 sums, element i into sum i mod 64 (Charikar, Chen and Farach-Colton,
2002): the squared distance of two sketches has the squared distance of the tensors as its mean, so that one wrong row in a thousand is
seen, which neither l2 nor samples would show.

The fingerprint is a sum of words of 64 bits modulo 2^64, each multiplied by an odd number that belongs to its place. High halves are mixed
into low ones first, since a change of the highest bit alone would survive any odd factor as it is and two would cancel.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

SKETCH, SAMPLES = 64, 16
WORDS = 4096  # words that have factors of their own; rows of so many words have factors again
SIGNS = SKETCH * 1021  # elements that have signs of their own
LENGTH = 2 + SKETCH + SAMPLES + 4
_SEED = 0x0B5E55ED
_LOW = 0xFFFFFFFF


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


@functools.lru_cache(maxsize=16)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two rows of odd 64-bit factors [2, WORDS], and signs [SIGNS]. Drawn on the CPU, so that all devices have the same."""
    generator = torch.Generator().manual_seed(_SEED)
    odd = torch.randint(-(2**63), 2**63 - 1, (2, WORDS), generator=generator) | 1
    signs = torch.randint(0, 2, (SIGNS,), generator=generator).mul_(2).sub_(1).to(torch.int8)
    return odd.to(device), signs.to(device)


def _row_factors(rows: int, device: torch.device) -> Tensor:
    """Odd factors [2, rows] of rows of words: a bijective mixing of the row's number (splitmix64; Steele et al., 2014)."""
    z = torch.arange(1, 2 * rows + 1, device=device) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z | 1).view(2, rows)


def _words(flat: Tensor) -> Tensor:
    """The bits of a flat tensor as int64 words [rows, WORDS], with zeros at the end."""
    raw = flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)
    size = raw.numel()
    count = -(-size // 8)
    rows = max(-(-count // WORDS), 1)
    if size == 8 * rows * WORDS and raw.storage_offset() % 8 == 0:
        return raw.view(torch.int64).view(rows, WORDS)
    if count <= WORDS:  # small: only as many words as there are
        rows, width = 1, max(count, 1)
    else:
        width = WORDS
    padded = raw.new_zeros(8 * rows * width)
    padded[:size] = raw
    return padded.view(torch.int64).view(rows, width)


def fingerprint(flat: Tensor) -> Tensor:
    """128 bits [2], int64, of a flat contiguous tensor; every bit and its place count."""
    words = _words(flat)
    words = words ^ ((words >> 32) & _LOW)
    rows, width = words.shape
    odd, _ = _factors(flat.device)
    both = torch.stack([(words * odd[i, :width]).sum(1) for i in range(2)])
    both = both ^ ((both >> 32) & _LOW)
    return (both * _row_factors(rows, flat.device)).sum(1)


def _sketch(flat: Tensor) -> Tensor:
    """Signed sums [64], float64."""
    _, signs = _factors(flat.device)
    count = flat.numel()
    whole = count // SIGNS * SIGNS
    total = torch.zeros(SKETCH, dtype=torch.float64, device=flat.device)
    if whole:
        total = total + (flat[:whole].view(-1, SIGNS) * signs).view(-1, SKETCH).sum(0, dtype=torch.float64)
    rest = flat[whole:] * signs[: count - whole]
    even = rest.numel() // SKETCH * SKETCH
    if even:
        total = total + rest[:even].view(-1, SKETCH).sum(0, dtype=torch.float64)
    total[: rest.numel() - even] += rest[even:]
    return total


def _spaced(count: int) -> list[int]:
    """Places of the samples."""
    if count <= SAMPLES:
        return list(range(count))
    return [i * (count - 1) // (SAMPLES - 1) for i in range(SAMPLES)]


@torch.no_grad()
def measure(t: Tensor) -> Tensor:
    """The figures of a tensor as float64 [LENGTH] on its device; nothing waits for the device.

    Args:
        t: any shape, strides and dtype; complex numbers count as pairs. It is not written to.
    """
    t = t.detach()
    flat = torch.view_as_real(t.resolve_conj()).reshape(-1) if t.is_complex() else t.resolve_neg().reshape(-1)
    flat = flat.contiguous()
    bits = fingerprint(flat)
    if flat.is_floating_point():
        nans, infinities = (flat != flat).sum(), torch.isinf(flat).sum()
        values = torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
    else:
        nans = infinities = torch.zeros((), dtype=torch.int64, device=flat.device)
        values = flat.double()
    places = _spaced(flat.numel())
    samples = torch.zeros(SAMPLES, dtype=torch.float64, device=flat.device)
    if flat.numel():
        samples[: len(places)] = flat[torch.tensor(places, device=flat.device)].double()
        top, l2 = values.abs().max().double(), torch.linalg.vector_norm(values, dtype=torch.float64)
    else:
        top = l2 = torch.zeros((), dtype=torch.float64, device=flat.device)
    counts = torch.cat([bits, torch.stack([nans, infinities])]).view(torch.float64)
    return torch.cat([torch.stack([l2, top]), _sketch(values), samples, counts])


def unpack(row: Tensor, count: int) -> Figures:
    """Figures from a row of `measure` that has arrived on the CPU.

    Args:
        row: [LENGTH], float64.
        count: elements that the tensor has.
    """
    numbers = row[:-4].tolist()
    high, low, nans, infinities = row[-4:].clone().view(torch.int64).tolist()
    return Figures(
        f"{high & (2**64 - 1):016x}{low & (2**64 - 1):016x}",
        numbers[0],
        numbers[1],
        nans,
        infinities,
        tuple(numbers[2 : 2 + SKETCH]),
        tuple(numbers[2 + SKETCH : 2 + SKETCH + min(count, SAMPLES)]),
    )
