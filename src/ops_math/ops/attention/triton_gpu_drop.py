"""Dropout for the kernels without masks: a kernel draws a call's decisions once, one bit an element, and tiles of scores read them.

Drawn inside the loops over scores, random words cost more than the products. Bits live for one phase of one call: forward and backward
each draw them, so nothing is kept in between. Word (sequence, key // 32, query) holds key % 32 as its bit; a sequence is a batch row's head.
Queries are neighbours in memory, so that the mask's writes, the queries of a tile of keys and the keys of a tile of queries all read whole
lines.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_math.backends.launch import launch
from ops_math.ops._tiles.philox import keep_bytes
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


MASK_TILES = (MaskTile(4, 128, 4), MaskTile(2, 128, 4), MaskTile(4, 64, 4), MaskTile(8, 128, 8), MaskTile(8, 128, 4), MaskTile(1, 128, 1))


class Bits(NamedTuple):
    """A call's decisions [sequences, words, rows] (None without dropout), how many words and rows, and 1 / (1 - p)."""

    words: torch.Tensor | None
    num_words: int
    num_rows: int
    raised: float


@triton.jit(do_not_specialize=("q_len", "k_len", "align", "left", "right", "threshold"))
def _mask_kernel(
    state_ptr, bits_ptr, num_heads, q_len, k_len, num_words, num_rows, align, left, right, threshold,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WORDS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The bits of one tile of words and queries of one sequence; tiles that no query sees are left as they are."""
    first_row, first_word = tl.program_id(0) * BLOCK_M, tl.program_id(1) * WORDS
    sequence = tl.program_id(2).to(tl.int64)
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
        bits = keep_bytes(seed, offset, numbers, head, (4 * words)[:, None], threshold)
        for byte in tl.static_range(1, 4):
            bits |= keep_bytes(seed, offset, numbers, head, (4 * words + byte)[:, None], threshold) << 8 * byte
        place = (sequence * num_words + words)[:, None] * num_rows + rows[None, :]
        tl.store(bits_ptr + place, bits, mask=(words < num_words)[:, None] & (rows < num_rows)[None, :])


@triton.jit
def load_words(view, ptr, sequence, num_words, num_rows, key, query, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Words [cdiv(BLOCK_N, 32), BLOCK_M] of BLOCK_N keys from `key` (a multiple of BLOCK_N) and queries from `query` on, the first key in
    bit 0; anything past the ends."""
    if view is not None:
        words = view.load([(sequence * num_words + key // 32).to(tl.int32), query])
    else:
        numbers, rows = key // 32 + tl.arange(0, tl.cdiv(BLOCK_N, 32)), query + tl.arange(0, BLOCK_M)
        place = (sequence * num_words + numbers)[:, None] * num_rows + rows[None, :]
        words = tl.load(ptr + place, mask=(numbers < num_words)[:, None] & (rows < num_rows)[None, :], other=0)
    if BLOCK_N < 32:
        words = words >> key % 32
    return words


@triton.jit
def keep_keys(words, BLOCK_N: tl.constexpr):
    """Which elements of a tile [queries, BLOCK_N keys] stay.

    The bit is picked by shape: in a matrix product's result a thread's keys are known when compiling but for its place among four
    neighbours, so a test is one instruction, and words reach threads through the copy that brings them in.
    """
    bit = 1 << tl.arange(0, min(BLOCK_N, 32))
    return tl.reshape(tl.trans(words)[:, :, None] & bit[None, None, :], [words.shape[1], BLOCK_N]) != 0


@triton.jit
def keep_queries(words, BLOCK_N: tl.constexpr):
    """Which elements of a tile [BLOCK_N keys, queries] stay."""
    bit = 1 << tl.arange(0, min(BLOCK_N, 32))
    return tl.reshape(words[:, None, :] & bit[None, :, None], [BLOCK_N, words.shape[1]]) != 0


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
        _mask_kernel, (cdiv(num_rows, tile.block_m), cdiv(num_words, tile.words), sequences), state, bits, p.heads, p.q_len, p.k_len,
        num_words, num_rows, int(p.bottom_right), p.left, p.right, threshold(p.dropout_p), LEFT=p.left >= 0, RIGHT=p.right >= 0,
        WORDS=tile.words, BLOCK_M=tile.block_m, num_warps=tile.num_warps,
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
