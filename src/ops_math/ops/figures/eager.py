"""Figures on a CPU: span by span, so that each is read from memory once and all further passes find it in the cache.

Reading a MiB from memory takes one thread 100 us, a pass over it in the cache 25 to 35, and a call of torch 2 to 4 even if it only makes a
view. So a call takes two chunks where they lie together, results go where they are kept, and tensors of 8 KiB or less, as a norm's weight
is, are copied into one buffer and wait there for each other. Products come first: of all passes they read fastest from memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ops_math.ops.figures.problem import (
    CHUNK_BYTES,
    CHUNK_SLABS,
    CHUNK_WORDS,
    COLUMNS,
    COUNTED,
    HASH_AT,
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
SPAN_BYTES = 2 * CHUNK_BYTES  # what one call takes at most: 1 MiB, with its float32 copy where it has one; 2 MiB is out of most caches
KEPT = 64  # chunks whose columns are folded together, 1 MiB; for 16 at a time folds took 5 ms of a small model's step, so they take 3.
# As many small tensors wait, 512 KiB.
SMALL_BYTES = 8 * WIDTHS[0]
ROOMS = (256, 1024)  # elements of small tensors that are looked at together
PARTS = 8  # parts of a slab's sketch that are added up in float32 before float64 takes over
SQUARED = 2**17  # elements whose squares are one sum
ALIGNMENT = 64  # bytes; products of vectors may round otherwise where a vector begins elsewhere
SMALL = 1e-28  # a sum of squares below this in float32 may have lost some


class Sizes(NamedTuple):
    """Sum of squares, largest magnitude, NaN and infinities."""

    squares: float
    top: float
    nans: int
    infinities: int


NOTHING = Sizes(0.0, 0.0, 0, 0)


def _together(parts: list[Sizes]) -> Sizes:
    """Of a tensor, from those of its chunks; zeros where it has none."""
    squares, tops, nans, infinities = zip(*parts, strict=True) if parts else ((), (), (), ())
    return Sizes(math.fsum(squares), max(tops, default=0.0), sum(nans), sum(infinities))


def _squares(values: Tensor) -> float:
    """Their sum: of 2^18 elements at once it is off by up to 7 units of float32 (2^-24), in two parts by up to 3."""
    count, total = values.numel(), 0.0
    for start in range(0, count, SQUARED):
        part = values if count <= SQUARED else values.narrow(0, start, min(SQUARED, count - start))
        total += torch.dot(part, part).item()
    return total


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


@functools.lru_cache(maxsize=16)
def _summing(size: int, dtype: torch.dtype) -> Tensor:
    """[8, B]: takes the B blocks of a slab's elements of `size` bytes to 8 signed sums of blocks."""
    signs = block_signs(CPU)[: SLAB_BYTES // size // SKETCH].to(dtype)
    return torch.block_diag(*signs.view(PARTS, 1, -1).unbind()).contiguous()


@functools.lru_cache(maxsize=4096)
def _slab_signs(first: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[slab_sign(first + n) for n in range(count)]], dtype=dtype)


@functools.lru_cache(maxsize=1)
def _factors() -> list[Tensor]:
    """Of columns and of their high bits, for the first half of the fingerprint and then for the second."""
    return [some.contiguous() for some in factors(CPU).view(4, COLUMNS).unbind()]


@functools.lru_cache(maxsize=1024)
def _places(count: int) -> Tensor:
    return torch.tensor(spaced(count), dtype=torch.int64)


@functools.lru_cache(maxsize=1024)
def _sixteen(count: int) -> list[int]:
    """Places of the samples, -1 where there are fewer."""
    found = spaced(count)
    return found + [-1] * (SAMPLES - len(found))


class _Small(NamedTuple):
    """A tensor of one row of words or less, whose elements wait in the buffer."""

    row: int
    length: int
    dtype: torch.dtype
    sketch: bool


