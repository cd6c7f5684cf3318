"""Forward kernel: a tile of queries walks the keys that it can see; only the first and last tiles are masked.

A tile of keys that comes through a descriptor may not reach into the next sequence, whose values may be anything, NaN too. Keys that
fill no tile are therefore read through pointers, REST (0: there are none) at a time: few, so that they need no registers of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.attention import LOG2E, finish_softmax, softmax_step, tanh_tile, visible_tile
from ops_math.ops.attention.triton_gpu_drop import keep_keys, load_words

# Numbers that vary from call to call: a kernel is not compiled again where one of them is 1 or a multiple of 16.
LENGTHS = ("num_tiles", "q_len", "k_len", "documents", "steps", "align", "left", "right", "num_words")


UNIT = tl.constexpr(8)


@triton.jit
def steps_of(b, s, h):
    """Strides of batch, sequence and head, which come in units of 8 elements, so that the compiler knows they are multiples of it."""
    return tl.cast(b, tl.int64) * UNIT, tl.cast(s, tl.int64) * UNIT, tl.cast(h, tl.int64) * UNIT


@triton.jit
def place_program(num_tiles, SPREAD: tl.constexpr):
    """The tile of a program, and which sequence of heads and batch rows it belongs to.

    SPREAD: the first tiles of all sequences start before any second tile. Where tiles shrink along a sequence, the long ones go first
    and the last ones to finish are short. Else the tiles of a sequence are neighbours, and what they read stays in the cache.
    """
    pid = tl.program_id(0)
    if SPREAD:
        sequences = tl.num_programs(0) // num_tiles
        return pid // sequences, pid % sequences
    return pid % num_tiles, pid // num_tiles


@triton.jit
def place_document(cu_q_ptr, cu_k_ptr, tile, documents, steps, BLOCK: tl.constexpr):
    """The document that a tile falls into, without reading lengths on the host: document d owns tiles from cu[d] // BLOCK + d on.

    That leaves each document at least ceil(length / BLOCK) tiles and wastes at most one tile a document.
    Returns first query, queries, first key, keys, and the tile within the document.
    """
    low = tile * 0
    high = low + documents
    for _ in range(steps):  # bisection: the last document that starts at or before the tile
        middle = (low + high) // 2
        before = tl.load(cu_q_ptr + middle).to(tl.int32) // BLOCK + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first_q, end_q = tl.load(cu_q_ptr + low).to(tl.int64), tl.load(cu_q_ptr + low + 1).to(tl.int64)
    first_k, end_k = tl.load(cu_k_ptr + low).to(tl.int64), tl.load(cu_k_ptr + low + 1).to(tl.int64)
    within = tile - (first_q.to(tl.int32) // BLOCK + low)
    return first_q, (end_q - first_q).to(tl.int32), first_k, (end_k - first_k).to(tl.int32), within


@triton.jit
def load_rows(ptrs, offset, rows, num_rows, cols, CHECK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [rows, BLOCK_D]; zeros past the end where CHECK, and past the head's width where that is not a power of two."""
    if CHECK:
        if WIDTH != BLOCK_D:
            return tl.load(ptrs + offset, mask=(rows < num_rows)[:, None] & (cols < WIDTH)[None, :], other=0.0)
        return tl.load(ptrs + offset, mask=(rows < num_rows)[:, None], other=0.0)
    if WIDTH != BLOCK_D:
        return tl.load(ptrs + offset, mask=(cols < WIDTH)[None, :], other=0.0)
    return tl.load(ptrs + offset)


