"""Dropout for the kernels without masks: a kernel draws a call's decisions once, one bit an element, and tiles of scores read them.

Drawn inside the loops over scores, random words cost more than the products. Bits live for one phase of one call: forward and backward
each draw them, so nothing is kept in between. Word (sequence, key // 32, query) holds 32 keys of a query; a sequence is a batch row's
head. Queries are neighbours in memory, so that the mask's writes and both ways of reading take whole lines.

Key 8 j + 4 h + 2 q + e (h, q, e below 2) is bit 2 j + h + 8 q + 16 e of its word: as the half-words of Philox fall when four of them
are compared and shifted in at a time. In a matrix product's result on sm_80 to sm_90 a thread has all j and e of a query but one h
and q, or, of transposed scores, two j of a key and one h, q, e: a shift by the thread's own share leaves a test of a constant bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_math.backends.launch import launch
from ops_math.ops._tiles.philox import philox_tile
from ops_math.ops.attention.problem import AttentionProblem
from ops_math.rng import honoured, threshold
from ops_math.spec import cdiv

KEYS = 32  # decisions a word
MOST_BYTES = 2**28  # of a call's bits; a longer call draws inside its loops and needs no memory
ROWS_UNIT = 4  # queries: rows of words begin at multiples of 16 bytes, as tensor descriptors ask


class MaskTile(NamedTuple):
    """Words (of 32 keys) and queries a program, warps."""

    words: int
    block_m: int
    num_warps: int


MASK_TILES = (MaskTile(1, 128, 1), MaskTile(4, 128, 4), MaskTile(8, 128, 4), MaskTile(8, 128, 8), MaskTile(4, 64, 4), MaskTile(2, 128, 4))


class Bits(NamedTuple):
    """A call's decisions [sequences, words, rows] (None without dropout), how many words and rows, and 1 / (1 - p)."""

    words: torch.Tensor | None
    num_words: int
    num_rows: int
    raised: float


HALVES = tl.constexpr(0x80008000)  # the top bits of both half-words
ONE = tl.constexpr(0x3F800000)  # 1.0 in fp32
TOPS = tl.constexpr(0x80808080)  # of all four bytes


@triton.jit
def _reached(word, least, UPPER: tl.constexpr):
    """Whether each half-word reaches the threshold, in bits 15 and 31; `least` has the threshold's lower 15 bits twice.

    Both halves in one subtraction, which borrows nothing from its neighbour: three instructions for two elements, where a comparison
    and a selection for each would be four.
    """
    lower = (word | HALVES) - least
    return word & lower if UPPER else word | lower


@triton.jit
def _merged(a, b, MASK: tl.constexpr):
    """The bits of a where MASK has ones, those of b elsewhere: one instruction."""
    return (a & MASK) | (b & (MASK ^ 0xFFFFFFFF))


@triton.jit
def keep_words(seed, offset, rows, head, words, threshold, UPPER: tl.constexpr):
    """The bits of 32 keys each, for row numbers and numbers of words that broadcast to one tile.

    UPPER: the threshold is 2^15 or more.
    """
    least = (tl.cast(threshold, tl.uint32) & 0x7FFF) * 0x10001
    head, offset = tl.cast(head, tl.uint32), tl.cast(offset, tl.uint32)
    bits = tl.zeros([words.shape[0], rows.shape[1]], tl.uint32)
    for j in range(4):
        w0, w1, w2, w3 = philox_tile(seed, (4 * words + j).to(tl.uint32), rows.to(tl.uint32), head, offset)
        for h in tl.static_range(2):
            even, odd = _reached(w2 if h else w0, least, UPPER), _reached(w3 if h else w1, least, UPPER)
            four = _merged(odd, even >> 8, HALVES)  # in bits 7, 15, 23 and 31, and anything elsewhere
            bits = _merged(four, bits >> 1, TOPS)
    return bits.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=("q_len", "k_len", "align", "left", "right", "threshold"))