class _Waiting:
    """Small tensors, a row of words each with zeros at its end, until there are enough of them."""

    def __init__(self) -> None:
        self.words = torch.zeros(KEPT, WIDTHS[0], dtype=torch.int64)
        self.slots: dict[torch.dtype, tuple[Tensor, ...]] = {}
        self.items: list[_Small] = []

    def add(self, row: int, flat: Tensor, sketch: bool) -> None:
        """Copy a tensor; there is room."""
        slots = self.slots.get(flat.dtype)
        if slots is None:
            with torch.inference_mode(False):  # what is made in it could not be written to outside
                slots = self.slots[flat.dtype] = self.words.view(flat.dtype).unbind()
        count = flat.numel()
        slots[len(self.items)].narrow(0, 0, count).copy_(flat)
        self.items.append(_Small(row, count, flat.dtype, sketch))

    def clear(self) -> None:
        """Make room."""
        self.items.clear()
        self.words.zero_()

    def numbers(self) -> list[tuple[list[int], Tensor]]:
        """For each dtype and room the rows and all that is no hash [N, HASH_AT], float64. A tensor's do not depend on who waits with it."""
        found = []
        groups: dict[tuple[torch.dtype, int], list[int]] = {}
        for n, item in enumerate(self.items):
            groups.setdefault((item.dtype, _room(item)), []).append(n)
        for (dtype, room), mine in groups.items():
            items = [self.items[n] for n in mine]
            values = self.words.view(dtype).narrow(1, 0, room)[mine].double()
            places = torch.tensor([_sixteen(item.length) for item in items])
            samples = values.gather(1, places.clamp(min=0)).masked_fill_(places < 0, 0.0)
            sizes, values = _row_sizes(values)
            blocks = values.view(len(mine), -1, SKETCH)
            signs = block_signs(CPU)[: blocks.shape[1]].double() * slab_sign(0)
            wanted = torch.tensor([[float(item.sketch)] for item in items], dtype=torch.float64)
            sketches = (blocks * signs.view(1, -1, 1)).sum(1).mul_(wanted)
            found.append(([item.row for item in items], torch.cat([sizes, sketches, samples], 1)))
        return found