@triton.jit
def key_range(first, last, k_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys that queries at positions first .. last see: low, full_low, full_high, high.

    Tiles from full_low to full_high are seen whole by every query; those before and after need a mask. low is a multiple of BLOCK_N.
    """
    high, full_high = k_len, k_len
    if RIGHT:
        high = tl.maximum(tl.minimum(last + right + 1, k_len), 0)
        full_high = tl.maximum(tl.minimum(first + right + 1, k_len), 0)
    low, full_low = k_len * 0, k_len * 0
    if LEFT:
        low = tl.maximum(first - left, 0) // BLOCK_N * BLOCK_N
        full_low = tl.maximum(last - left, 0)
    return low, full_low, full_high, high


@triton.jit
def load_tile(
    view,
    base,
    row,
    col,
    start,
    stride,
    rows,
    num_rows,
    cols,
    VIEW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows start .. of one head: through a tensor descriptor at (row + start, col) where VIEW, else through pointers from base.

    Pointers give zeros past num_rows, a descriptor what follows there.
    """
    if VIEW:
        return view.load([row + start, col])
    spread = tl.arange(0, rows.shape[0]).to(tl.int64)[:, None] * stride + cols[None, :]
    return load_rows(base + spread, tl.cast(start, tl.int64) * stride, rows, num_rows, cols, True, WIDTH, BLOCK_D)


@triton.jit
def _fwd_step(
    start, q, acc, top, total, rows, shift, k_view, v_view, k_base, v_base, view_row, k_col, v_col, k_stride_s, v_stride_s, k_len, full_low,
    full_high, left, right, scale, softcap, bits_ptr, bits_view, sequence, num_words, num_rows, query,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, VIEW: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys from `start` on into the running softmax of a tile of queries."""
    keys, cols = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k = load_tile(k_view, k_base, view_row, k_col, start, k_stride_s, keys, k_len, cols, VIEW, WIDTH, BLOCK_D)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    factor = scale * LOG2E
    if SOFTCAP:
        x = softcap * tanh_tile(x * (scale / softcap))
        factor = LOG2E
    if (start < full_low) | (start + BLOCK_N > full_high):
        x = tl.where(visible_tile((rows + shift)[:, None], keys[None, :], k_len, left, right, LEFT, RIGHT), x, float("-inf"))
    e, shrink, top, total = softmax_step(x, factor, top, total)
    if bits_ptr is not None:
        words = load_words(bits_view, bits_ptr, sequence, num_words, num_rows, start, query, BLOCK_N, BLOCK_M)
        e = e * keep_keys(words, BLOCK_N)
    v = load_tile(v_view, v_base, view_row, v_col, start, v_stride_s, keys, k_len, cols, VIEW, WIDTH, BLOCK_D)
    acc = tl.dot(e.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=LENGTHS)
def _fwd_kernel(
    q_ptr, k_ptr, v_ptr, k_view, v_view, bits_ptr, bits_view, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr, num_tiles, num_heads, group, q_len,
    k_len, documents, steps,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    scale, softcap, align, left, right, num_words, num_rows, raised,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, VIEW: tl.constexpr, REST: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_stride_b, q_stride_s, q_stride_h = steps_of(q_stride_b, q_stride_s, q_stride_h)
    k_stride_b, k_stride_s, k_stride_h = steps_of(k_stride_b, k_stride_s, k_stride_h)
    v_stride_b, v_stride_s, v_stride_h = steps_of(v_stride_b, v_stride_s, v_stride_h)
    tile, sequence = place_program(num_tiles, RIGHT and not LEFT)
    tile = num_tiles - 1 - tile  # under a causal mask the last tiles are the longest
    head = (sequence % num_heads).to(tl.int64)
    batch = (sequence // num_heads).to(tl.int64)
    kv_head = head // group
    tokens = q_len
    first_q, first_k = batch * 0, batch * 0
    view_row = (batch * k_len).to(tl.int32)
    if PACKED:
        first_q, q_len, first_k, k_len, tile = place_document(cu_q_ptr, cu_k_ptr, tile, documents, steps, BLOCK_M)
        view_row = first_k.to(tl.int32)
        if tile * BLOCK_M >= q_len:
            return
    rows, cols = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    shift = (k_len - q_len) * align
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h + first_q * q_stride_s
    k_base = k_ptr + batch * k_stride_b + kv_head * k_stride_h + first_k * k_stride_s
    v_base = v_ptr + batch * v_stride_b + kv_head * v_stride_h + first_k * v_stride_s
    k_col, v_col = (kv_head * k_stride_h).to(tl.int32), (kv_head * v_stride_h).to(tl.int32)

    q = load_rows(q_base + rows.to(tl.int64)[:, None] * q_stride_s + cols[None, :], 0, rows, q_len, cols, True, WIDTH, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)

    first = tile * BLOCK_M + shift
    low, full_low, full_high, high = key_range(first, first + BLOCK_M - 1, k_len, left, right, LEFT, RIGHT, BLOCK_N)
    whole = k_len // BLOCK_N * BLOCK_N if REST else high
    for start in range(low, tl.minimum(high, whole), BLOCK_N):
        acc, top, total = _fwd_step(
            start, q, acc, top, total, rows, shift, k_view, v_view, k_base, v_base, view_row, k_col, v_col, k_stride_s, v_stride_s, k_len,
            full_low, full_high, left, right, scale, softcap, bits_ptr, bits_view, batch * num_heads + head, num_words, num_rows,
            tile * BLOCK_M, LEFT, RIGHT, SOFTCAP, VIEW, WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    if REST:
        for start in tl.range(tl.maximum(low, whole), high, REST, num_stages=1):
            acc, top, total = _fwd_step(
                start, q, acc, top, total, rows, shift, k_view, v_view, k_base, v_base, view_row, k_col, v_col, k_stride_s, v_stride_s,
                k_len, full_low, full_high, left, right, scale, softcap, bits_ptr, None, batch * num_heads + head, num_words, num_rows,
                tile * BLOCK_M, LEFT, RIGHT, SOFTCAP, False, WIDTH, BLOCK_D, BLOCK_M, REST, PRECISION,
            )  # fmt: skip
    divisor, lse = finish_softmax(top, total)
    if bits_ptr is not None:
        divisor = divisor / raised

    at = rows.to(tl.int64) + first_q
    place = (batch * tokens + at)[:, None] * (num_heads * WIDTH) + (head * WIDTH + cols)[None, :]
    mask = (rows < q_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(out_ptr + place, (acc / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + (batch * num_heads + head) * tokens + at, lse, mask=rows < q_len)
