"""Triton kernels for NVIDIA and AMD GPUs: a tensor is read from memory once, a chunk a program; a second kernel adds up the chunks.

A program walks over its chunk in rows of 1024 words and, a few words behind, in rows of 1021, which it finds in the cache; a lane
keeps its own column of each. What a word holds (two floats, four of 16 bits) is taken out of it in registers. The fast way looks at no
element for NaN: the largest magnitude, whose bits count in the order of numbers, tells at the end whether there was any, and then the
chunk is walked over once more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops_math.backends.launch import ALIGNMENT, launch
from ops_math.ops.figures import problem
from ops_math.ops.figures.problem import CHUNK_BYTES, HASH_AT, LENGTH, block_signs, factors

NOTHING, FP32, FP64, BF16, FP16, INT32, INT64 = (tl.constexpr(i) for i in range(7))
KINDS = {
    torch.float32: 1,
    torch.float64: 2,
    torch.bfloat16: 3,
    torch.float16: 4,
    torch.int32: 5,
    torch.int64: 6,
}
WIDE, NARROW = (tl.constexpr(width) for width in problem.WIDTHS)
CHUNK_WORDS = tl.constexpr(problem.CHUNK_WORDS)
SLAB_ROWS = tl.constexpr(problem.SLAB_WORDS // problem.WIDTHS[0])
CHUNK_SLABS = tl.constexpr(problem.CHUNK_SLABS)
SAMPLES, SKETCH = tl.constexpr(problem.SAMPLES), tl.constexpr(problem.SKETCH)
SKETCH_AT, SAMPLES_AT = tl.constexpr(problem.SKETCH_AT), tl.constexpr(problem.SAMPLES_AT)
FLOATS, ROW = tl.constexpr(HASH_AT), tl.constexpr(LENGTH)
INFINITY32, INFINITY64 = tl.constexpr(0x7F800000), tl.constexpr(0x7FF0000000000000)
SMALL, LARGE = tl.constexpr(1e-28), tl.constexpr(1e37)  # between these a sum of squares in float32 has lost none
TABLE_COLUMNS = 4
RANGE_COLUMNS = 4
FEWEST_ROWS = 2048  # parts that a block of memory has room for: 1.4 MB
GATHERED = 1024  # elements that a program copies
FOLDED = 16  # parts that the second kernel adds up at once


class Config(NamedTuple):
    """Whether a step's words are loaded a step ahead, and warps."""

    ahead: bool
    num_warps: int


# With 16 warps of 32 lanes a thread holds all four rows of a column, so that no step of the loop needs a barrier. On AMD those would be 8
# of 64 lanes, for which Triton 3.9 finds no instructions (gfx942), so rows meet in shared memory there.
CONFIGS = (Config(True, 16), Config(False, 16))  # the second spills 64 bytes on sm_80


