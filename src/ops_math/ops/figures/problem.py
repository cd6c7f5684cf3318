"""How a tensor is laid out for its figures, and the fixed numbers that both implementations share.

A tensor's bytes, in the order of its elements and with zeros behind them, are words of 64 bits; 65,536 words are a chunk. A chunk is
laid out in rows of 1024 words and once more in rows of 1021, and the sums of its columns modulo 2^64, 2045 of them, are what is hashed:
each, and the high 32 bits of each, times a number of its own of 64 bits add up modulo 2^64 to each half of the chunk's hash, with other
numbers for the other half. Hashes of chunks, times an odd number of their own, and the count of bytes add up to a half of the fingerprint.

All of it is integers, so that any order of sums gives the same bits. What is exchanged within columns of one width is not within columns of
the other, and a change is seen, but for one chance in 2^64, unless it sums to nothing in every column of both. The high bits stand
apart since a flipped sign, times whatever odd number, changes one bit of a product modulo 2^64, and two of them nothing. That is two
passes of additions over the tensor; a factor for every word took ten.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

WIDTHS = (1024, 1021)
COLUMNS = sum(WIDTHS)
CHUNK_WORDS = 2**16
CHUNK_BYTES = 8 * CHUNK_WORDS  # half a MiB: a chunk stays in a core's cache, and is long enough for a call of torch
SLAB_WORDS = 4 * WIDTHS[0]  # tensors end, with zeros, at a whole slab; a slab has one sign in the sketch
SLAB_BYTES = 8 * SLAB_WORDS
CHUNK_SLABS = CHUNK_WORDS // SLAB_WORDS
SKETCH, SAMPLES = 64, 16

# Columns of a row of figures, all float64; the fingerprint's halves are int64 bits.
SUM_SQUARES, MAX, NANS, INFINITIES = range(4)
SKETCH_AT = 4
SAMPLES_AT = SKETCH_AT + SKETCH
HASH_AT = SAMPLES_AT + SAMPLES
LENGTH = HASH_AT + 2

# Values of these are read where they are; those of other dtypes, which are rare in a model, in a copy in float64.
COUNTED = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64))
_MASK = 2**64 - 1


def mixed(number: int) -> int:
    """64 pseudo-random bits that belong to a number (splitmix64; Steele et al., 2014), as an int64."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return signed(z ^ (z >> 31))


def signed(number: int) -> int:
    """A number modulo 2^64 as an int64."""
    return (number + 2**63 & _MASK) - 2**63


@functools.lru_cache(maxsize=4096)
def chunk_factor(chunk: int, half: int) -> int:
    """The odd number that a chunk's hash is multiplied by."""
    return mixed(2 * chunk + half) | 1


def slab_sign(slab: int) -> int:
    """1 or -1 for a slab of a tensor: the sign that it has in the sketch."""
    return 1 - 2 * (mixed(slab) >> 62 & 1)


LENGTH_FACTORS = (mixed(-2) | 1, mixed(-3) | 1)


@functools.lru_cache(maxsize=32)
def factors(device: torch.device) -> Tensor:
    """Factors [2, 2, 2045], int64: for each half those of columns, of width 1024 first, and those of columns' high bits.

    A word is in one column of each width: the first has an odd factor and the second an even one, so that what one bit changes does not
    cancel. Made of integers alone: every device and every version of PyTorch has the same.
    """
    drawn = torch.tensor([mixed(2**40 + n) for n in range(4 * COLUMNS)], dtype=torch.int64).view(2, 2, COLUMNS)
    drawn[..., : WIDTHS[0]] |= 1
    drawn[..., WIDTHS[0] :] &= -2
    return drawn.to(device)


@functools.lru_cache(maxsize=32)
def block_signs(device: torch.device) -> Tensor:
    """Signs [512], float32, of the blocks of 64 elements of a slab in the sketch; a slab of wider elements has fewer."""
    signs = [1.0 - 2 * (mixed(2**32 + n) >> 62 & 1) for n in range(SLAB_BYTES // SKETCH)]
    return torch.tensor(signs, dtype=torch.float32).to(device)


def spaced(count: int) -> list[int]:
    """Places of the samples among `count` elements: evenly from the first to the last."""
    if count <= SAMPLES:
        return list(range(count))
    return [i * (count - 1) // (SAMPLES - 1) for i in range(SAMPLES)]