def _mask_kernel(
    state_ptr, bits_ptr, num_heads, q_len, k_len, num_words, num_rows, align, left, right, threshold,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, UPPER: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The bits of one tile of words and queries of one sequence; tiles that no query sees are left as they are."""
    pid, row_tiles, word_tiles = tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_words, WORDS)
    first_row, first_word = pid % row_tiles * BLOCK_M, pid // row_tiles % word_tiles * WORDS
    sequence = (pid // row_tiles // word_tiles).to(tl.int64)
    head, batch = sequence % num_heads, sequence // num_heads
    shift = (k_len - q_len) * align
    seen = first_word * 32 < k_len
    if RIGHT:
        seen = seen & (first_word * 32 <= first_row + BLOCK_M - 1 + shift + right)
    if LEFT:
        seen = seen & (first_word * 32 + WORDS * 32 - 1 >= first_row + shift - left)
    if seen:
        rows, words = first_row + tl.arange(0, BLOCK_M), first_word + tl.arange(0, WORDS)
        seed, offset = tl.load(state_ptr), tl.load(state_ptr + 1)
        numbers = (batch * q_len + tl.load(state_ptr + 2) + rows)[None, :]
        bits = keep_words(seed, offset, numbers, head, words[:, None], threshold, UPPER)
        place = (sequence * num_words + words)[:, None] * num_rows + rows[None, :]
        tl.store(bits_ptr + place, bits, mask=(words < num_words)[:, None] & (rows < num_rows)[None, :])


@triton.jit
def load_words(view, ptr, sequence, num_words, num_rows, key, query, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Words [cdiv(BLOCK_N, 32), BLOCK_M] of BLOCK_N keys from `key` (a multiple of BLOCK_N) and queries from `query` on, the first key in
    bit 0; anything past the ends."""
    if view is not None:
        words = view.load([(sequence * num_words + key // 32).to(tl.int32), query])
    else:
        numbers, rows = key // 32 + tl.arange(0, (BLOCK_N + 31) // 32), query + tl.arange(0, BLOCK_M)
        place = (sequence * num_words + numbers)[:, None] * num_rows + rows[None, :]
        words = tl.load(ptr + place, mask=(numbers < num_words)[:, None] & (rows < num_rows)[None, :], other=0)
    if BLOCK_N < 32:
        words = words >> key % 32 // 4  # 16 keys from the 16th on: j begins at 2
    return words


@triton.jit
def _factor(words, own, at):
    """1.0 where bit own + at of a word is set, else 0.0; `at` is below 23, a constant for each of a thread's elements.

    As a bit of 1.0's mantissa it makes that 1 + 2^(at - 23). A logical operation, a multiplication that adds and one that multiplies go
    to two kinds of units; a test and a selection both go to the one that softmax keeps busy, and LLVM of Triton 3.6 packs sixteen
    tests into a word and takes them out again.
    """
    ones = (words >> own) | ONE
    one = (ones & ((1 << at) | ONE)).to(tl.float32, bitcast=True)
    gain = (150 - at << 23).to(tl.float32, bitcast=True)
    return one * gain - gain


@triton.jit
def keep_keys(words, BLOCK_N: tl.constexpr):
    """1.0 for the elements of a tile [queries, BLOCK_N keys] that stay, else 0.0.

    A thread's shift is 8 q + h of its keys 4 h + 2 q in eight.
    """
    pair = tl.arange(0, 4)
    own = (pair % 2 * 8 + pair // 2)[None, None, None, :, None]
    at = (2 * tl.arange(0, min(BLOCK_N, 32) // 8))[:, None] + (16 * tl.arange(0, 2))[None, :]
    return tl.reshape(_factor(tl.trans(words)[:, :, None, None, None], own, at[None, None, :, None, :]), [words.shape[1], BLOCK_N])


@triton.jit
def keep_queries(words, BLOCK_N: tl.constexpr):
    """1.0 for the elements of a tile [BLOCK_N keys, queries] that stay, else 0.0.

    A thread's shift is that of its key in eight, and of its warp's sixteen.
    """
    key = tl.arange(0, 8)
    own = (key % 2 * 16 + key // 2 % 2 * 8 + key // 4)[None, None, None, :, None]
    own = own + (4 * tl.arange(0, min(BLOCK_N, 32) // 16))[None, :, None, None, None]
    at = (2 * tl.arange(0, 2))[None, None, :, None, None]
    return tl.reshape(_factor(words[:, None, None, None, :], own, at), [BLOCK_N, words.shape[1]])


def num_bytes(p: AttentionProblem) -> int:
    """Size of a call's bits [B]."""
    return 4 * p.batch * p.heads * cdiv(p.k_len, KEYS) * _rows(p)


def by_bits(p: AttentionProblem) -> bool:
    """Whether a call's dropout is drawn ahead: nothing else is looked up, lengths are known on the host, and the bits are not too many."""
    return bool(p.dropout_p) and not (p.mask or p.key_padding or p.documents >= 0) and num_bytes(p) <= MOST_BYTES


def draw_bits(p: AttentionProblem, like: torch.Tensor, state: torch.Tensor | None, tile: MaskTile = MASK_TILES[0]) -> Bits:
    """Draw a call's bits, or say that it has none."""
    if not by_bits(p):
        return Bits(None, 0, 0, 1.0)
    num_words, num_rows, sequences = cdiv(p.k_len, KEYS), _rows(p), p.batch * p.heads
    bits = torch.empty((sequences, num_words, num_rows), dtype=torch.int32, device=like.device)
    launch(
        _mask_kernel, (cdiv(num_rows, tile.block_m) * cdiv(num_words, tile.words) * sequences,), state, bits, p.heads, p.q_len, p.k_len,
        num_words, num_rows, int(p.bottom_right), p.left, p.right, threshold(p.dropout_p), LEFT=p.left >= 0, RIGHT=p.right >= 0,
        UPPER=threshold(p.dropout_p) >= 2**15, WORDS=tile.words, BLOCK_M=tile.block_m, num_warps=tile.num_warps,
    )  # fmt: skip
    return Bits(bits, num_words, num_rows, 1.0 / (1.0 - honoured(p.dropout_p)))


def bits_view(bits: Bits, keys: int, queries: int, wanted: bool) -> Any:
    """A descriptor of tiles of words, where the kernel's other tiles come through descriptors too."""
    if bits.words is None or not wanted:
        return None
    rows = bits.words.shape[0] * bits.num_words
    return TensorDescriptor(bits.words, [rows, bits.num_rows], [bits.num_rows, 1], [cdiv(keys, KEYS), queries])


def _rows(p: AttentionProblem) -> int:
    return cdiv(p.q_len, ROWS_UNIT) * ROWS_UNIT