def _room(item: _Small) -> int:
    """Elements that are looked at, by the tensor's own count alone, since another length of a sum may round otherwise."""
    return next((room for room in ROOMS if item.length <= room), SMALL_BYTES // item.dtype.itemsize)


def _row_sizes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes [N, 4] of rows in float64, and the rows with zeros for what is not finite."""
    low, high = values.amin(1), values.amax(1)
    counts = torch.zeros(len(values), 2, dtype=torch.float64)
    if not bool(torch.isfinite(high - low).all()):
        counts = torch.stack([torch.isnan(values).sum(1), torch.isinf(values).sum(1)], 1).double()
        values = _finite(values)
        low, high = values.amin(1), values.amax(1)
    return torch.cat([torch.stack([(values * values).sum(1), torch.maximum(-low, high)], 1), counts], 1), values


class _Sketches:
    """Parts of sketches of spans in one dtype, until they are added up."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rows: list[int] = []
        self.parts = torch.empty(KEPT, PARTS, SKETCH, dtype=dtype)
        self.slots = self.parts.unbind()
        most = SLAB_BYTES // dtype.itemsize * 2  # of 16-bit numbers as float32, of int32 as float64
        total = torch.empty(1, most, dtype=dtype)
        self.slabs = {n: (total.narrow(1, 0, n), total.narrow(1, 0, n).view(-1, SKETCH)) for n in (most // 2, most)}

    def add(self, row: int, slab: int, values: Tensor, size: int) -> None:
        """Values [S, E] of S slabs, the first of which is `slab`: their sum with the slabs' signs, then 64 sums with the blocks'."""
        count, per_slab = values.shape
        total, blocks = self.slabs[per_slab]
        torch.mm(_slab_signs(slab, count, values.dtype), values, out=total)
        torch.mm(_summing(size, values.dtype), blocks, out=self.slots[len(self.rows)])
        self.rows.append(row)

    def taken(self) -> tuple[list[int], Tensor]:
        """Rows and sketches [N, 64], float64; they are not kept any more."""
        rows, self.rows = self.rows, []
        return rows, self.parts[: len(rows)].double().sum(1)


def _together_in_memory(tensors: list[Tensor]) -> list[Tensor]:
    """The same, but that those which are not contiguous are copied, at once for each dtype, and begin at multiples of eight elements."""
    made = list(tensors)
    groups: dict[torch.dtype, list[int]] = {}
    for number, t in enumerate(tensors):
        if not t.is_contiguous():
            groups.setdefault(t.dtype, []).append(number)
    for dtype, numbers in groups.items():
        gap = torch.zeros(8, dtype=dtype)
        gaps = [gap.narrow(0, 0, n) for n in range(8)]
        parts = [part for n in numbers for part in (tensors[n], gaps[-tensors[n].numel() % 8])]
        for number, part in zip(numbers, torch.cat(parts).split([p.numel() for p in parts])[::2], strict=True):
            made[number] = part
    return made


class Rows:
    """The figures of tensors on the CPU, a row each, in the order in which they are added."""

    device = CPU

    def __init__(self) -> None:
        self.sizes: list[Sizes] = []
        self.samples: list[tuple[int, Tensor]] = []
        self.small = _Waiting()
        self.numbers: list[tuple[list[int], Tensor]] = []
        self.hashes: list[tuple[list[int], Tensor]] = []
        self.drawn: list[tuple[list[int], Tensor]] = []
        self.columns = torch.empty(KEPT, COLUMNS, dtype=torch.int64)
        self.slots: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.chunks: list[tuple[int, int]] = []  # row and chunk of each line of columns in use
        self.sketches = {dtype: _Sketches(dtype) for dtype in (torch.float32, torch.float64)}
        self.scratch = torch.empty(SPAN_BYTES // 8, dtype=torch.int64)  # for a span that is copied
        self.as_float = torch.empty(CHUNK_BYTES // 2, dtype=torch.float32)  # for a chunk of 16-bit numbers

    @property
    def count(self) -> int:
        """Rows so far."""
        return len(self.sizes)

    def add(self, tensors: list[Tensor], sketch: bool) -> None:
        """Take contiguous tensors [N]; they may be written to afterwards."""
        for flat in tensors:
            self._add(flat, sketch)

    def add_every(self, tensors: list[Tensor], steps: list[int], sketch: bool) -> None:
        """Take every so-many-th element of each; they are copied together."""
        self.add(_together_in_memory([t[::step] for t, step in zip(tensors, steps, strict=True)]), sketch)

    def _add(self, flat: Tensor, sketch: bool) -> None:
        row, count = self.count, flat.numel()
        self.sizes.append(NOTHING)
        if not count:
            return
        if flat.dtype not in COUNTED:
            known = flat.double()
            self._walk(row, flat, None)
            self.sizes[row] = _together(self._walk(row, known, sketch, hashed=False))
            self.samples.append((row, known.index_select(0, _places(count))))
        elif flat.nbytes <= SMALL_BYTES:
            if len(self.small.items) == KEPT:
                self._take_small()
            self.small.add(row, flat, sketch)
        else:
            self.sizes[row] = _together(self._walk(row, flat, sketch))
            self.samples.append((row, flat.index_select(0, _places(count))))

    def _take_small(self) -> None:
        """Make figures of the tensors that wait."""
        items = self.small.items
        if items:
            self._columns([(item.row, 0) for item in items], self.small.words, WIDTHS[0])
            self.numbers += self.small.numbers()
            self.small.clear()

    def _walk(self, row: int, flat: Tensor, sketch: bool | None, hashed: bool = True) -> list[Sizes]:
        """Go through the spans of a tensor, once for its values and its bits; without its values where `sketch` is None."""
        size, count = flat.element_size(), flat.numel()
        per_slab = SLAB_BYTES // size
        chunks = SPAN_BYTES // CHUNK_BYTES if size > 2 else 1
        per_span = chunks * CHUNK_BYTES // size
        found: list[Sizes] = []
        ready = flat.data_ptr() % ALIGNMENT == 0 and flat.storage_offset() * size % 8 == 0
        for span, start in enumerate(range(0, count, per_span)):
            length = min(per_span, count - start)
            piece = flat if count <= per_span else flat.narrow(0, start, length)
            if not ready or length % per_slab:
                piece = self._padded(piece, length, per_slab)
            if sketch is not None:
                found.append(self._values(row, chunks * span, piece, sketch))
            if hashed:
                self._hash(row, chunks * span, piece.view(torch.int64))
        return found

    def _padded(self, piece: Tensor, length: int, per_slab: int) -> Tensor:
        """A copy in whole slabs, with zeros at its end."""
        whole = self.scratch[: -(-length // per_slab) * SLAB_WORDS].view(piece.dtype)
        whole[length:].zero_()
        whole[:length].copy_(piece)
        return whole

    def _hash(self, row: int, chunk: int, words: Tensor) -> None:
        """Sums of columns of whole chunks, and of a last one of whole slabs."""
        count = words.numel()
        whole = count // CHUNK_WORDS
        if whole:
            self._columns([(row, chunk + n) for n in range(whole)], words, CHUNK_WORDS)
        rest = count - whole * CHUNK_WORDS
        if rest:
            self._columns([(row, chunk + whole)], words.narrow(0, count - rest, rest) if whole else words, rest)

    def _columns(self, owners: list[tuple[int, int]], words: Tensor, length: int) -> None:
        """Sums of the columns of the first parts of `length` words, of which each has its row and chunk."""
        count, begin = len(owners), words.storage_offset()
        if len(self.chunks) + count > KEPT:
            self._fold()
        place = (len(self.chunks), count)
        self.chunks += owners
        slots = self.slots.get(place)
        if slots is None:
            with torch.inference_mode(False):
                slots = self.slots[place] = self.columns.narrow(0, *place).split(WIDTHS, 1)
        wide, narrow = WIDTHS
        torch.sum(words.as_strided((count, length // wide, wide), (length, wide, 1)), 1, out=slots[0])
        lines, rest = divmod(length, narrow)
        torch.sum(words.as_strided((count, lines, narrow), (length, narrow, 1)), 1, out=slots[1])
        slots[1].narrow(1, 0, rest).add_(words.as_strided((count, rest), (length, 1), begin + length - rest))

    def _values(self, row: int, chunk: int, piece: Tensor, sketch: bool) -> Sizes:
        """Sizes of a span, and its sketch where it is wanted."""
        values = self._wide(piece)
        if not sketch:
            return self._sizes(values)
        sketches = self.sketches[values.dtype]
        if len(sketches.rows) == KEPT:
            self.drawn.append(sketches.taken())
        size = piece.element_size()
        sketches.add(row, chunk * CHUNK_SLABS, values.view(-1, SLAB_BYTES // size), size)
        found = self._sizes(values)
        if found.nans or found.infinities:
            sketches.rows.pop()
            sketches.add(row, chunk * CHUNK_SLABS, _finite(values).view(-1, SLAB_BYTES // size), size)
        return found

    def _wide(self, piece: Tensor) -> Tensor:
        """As float32 or, for float64 and integers, float64."""
        if piece.dtype in (torch.float32, torch.float64):
            return piece
        return self.as_float[: piece.numel()].copy_(piece) if piece.is_floating_point() else piece.double()

    def _sizes(self, values: Tensor) -> Sizes:
        squares = _squares(values)
        low, high = values.amin().item(), values.amax().item()
        nans = infinities = 0
        if not math.isfinite(high - low):
            nans, infinities = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
            values = _finite(values)
            low, high = values.amin().item(), values.amax().item()
            squares = _squares(values)
        top = max(-low, high) + 0.0  # of zeros alone not -0.0
        if values.dtype == torch.float32 and top and not SMALL < squares < math.inf:
            squares = values.double().square_().sum().item()
        return Sizes(squares, top, nans, infinities)

    def _fold(self) -> None:
        """Make hashes of the columns that are kept."""
        if self.chunks:
            columns = self.columns[: len(self.chunks)]
            f0, g0, f1, g1 = _factors()
            low = torch.mv(columns, f0), torch.mv(columns, f1)
            high = columns.bitwise_right_shift_(32)
            halves = torch.stack([low[0] + torch.mv(high, g0), low[1] + torch.mv(high, g1)], 1)
            weights = torch.tensor([[chunk_factor(chunk, half) for half in (0, 1)] for _, chunk in self.chunks], dtype=torch.int64)
            self.hashes.append(([row for row, _ in self.chunks], halves * weights))
            self.chunks.clear()

    def send(self) -> Callable[[], Tensor]:
        """The rows that are there, which need no transfer."""
        rows = self.fetch()
        return lambda: rows

    def fetch(self) -> Tensor:
        """All rows [N, LENGTH], float64, but for the count of bytes in the fingerprint."""
        self._take_small()
        self._fold()
        self.drawn += [sketches.taken() for sketches in self.sketches.values() if sketches.rows]
        count = len(self.sizes)
        rows = torch.zeros(count, LENGTH, dtype=torch.float64)
        hashes = torch.zeros(count, 2, dtype=torch.int64)
        if count:
            rows[:, :SKETCH_AT] = torch.tensor(self.sizes, dtype=torch.float64)
        for numbers, halves in self.hashes:
            hashes.index_add_(0, torch.tensor(numbers), halves)
        for numbers, sketches in self.drawn:
            rows[:, SKETCH_AT:SAMPLES_AT].index_add_(0, torch.tensor(numbers), sketches)
        for numbers, all_but_hashes in self.numbers:
            rows[torch.tensor(numbers), :HASH_AT] = all_but_hashes
        for dtype, size in {(some.dtype, some.numel()) for _, some in self.samples}:
            mine = [(row, some) for row, some in self.samples if (some.dtype, some.numel()) == (dtype, size)]
            places = torch.tensor([row for row, _ in mine])
            rows[places, SAMPLES_AT : SAMPLES_AT + size] = torch.stack([some for _, some in mine]).double()
        rows[:, HASH_AT:] = hashes.view(torch.float64)
        return rows
