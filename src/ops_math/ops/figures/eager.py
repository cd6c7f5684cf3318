"""Figures on a CPU: chunk by chunk, so that each is read from memory once and all further passes find it in the cache.

Columns and sketches of some chunks are kept and folded together, since on a small tensor a call of torch costs more than its work.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ops_math.ops.figures.problem import (
    CHUNK_BYTES,
    CHUNK_SLABS,
    COLUMNS,
    COUNTED,
    LENGTH,
    SAMPLES,
    SAMPLES_AT,
    SKETCH,
    SKETCH_AT,
    SLAB_BYTES,
    SLAB_WORDS,
    WIDTHS,
    block_signs,
    chunk_factor,
    factors,
    slab_sign,
    spaced,
)

CPU = torch.device("cpu")
KEPT = 16  # chunks whose columns are folded together: with sketches and high bits 560 KiB, which stay in the cache
PARTS = 8  # parts of a slab's sketch that are added up in float32 before float64 takes over
ALIGNMENT = 64  # bytes; products of vectors may round otherwise where a vector begins elsewhere
SMALL = 1e-28  # a sum of squares below this in float32 may have lost some


class Sizes(NamedTuple):
    """Sum of squares, largest magnitude, NaN and infinities."""

    squares: float
    top: float
    nans: int
    infinities: int


def _together(parts: list[Sizes]) -> Sizes:
    """Of a tensor, from those of its chunks; zeros where it has none."""
    squares, tops, nans, infinities = zip(*parts, strict=True) if parts else ((), (), (), ())
    return Sizes(math.fsum(squares), max(tops, default=0.0), sum(nans), sum(infinities))


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


@functools.lru_cache(maxsize=16)
def _summing(size: int, dtype: torch.dtype) -> Tensor:
    """[8, B]: takes the B blocks of a slab's elements of `size` bytes to 8 signed sums of blocks."""
    signs = block_signs(CPU)[: SLAB_BYTES // size // SKETCH].to(dtype)
    return torch.block_diag(*signs.view(PARTS, 1, -1).unbind()).contiguous()


@functools.lru_cache(maxsize=4096)
def _slab_signs(first: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([slab_sign(first + n) for n in range(CHUNK_SLABS)], dtype=dtype)


@functools.lru_cache(maxsize=1024)
def _places(count: int) -> Tensor:
    return torch.tensor(spaced(count), dtype=torch.int64)


class Rows:
    """The figures of tensors on the CPU, a row each, in the order in which they are added."""

    device = CPU

    def __init__(self) -> None:
        self.sizes: list[Sizes] = []
        self.samples: list[Tensor] = []
        self.folded: list[tuple[Tensor, Tensor, Tensor]] = []
        self.columns = torch.empty(KEPT, COLUMNS, dtype=torch.int64)
        self.high = torch.empty_like(self.columns)
        self.slots = [columns.split(WIDTHS) for columns in self.columns.unbind()]
        self.sketches = torch.empty(KEPT, PARTS, SKETCH, dtype=torch.float64)
        self.waiting: list[tuple[int, int]] = []  # row and chunk of each slot in use
        self.scratch = torch.zeros(CHUNK_BYTES // 8, dtype=torch.int64)
        self.wide = torch.empty(CHUNK_BYTES // 2, dtype=torch.float32)

    @property
    def count(self) -> int:
        """Rows so far."""
        return len(self.sizes)

    def add(self, tensors: list[Tensor], sketch: bool) -> None:
        """Take contiguous tensors [N]; they may be written to afterwards."""
        for flat in tensors:
            self._add(flat, sketch)

    def _add(self, flat: Tensor, sketch: bool) -> None:
        row, count = self.count, flat.numel()
        if flat.dtype in COUNTED:
            found = self._walk(row, flat, sketch)
            known = flat
        else:
            known = flat.double()
            self._walk(row, flat, None)
            found = self._walk(row, known, sketch, hashed=False)
        self.sizes.append(found[0] if len(found) == 1 else _together(found))
        self.samples.append(known.index_select(0, _places(count)) if count else known)

    def _walk(self, row: int, flat: Tensor, sketch: bool | None, hashed: bool = True) -> list[Sizes]:
        """Go through the chunks of a tensor, once for its bits and its values; without its values where `sketch` is None."""
        size, count = flat.element_size(), flat.numel()
        per_chunk, per_slab = CHUNK_BYTES // size, SLAB_BYTES // size
        found: list[Sizes] = []
        ready = flat.data_ptr() % ALIGNMENT == 0 and flat.storage_offset() * size % 8 == 0
        for chunk, start in enumerate(range(0, count, per_chunk)):
            length = min(per_chunk, count - start)
            piece = flat if count <= per_chunk else flat[start : start + length]
            if not ready or length % per_slab:
                piece = self._padded(piece, length, per_slab)
            place = self._place(row, chunk)
            if hashed:
                self._hash(place, piece.view(torch.int64))
            else:
                self.columns[place].zero_()
            if sketch is None:
                self.sketches[place].zero_()
                continue
            values = self._values(piece)
            found.append(self._sizes(values))
            if not sketch:
                self.sketches[place].zero_()
                continue
            if found[-1].nans or found[-1].infinities:
                values = _finite(values)
            self._sketch(place, chunk, values.view(-1, per_slab))
        return found

    def _place(self, row: int, chunk: int) -> int:
        """The slot of a chunk."""
        if len(self.waiting) == KEPT:
            self._fold()
        self.waiting.append((row, chunk))
        return len(self.waiting) - 1

    def _padded(self, piece: Tensor, length: int, per_slab: int) -> Tensor:
        """A copy in whole slabs, with zeros at its end."""
        whole = self.scratch[: -(-length // per_slab) * SLAB_WORDS].view(piece.dtype)
        whole[length:].zero_()
        whole[:length].copy_(piece)
        return whole

    def _hash(self, place: int, words: Tensor) -> None:
        """Sums of the columns of a chunk of whole slabs."""
        wide, narrow = self.slots[place]
        count = words.numel()
        torch.sum(words.view(-1, WIDTHS[0]), 0, out=wide)
        rows = count // WIDTHS[1]
        torch.sum(words.as_strided((rows, WIDTHS[1]), (WIDTHS[1], 1)), 0, out=narrow)
        rest = count - rows * WIDTHS[1]
        narrow[:rest].add_(words[-rest:])

    def _values(self, piece: Tensor) -> Tensor:
        """As float32 or, for float64 and integers, float64."""
        if piece.dtype in (torch.float32, torch.float64):
            return piece
        return self.wide[: piece.numel()].copy_(piece) if piece.is_floating_point() else piece.double()

    def _sizes(self, values: Tensor) -> Sizes:
        low, high = values.amin().item(), values.amax().item()
        nans = infinities = 0
        if not math.isfinite(high - low):
            nans, infinities = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
            values = _finite(values)
            low, high = values.amin().item(), values.amax().item()
        top = max(-low, high)
        squares = torch.dot(values, values).item()
        if values.dtype == torch.float32 and top and not SMALL < squares < math.inf:
            squares = values.double().square_().sum().item()
        return Sizes(squares, top, nans, infinities)

    def _sketch(self, place: int, chunk: int, values: Tensor) -> None:
        """Values [S, E] of S slabs: their sum with the slabs' signs, then 64 sums with the blocks'."""
        slabs, size = values.shape
        signs = _slab_signs(chunk * CHUNK_SLABS, values.dtype)
        slab = torch.matmul(signs if slabs == CHUNK_SLABS else signs[:slabs], values)
        self.sketches[place].copy_(torch.mm(_summing(SLAB_BYTES // size, values.dtype), slab.view(-1, SKETCH)))

    def _fold(self) -> None:
        """Make hashes of the columns that are kept, and sketches of their parts."""
        count = len(self.waiting)
        if not count:
            return
        rows = torch.tensor([row for row, _ in self.waiting], dtype=torch.int64)
        weights = torch.tensor([[chunk_factor(chunk, half) for half in (0, 1)] for _, chunk in self.waiting], dtype=torch.int64)
        columns = self.columns[:count]
        high = torch.bitwise_right_shift(columns, 32, out=self.high[:count])
        halves = torch.stack([torch.mv(columns, f) + torch.mv(high, g) for f, g in factors(CPU)], 1)
        self.folded.append((rows, halves * weights, self.sketches[:count].sum(1)))
        self.waiting.clear()

    def fetch(self) -> Tensor:
        """All rows [N, LENGTH], float64, but for the count of bytes in the fingerprint."""
        self._fold()
        count = len(self.sizes)
        rows = torch.zeros(count, LENGTH, dtype=torch.float64)
        hashes = torch.zeros(count, 2, dtype=torch.int64)
        if count:
            rows[:, :SKETCH_AT] = torch.tensor(self.sizes, dtype=torch.float64)
        for places, halves, sketch in self.folded:
            hashes.index_add_(0, places, halves)
            rows[:, SKETCH_AT:SAMPLES_AT].index_add_(0, places, sketch)
        whole = [n for n, some in enumerate(self.samples) if some.numel() == SAMPLES]
        for dtype in {self.samples[n].dtype for n in whole}:
            mine = [n for n in whole if self.samples[n].dtype == dtype]
            rows[torch.tensor(mine), SAMPLES_AT : SAMPLES_AT + SAMPLES] = torch.stack([self.samples[n] for n in mine]).double()
        for n, some in enumerate(self.samples):
            if some.numel() < SAMPLES:
                rows[n, SAMPLES_AT : SAMPLES_AT + some.numel()] = some
        rows[:, SAMPLES_AT + SAMPLES :] = hashes.view(torch.float64)
        return rows