@triton.jit
def _mixed(number):
    """64 pseudo-random bits that belong to a number: `problem.mixed`."""
    z = (number + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def _words_tile(base_ptr, first, places, inside, num_bytes):
    """Words of a tensor from word `first` on; what is not inside, and what is behind the last byte, is zero."""
    count = tl.cdiv(num_bytes, 8)
    words = tl.load(base_ptr + first + places, mask=inside & (first + places < count), other=0)
    rest = num_bytes % 8
    if (rest > 0) & (first + CHUNK_WORDS >= count):
        keep = (tl.full([], 1, tl.int64) << (8 * rest).to(tl.int64)) - 1
        words = tl.where(first + places == count - 1, words & keep, words)
    return words


@triton.jit
def _value(words, PIECE: tl.constexpr, KIND: tl.constexpr):
    """The number that stands at the PIECE-th place of each word, in float32 or, where that is too narrow, float64."""
    if KIND == FP64:
        return words.to(tl.float64, bitcast=True)
    elif KIND == INT64:
        return words.to(tl.float64)
    elif KIND == INT32:
        return (words >> (PIECE * 32)).to(tl.int32).to(tl.float64)
    elif KIND == FP32:
        return (words >> (PIECE * 32)).to(tl.int32).to(tl.float32, bitcast=True)
    elif KIND == BF16:
        return ((words >> (PIECE * 16)) << 16).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return (words >> (PIECE * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _magnitude(value):
    """Bits of |value|, which count in the order of magnitudes; infinity and then NaN come last."""
    if value.dtype == tl.float64:
        return value.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _take_finite_tile(words, signs, top, squares, PIECE: tl.constexpr, KIND: tl.constexpr):
    """Take one number of each word into account, as if all were finite: magnitudes, squares, and signed sums of columns.

    What is not finite is in the squares for good, and NaN may be in the magnitudes or not.
    """
    value = _value(words, PIECE, KIND)
    largest = _magnitude(value) if value.dtype == tl.float64 else tl.abs(value)
    top = tl.maximum(top, tl.max(largest, 0))
    return top, squares + value * value, tl.sum(signs * value, 0)


@triton.jit
def _whole_tile(base_ptr, signs_ptr, first, slab, KIND: tl.constexpr, PIECES: tl.constexpr, AHEAD: tl.constexpr):
    """What a whole chunk comes to, column by column: sums of both widths; bits of magnitudes; squares; and signed sums of up to four
    numbers a word. A slab is a step: its four rows are one thread's, and squares are added up over them before float64 takes over.

    In the narrow rows the last three columns are the next row's; nobody reads what they come to.
    """
    rows, columns, column = tl.arange(0, SLAB_ROWS)[:, None], tl.arange(0, WIDE)[None, :], tl.arange(0, WIDE)
    wider: tl.constexpr = KIND == FP64 or KIND == INT64 or KIND == INT32
    number: tl.constexpr = tl.float64 if wider else tl.float32
    start_ptr, places, behind = base_ptr + first, rows * WIDE + columns, rows * NARROW + columns
    signs = tl.load(signs_ptr + places * PIECES // SKETCH).to(number)
    last: tl.constexpr = CHUNK_SLABS * SLAB_ROWS * NARROW
    narrow = tl.load(start_ptr + last + column, mask=column < CHUNK_WORDS - last, other=0)
    wide, squares = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.float64)
    top = tl.zeros([WIDE], tl.int64 if wider else tl.float32)
    s0 = tl.zeros([WIDE], number)
    s1, s2, s3 = s0, s0, s0
    words = tl.load(start_ptr + places)
    for step in range(CHUNK_SLABS):
        if AHEAD:
            coming = tl.load(start_ptr + tl.minimum(step + 1, CHUNK_SLABS - 1) * (SLAB_ROWS * WIDE) + places)
        else:
            words = tl.load(start_ptr + step * (SLAB_ROWS * WIDE) + places)
        narrow += tl.sum(tl.load(start_ptr + step * (SLAB_ROWS * NARROW) + behind), 0)
        wide += tl.sum(words, 0)
        if KIND != NOTHING:
            sign = (1 - 2 * (_mixed(slab + step) >> 62 & 1)).to(number)
            some = tl.zeros([SLAB_ROWS, WIDE], number)
            top, some, t0 = _take_finite_tile(words, signs, top, some, 0, KIND)
            s0 += t0 * sign
            if PIECES > 1:
                top, some, t1 = _take_finite_tile(words, signs, top, some, 1, KIND)
                s1 += t1 * sign
            if PIECES > 2:
                top, some, t2 = _take_finite_tile(words, signs, top, some, 2, KIND)
                top, some, t3 = _take_finite_tile(words, signs, top, some, 3, KIND)
                s2 += t2 * sign
                s3 += t3 * sign
            squares += tl.sum(some, 0).to(tl.float64)
        if AHEAD:
            words = coming
    if wider:
        return wide, narrow, top, squares, s0, s1, s2, s3
    else:
        return wide, narrow, top.to(tl.int32, bitcast=True), squares, s0, s1, s2, s3


@triton.jit
def _take_tile(words, signs, top, squares, nans, infinities, PIECE: tl.constexpr, KIND: tl.constexpr):
    """Take one number of each word into account; those that are not finite are counted and left out."""
    value = _value(words, PIECE, KIND)
    bits = _magnitude(value)
    end: tl.constexpr = INFINITY64 if value.dtype == tl.float64 else INFINITY32
    nans += tl.sum((bits > end).to(tl.int32), 0)
    infinities += tl.sum((bits == end).to(tl.int32), 0)
    value = tl.where(bits >= end, 0.0, value)
    top = tl.maximum(top, tl.max(tl.where(bits >= end, 0, bits), 0))
    exact = value.to(tl.float64)
    return top, squares + tl.sum(exact * exact, 0), nans, infinities, tl.sum(signs * value, 0)


@triton.jit
def _any_tile(base_ptr, signs_ptr, first, slab, num_bytes, KIND: tl.constexpr, PIECES: tl.constexpr):
    """The same of a chunk of any length and any numbers, with counts of NaN and infinities; each square in float64."""
    rows, columns = tl.arange(0, SLAB_ROWS)[:, None], tl.arange(0, WIDE)[None, :]
    wider: tl.constexpr = KIND == FP64 or KIND == INT64 or KIND == INT32
    number: tl.constexpr = tl.float64 if wider else tl.float32
    signs = tl.load(signs_ptr + (rows * WIDE + columns) * PIECES // SKETCH).to(number)
    wide, narrow, squares = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.float64)
    top = tl.zeros([WIDE], tl.int64 if wider else tl.int32)
    nans, infinities = tl.zeros([WIDE], tl.int32), tl.zeros([WIDE], tl.int32)
    s0 = tl.zeros([WIDE], number)
    s1, s2, s3 = s0, s0, s0
    left = tl.minimum(tl.cdiv(num_bytes, 8) - first, CHUNK_WORDS)
    for row in range(0, tl.cdiv(left, NARROW).to(tl.int32), SLAB_ROWS):
        places, behind = (row + rows) * WIDE + columns, (row + rows) * NARROW + columns
        words = _words_tile(base_ptr, first, places, places < CHUNK_WORDS, num_bytes)
        wide += tl.sum(words, 0)
        narrow += tl.sum(_words_tile(base_ptr, first, behind, (columns < NARROW) & (behind < CHUNK_WORDS), num_bytes), 0)
        if KIND != NOTHING:
            sign = (1 - 2 * (_mixed(slab + row // SLAB_ROWS) >> 62 & 1)).to(number)
            top, squares, nans, infinities, t0 = _take_tile(words, signs, top, squares, nans, infinities, 0, KIND)
            s0 += t0 * sign
            if PIECES > 1:
                top, squares, nans, infinities, t1 = _take_tile(words, signs, top, squares, nans, infinities, 1, KIND)
                s1 += t1 * sign
            if PIECES > 2:
                top, squares, nans, infinities, t2 = _take_tile(words, signs, top, squares, nans, infinities, 2, KIND)
                top, squares, nans, infinities, t3 = _take_tile(words, signs, top, squares, nans, infinities, 3, KIND)
                s2 += t2 * sign
                s3 += t3 * sign
    return wide, narrow, top, squares, nans, infinities, s0, s1, s2, s3


@triton.jit
def _store_sketch(out_ptr, sums, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Columns whose numbers stand at one place of their block of 64 are one signed sum."""
    together = tl.sum(tl.reshape(sums.to(tl.float64), [WIDE * PIECES // SKETCH, SKETCH // PIECES]), 0)
    tl.store(out_ptr + tl.arange(0, SKETCH // PIECES) * PIECES + PIECE, together)


@triton.jit
def _store_hashes(out_ptr, factors_ptr, wide, narrow, chunk):
    """Both halves of a chunk's hash, from the sums of its columns."""
    column = tl.arange(0, WIDE)
    inside = column < NARROW
    for half in tl.static_range(2):
        whole_ptr = factors_ptr + half * 2 * (WIDE + NARROW)
        high_ptr = whole_ptr + WIDE + NARROW
        total = wide * tl.load(whole_ptr + column) + (wide >> 32) * tl.load(high_ptr + column)
        total += narrow * tl.load(whole_ptr + WIDE + column, mask=inside, other=0)
        total += (narrow >> 32) * tl.load(high_ptr + WIDE + column, mask=inside, other=0)
        tl.store(out_ptr + half, tl.sum(total, 0) * (_mixed(2 * chunk + half) | 1))


@triton.jit
def _store_values(
    out_ptr, top, squares, nans, infinities, s0, s1, s2, s3, PIECES: tl.constexpr, SKETCHED: tl.constexpr,
):  # fmt: skip
    """Sizes, counts and the sketch of a chunk."""
    peak = tl.max(top, 0)
    if top.dtype == tl.int64:
        largest = peak.to(tl.float64, bitcast=True)
    else:
        largest = peak.to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(out_ptr, tl.sum(squares, 0))
    tl.store(out_ptr + 1, largest)
    tl.store(out_ptr + 2, tl.sum(nans, 0).to(tl.float64))
    tl.store(out_ptr + 3, tl.sum(infinities, 0).to(tl.float64))
    if SKETCHED:
        _store_sketch(out_ptr + SKETCH_AT, s0, 0, PIECES)
        if PIECES > 1:
            _store_sketch(out_ptr + SKETCH_AT, s1, 1, PIECES)
        if PIECES > 2:
            _store_sketch(out_ptr + SKETCH_AT, s2, 2, PIECES)
            _store_sketch(out_ptr + SKETCH_AT, s3, 3, PIECES)
    else:
        tl.store(out_ptr + SKETCH_AT + tl.arange(0, SKETCH), tl.zeros([SKETCH], tl.float64))


@triton.jit
def _samples_tile(base_ptr, num_bytes, KIND: tl.constexpr, PIECES: tl.constexpr):
    """Values [16] at places that are evenly spaced, zero where there are fewer."""
    count = num_bytes // (8 // PIECES)
    numbers = tl.arange(0, SAMPLES)
    spaced = numbers.to(tl.int64) * (count - 1) // (SAMPLES - 1)
    places = tl.where(count <= SAMPLES, numbers.to(tl.int64), spaced)
    words = tl.load(base_ptr + places // PIECES, mask=numbers < count, other=0)
    words = words >> (places % PIECES * (64 // PIECES))
    return _value(words, 0, KIND).to(tl.float64)


@triton.jit(do_not_specialize=["num_bytes"])
def _chunk_kernel(
    tensor_ptr, table_ptr, factors_ptr, signs_ptr, hashes_ptr, floats_ptr, num_bytes,
    KIND: tl.constexpr, PIECES: tl.constexpr, SKETCHED: tl.constexpr, TABLE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    if TABLE:
        address = tl.load(table_ptr + part * 4)
        base_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        num_bytes = tl.load(table_ptr + part * 4 + 1)
        chunk = tl.load(table_ptr + part * 4 + 2)
    else:
        base_ptr = tensor_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        num_bytes = num_bytes.to(tl.int64)
        chunk = part
    first = chunk * CHUNK_WORDS
    out_ptr = floats_ptr + part * FLOATS

    wider: tl.constexpr = KIND == FP64 or KIND == INT64 or KIND == INT32
    nans, infinities = tl.zeros([WIDE], tl.int32), tl.zeros([WIDE], tl.int32)
    again = (first + CHUNK_WORDS) * 8 > num_bytes
    wide, narrow, squares = tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.int64), tl.zeros([WIDE], tl.float64)
    top = tl.zeros([WIDE], tl.int64 if wider else tl.int32)
    s0 = tl.zeros([WIDE], tl.float64 if wider else tl.float32)
    s1, s2, s3 = s0, s0, s0
    if not again:
        wide, narrow, top, squares, s0, s1, s2, s3 = _whole_tile(base_ptr, signs_ptr, first, chunk * CHUNK_SLABS, KIND, PIECES, AHEAD)
        if KIND != NOTHING:
            peak, total = tl.max(top, 0), tl.sum(squares, 0)
            sound = ((total >= SMALL) & (total < LARGE)) | ((total == 0) & (peak == 0))  # no comparison holds for NaN
            again = not sound
    if again:
        wide, narrow, top, squares, nans, infinities, s0, s1, s2, s3 = _any_tile(
            base_ptr, signs_ptr, first, chunk * CHUNK_SLABS, num_bytes, KIND, PIECES
        )
    _store_hashes(hashes_ptr + part * 2, factors_ptr, wide, narrow, chunk)

    if KIND != NOTHING:
        _store_values(out_ptr, top, squares, nans, infinities, s0, s1, s2, s3, PIECES, SKETCHED)
        samples = tl.zeros([SAMPLES], tl.float64)
        if chunk == 0:
            samples = _samples_tile(base_ptr, num_bytes, KIND, PIECES)
        tl.store(out_ptr + SAMPLES_AT + tl.arange(0, SAMPLES), samples)


@triton.jit
def _fold_kernel(hashes_ptr, floats_ptr, ranges_ptr, out_ptr, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up the parts of one tensor, always in one order; the second column is a maximum."""
    tensor = tl.program_id(0).to(tl.int64)
    range_ptr = ranges_ptr + tensor * 4
    first_hash, num_hashes = tl.load(range_ptr), tl.load(range_ptr + 1)
    first_float, num_floats = tl.load(range_ptr + 2), tl.load(range_ptr + 3)
    parts, columns, halves = tl.arange(0, PARTS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, 2)[None, :]

    total = tl.zeros([COLUMNS], tl.float64)
    for start in range(0, num_floats.to(tl.int32), PARTS):
        mask = (start + parts < num_floats) & (columns < FLOATS)
        some = tl.load(floats_ptr + (first_float + start + parts) * FLOATS + columns, mask=mask, other=0.0)
        total = tl.where(tl.arange(0, COLUMNS) == 1, tl.maximum(total, tl.max(some, 0)), total + tl.sum(some, 0))
    hashes = tl.zeros([2], tl.int64)
    for start in range(0, num_hashes.to(tl.int32), PARTS):
        hashes += tl.sum(tl.load(hashes_ptr + (first_hash + start + parts) * 2 + halves, mask=start + parts < num_hashes, other=0), 0)

    row_ptr = out_ptr + tensor * ROW
    tl.store(row_ptr + tl.arange(0, COLUMNS), total, mask=tl.arange(0, COLUMNS) < FLOATS)
    tl.store(row_ptr + FLOATS + tl.arange(0, 2), hashes.to(tl.float64, bitcast=True))


@triton.jit
def _gather_kernel(table_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy elements that are evenly spaced in memory to where they lie together, a block a program."""
    part = tl.program_id(0).to(tl.int64)
    row_ptr = table_ptr + part * 4
    address, step, count, begin = tl.load(row_ptr), tl.load(row_ptr + 1), tl.load(row_ptr + 2), tl.load(row_ptr + 3)
    places = tl.arange(0, BLOCK)

    word: tl.constexpr = tl.int64 if SIZE == 8 else tl.int32 if SIZE == 4 else tl.int16
    elements = tl.load(address.to(tl.pointer_type(word)) + places * step, mask=places < count)
    tl.store(out_ptr.to(tl.pointer_type(word), bitcast=True) + begin + places, elements, mask=places < count)


class _Range(NamedTuple):
    """Which parts hold a tensor's hashes and which its numbers."""

    first_hash: int
    num_hashes: int
    first_float: int
    num_floats: int


class _Plan(NamedTuple):
    """What reads every so-many-th element of tensors of one dtype: `blocks` of elements are copied into `words`, whose chunks then are
    looked at; both tables are on the device."""

    gather: Tensor
    words: Tensor
    table: Tensor
    counts: list[int]
    kind: int
    size: int


class Rows:
    """The figures of tensors on one GPU, a row each, in the order in which they are added."""

    def __init__(self, device: torch.device, config: Config = CONFIGS[0]) -> None:
        self.device, self.config = device, config
        self.factors, self.signs = factors(device), block_signs(device)
        self.ranges: list[_Range] = []
        self.blocks: list[tuple[Tensor, Tensor]] = []
        self.used = self.begin = 0  # parts of the last block, and before it
        self.streams: dict[int, torch.cuda.Stream] = {}  # on which tensors were added

    @property
    def count(self) -> int:
        """Rows so far."""
        return len(self.ranges)

    def add(self, tensors: list[Tensor], sketch: bool) -> None:
        """Take contiguous tensors [N] on the current stream; they may be written to afterwards."""
        with _guard(self.device):
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                self.streams[stream.cuda_stream] = stream
            flat = [t if t.data_ptr() % ALIGNMENT == 0 else t.detach().clone() for t in tensors]
            if len(flat) == 1 and flat[0].dtype in KINDS:  # as hooks give them, one by one
                [part] = self._launch(flat, KINDS[flat[0].dtype], sketch)
                self.ranges.append(_Range(*part, *part))
                return
            groups: dict[int, list[int]] = {}
            for number, t in enumerate(flat):
                groups.setdefault(KINDS.get(t.dtype, 0), []).append(number)
            found: dict[int, _Range] = {}
            for kind, numbers in groups.items():
                mine = [flat[n] for n in numbers]
                hashes = self._launch(mine, kind, sketch)
                floats = hashes if kind else self._launch([t.double() for t in mine], KINDS[torch.float64], sketch)
                found.update({n: _Range(*h, *f) for n, h, f in zip(numbers, hashes, floats, strict=True)})
            self.ranges += [found[n] for n in range(len(flat))]

    def add_every(self, tensors: list[Tensor], steps: list[int], sketch: bool) -> None:
        """Take every so-many-th element of each, which are copied together; of known places in memory that is two kernels a dtype."""
        if any(t.dtype not in KINDS for t in tensors):
            return self.add([t[::step].contiguous() for t, step in zip(tensors, steps, strict=True)], sketch)
        with _guard(self.device):
            stream = 0
            if self.device.type == "cuda":
                current = torch.cuda.current_stream(self.device)
                self.streams[current.cuda_stream] = current
                stream = current.cuda_stream
            groups: dict[torch.dtype, list[int]] = {}
            for number, t in enumerate(tensors):
                groups.setdefault(t.dtype, []).append(number)
            found: dict[int, _Range] = {}
            for dtype, numbers in groups.items():
                places = tuple((tensors[n].data_ptr(), tensors[n].numel(), steps[n]) for n in numbers)
                plan = _plan(self.device, stream, dtype, places)
                launch(_gather_kernel, (len(plan.gather),), plan.gather, plan.words, SIZE=plan.size, BLOCK=GATHERED)
                parts = self._start(plan.words, plan.table, plan.counts, plan.kind, plan.size, sketch, 0)
                found.update({n: _Range(*part, *part) for n, part in zip(numbers, parts, strict=True)})
            self.ranges += [found[n] for n in range(len(tensors))]

    def _launch(self, tensors: list[Tensor], kind: int, sketch: bool) -> list[tuple[int, int]]:
        """First part and parts of each."""
        counts = [-(-t.nbytes // CHUNK_BYTES) for t in tensors]
        size = tensors[0].element_size()
        if len(tensors) == 1:
            return self._start(tensors[0], None, counts, kind, size, sketch, tensors[0].nbytes)
        table = _table([(t.data_ptr(), t.nbytes) for t in tensors], counts)
        return self._start(tensors[0], _sent(table, self.device), counts, kind, size, sketch, 0)

    def _start(
        self, tensor: Tensor, table: Tensor | None, counts: list[int], kind: int, size: int, sketch: bool, num_bytes: int
    ) -> list[tuple[int, int]]:
        """Start the kernel for chunks of one tensor, or of those in a table; first part and parts of each."""
        total = sum(counts)
        first, hashes, floats = self._room(total)
        constants = {
            "KIND": kind,
            "PIECES": 8 // size if kind else 1,
            "SKETCHED": sketch,
            "TABLE": table is not None,
            "AHEAD": self.config.ahead,
        }
        arguments = (tensor, self.factors if table is None else table, self.factors, self.signs, hashes, floats, num_bytes)
        launch(_chunk_kernel, (total,), *arguments, num_warps=self.config.num_warps, **constants)
        found = []
        for count in counts:
            found.append((first, count))
            first += count
        return found

    def _room(self, parts: int) -> tuple[int, Tensor, Tensor]:
        """The number of the next part and memory for some."""
        if not self.blocks or self.used + parts > self.blocks[-1][0].shape[0]:
            if self.blocks:
                self.blocks[-1] = (self.blocks[-1][0][: self.used], self.blocks[-1][1][: self.used])
                self.begin += self.used
            size = max(FEWEST_ROWS, parts)
            hashes = torch.empty(size, 2, dtype=torch.int64, device=self.device)
            self.blocks.append((hashes, torch.empty(size, HASH_AT, dtype=torch.float64, device=self.device)))
            self.used = 0
        start, (hashes, floats) = self.used, self.blocks[-1]
        self.used += parts
        return self.begin + start, hashes[start:], floats[start:]

    def fetch(self) -> Tensor:
        """All rows [N, LENGTH], float64, on the CPU, but for the count of bytes in the fingerprint; in one transfer."""
        return self.send()()

    def send(self) -> Callable[[], Tensor]:
        """Start that transfer behind all that was added, on whichever streams; the host waits when the rows are asked for."""
        count = len(self.ranges)
        if not count or not self.blocks:
            return lambda: torch.zeros(count, LENGTH, dtype=torch.float64)
        with _guard(self.device):
            if self.device.type == "cuda":
                current = torch.cuda.current_stream(self.device)
                for stream in self.streams.values():
                    current.wait_stream(stream)
                for block in self.blocks:
                    for part in block:
                        part.record_stream(current)  # its memory may be another stream's
            hashes, floats = self.blocks[0] if len(self.blocks) == 1 else (torch.cat(parts) for parts in zip(*self.blocks, strict=True))
            ranges = _sent(torch.tensor(self.ranges, dtype=torch.int64), self.device)
            out = torch.empty(count, LENGTH, dtype=torch.float64, device=self.device)
            launch(_fold_kernel, (count,), hashes, floats, ranges, out, PARTS=FOLDED, COLUMNS=triton.next_power_of_2(HASH_AT))
            if self.device.type != "cuda":
                return lambda: out
            here = torch.empty(count, LENGTH, dtype=torch.float64, pin_memory=True)
            here.copy_(out, non_blocking=True)
            done = torch.cuda.Event()
            done.record()

        def arrived() -> Tensor:
            done.synchronize()
            return here

        return arrived


def _table(tensors: list[tuple[int, int]], counts: list[int]) -> Tensor:
    """A row a chunk, from address and bytes of each tensor and its number of chunks: address, bytes, which chunk it is."""
    facts = torch.tensor([[address, num_bytes, 0, 0] for address, num_bytes in tensors], dtype=torch.int64)
    return _numbered(facts, counts)


def _numbered(facts: Tensor, counts: list[int]) -> Tensor:
    """Rows [N, 4] as often as `counts` says, with the number among its like in the third column."""
    repeats = torch.tensor(counts, dtype=torch.int64)
    table = facts.repeat_interleave(repeats, 0)
    begins = repeats.cumsum(0) - repeats
    table[:, 2] = torch.arange(len(table)) - begins.repeat_interleave(repeats)
    return table


@functools.lru_cache(maxsize=16)
def _plan(device: torch.device, stream: int, dtype: torch.dtype, places: tuple[tuple[int, int, int], ...]) -> _Plan:
    """For places in memory (address, elements, step) of one dtype. It holds no tensor but its own, which one stream alone uses."""
    size = dtype.itemsize
    counts = [-(-length // step) for _, length, step in places]
    words = [-(-count * size // 8) for count in counts]
    begins = [0, *itertools.accumulate(count + count % 2 for count in words)]
    facts = [[address, step, 0, begin * 8 // size] for (address, _, step), begin in zip(places, begins, strict=False)]
    blocks = [-(-count // GATHERED) for count in counts]
    gather = _numbered(torch.tensor(facts, dtype=torch.int64), blocks)
    number, steps = gather[:, 2].clone(), gather[:, 1]
    gather[:, 0] += number * GATHERED * steps * size
    gather[:, 2] = torch.tensor(counts).repeat_interleave(torch.tensor(blocks)).sub(number * GATHERED).clamp(max=GATHERED)
    gather[:, 3] += number * GATHERED
    memory = torch.zeros(max(begins[-1], 1), dtype=torch.int64, device=device)
    chunks = [-(-count * size // CHUNK_BYTES) for count in counts]
    table = _table([(memory.data_ptr() + 8 * begin, count * size) for begin, count in zip(begins, counts, strict=False)], chunks)
    return _Plan(_sent(gather, device), memory, _sent(table, device), chunks, KINDS[dtype], size)


def _guard(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what runs there."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
