"""Backward kernels, without atomics: a tile of keys walks the queries that see it (dK, dV), a tile of queries walks its keys (dQ).

Scores are computed in both, which costs seven products instead of five and buys one order of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.attention import LOG2E, exponent_offset, tanh_tile, visible_tile
from ops_math.ops.attention.triton_gpu_drop import keep_keys, keep_queries, load_words
from ops_math.ops.attention.triton_gpu_fwd import LENGTHS, key_range, load_rows, load_tile, place_document, place_program, steps_of


@triton.jit
def _prepare_kernel(
    dout_ptr, out_ptr, lse_ptr, delta_ptr, offset_ptr, num_rows, q_len, num_heads, dout_stride_b, dout_stride_s, dout_stride_h,
    share, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = share rowsum(dout out), and lse as an exponent of two, laid out as lse.

    Rows are numbered as `out` lies: (batch, query, head). share: the part that dropout keeps. What grows by its inverse does so once, in
    what the next kernels store.
    """
    dout_stride_b, dout_stride_s, dout_stride_h = steps_of(dout_stride_b, dout_stride_s, dout_stride_h)
    rows, cols = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head, query, batch = rows % num_heads, rows // num_heads % q_len, rows // num_heads // q_len
    place = batch * dout_stride_b + query * dout_stride_s + head * dout_stride_h
    mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    row_of = (batch * num_heads + head) * q_len + query

    out = tl.load(out_ptr + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + place[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row_of, mask=rows < num_rows, other=0.0)

    tl.store(delta_ptr + row_of, tl.sum(out * dout, 1) * share, mask=rows < num_rows)
    tl.store(offset_ptr + row_of, exponent_offset(lse), mask=rows < num_rows)


@triton.jit
def _probability(s, offset, scale, softcap, SOFTCAP: tl.constexpr):
    """Probabilities of raw scores, given the exponent of their row's sum, and the slope of the soft cap."""
    x, slope = s * (scale * LOG2E), 1.0
    if SOFTCAP:
        t = tanh_tile(s * (scale / softcap))
        x, slope = t * (softcap * LOG2E), 1.0 - t * t
    return tl.exp2(x - offset), slope


@triton.jit
def load_vector(view, ptr, row, start, rows, q_len, other, ROWS: tl.constexpr):
    """One number a query. Through a descriptor where ROWS (then those past the last query are whatever follows), else `other` there.

    Compilers before Triton 3.9 let every thread load every number that it needs of so short a load, 32 times each.
    """
    if ROWS:
        return view.load([(row + start).to(tl.int32)])
    return tl.load(ptr + row + rows, mask=rows < q_len, other=other)


@triton.jit
def query_range(first, last, shift, q_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Queries that see keys first .. last: low, full_low, full_high, high, as in `key_range`."""
    low, full_low = q_len * 0, q_len * 0
    high, full_high = q_len, q_len
    if LEFT:
        high = tl.maximum(tl.minimum(last + left - shift + 1, q_len), 0)
        full_high = tl.maximum(tl.minimum(first + left - shift + 1, q_len), 0)
    if RIGHT:
        low = tl.maximum(first - shift - right, 0) // BLOCK_M * BLOCK_M
        full_low = tl.maximum(last - shift - right, 0)
    return low, full_low, full_high, high


@triton.jit
def _dkdv_step(
    start, head, k, v, dk, dv, keys, shift, q_view, dout_view, offset_view, delta_view, q_row, dout_row, offset_ptr, delta_ptr, row,
    view_row, q_stride_s, q_stride_h, dout_stride_s, dout_stride_h, q_len, k_len, full_low, full_high, left, right, scale, softcap,
    bits_ptr, bits_view, first_sequence, num_words, num_rows, key,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, VIEW: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one head's queries from `start` on give to the gradients of a tile of keys and values."""
    rows, cols = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_base, q_col = q_row + head * q_stride_h, (head * q_stride_h).to(tl.int32)
    q = load_tile(q_view, q_base, view_row, q_col, start, q_stride_s, rows, q_len, cols, VIEW, WIDTH, BLOCK_D)
    offset = load_vector(offset_view, offset_ptr, row, start, rows, q_len, float("inf"), ROWS)
    delta = load_vector(delta_view, delta_ptr, row, start, rows, q_len, 0.0, ROWS)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [keys, queries], so that probabilities are a left operand as they are
    p, slope = _probability(s, offset[None, :], scale, softcap, SOFTCAP)
    if (start < full_low) | (start + BLOCK_M > full_high):
        seen = visible_tile((rows + shift)[None, :], keys[:, None], k_len, left, right, LEFT, RIGHT)
        p = tl.where(seen & (rows < q_len)[None, :], p, 0.0)
        delta = tl.where(rows < q_len, delta, 0.0)
    dout_base, dout_col = dout_row + head * dout_stride_h, (head * dout_stride_h).to(tl.int32)
    dout = load_tile(dout_view, dout_base, view_row, dout_col, start, dout_stride_s, rows, q_len, cols, VIEW, WIDTH, BLOCK_D)
    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
    dropped = p
    if bits_ptr is not None:
        words = load_words(bits_view, bits_ptr, first_sequence + head, num_words, num_rows, key, start, BLOCK_N, BLOCK_M)
        keep = keep_queries(words, BLOCK_N)
        dropped, dp = p * keep, dp * keep
    dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds = ds * slope
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def _bwd_dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, offset_ptr, delta_ptr, q_view, dout_view, offset_view, delta_view, bits_ptr,
    bits_view, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr, num_tiles, num_heads, group, q_len, k_len, documents, steps,
    dout_stride_b, dout_stride_s, dout_stride_h, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h,
    dk_stride_b, dk_stride_s, dk_stride_h, dv_stride_b, dv_stride_s, dv_stride_h, scale, softcap, align, left, right, num_words,
    num_rows, raised,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, VIEW: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dout_stride_b, dout_stride_s, dout_stride_h = steps_of(dout_stride_b, dout_stride_s, dout_stride_h)
    q_stride_b, q_stride_s, q_stride_h = steps_of(q_stride_b, q_stride_s, q_stride_h)
    k_stride_b, k_stride_s, k_stride_h = steps_of(k_stride_b, k_stride_s, k_stride_h)
    v_stride_b, v_stride_s, v_stride_h = steps_of(v_stride_b, v_stride_s, v_stride_h)
    dk_stride_b, dk_stride_s, dk_stride_h = steps_of(dk_stride_b, dk_stride_s, dk_stride_h)
    dv_stride_b, dv_stride_s, dv_stride_h = steps_of(dv_stride_b, dv_stride_s, dv_stride_h)
    tile, sequence = place_program(num_tiles, RIGHT and not LEFT)  # under a causal mask the first tiles are the longest
    kv_heads = num_heads // group
    kv_head = (sequence % kv_heads).to(tl.int64)
    batch = (sequence // kv_heads).to(tl.int64)
    tokens = q_len
    first_q, first_k = batch * 0, batch * 0
    view_row = (batch * q_len).to(tl.int32)
    if PACKED:
        first_k, k_len, first_q, q_len, tile = place_document(cu_k_ptr, cu_q_ptr, tile, documents, steps, BLOCK_N)
        view_row = first_q.to(tl.int32)
        if tile * BLOCK_N >= k_len:
            return
    keys, cols = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    shift = (k_len - q_len) * align
    k_rows = (keys.to(tl.int64) + first_k)[:, None]
    q_row, dout_row = q_ptr + batch * q_stride_b + first_q * q_stride_s, dout_ptr + batch * dout_stride_b + first_q * dout_stride_s

    k = load_rows(
        k_ptr + batch * k_stride_b + kv_head * k_stride_h + k_rows * k_stride_s + cols[None, :], 0, keys, k_len, cols, True, WIDTH, BLOCK_D
    )
    v = load_rows(
        v_ptr + batch * v_stride_b + kv_head * v_stride_h + k_rows * v_stride_s + cols[None, :], 0, keys, k_len, cols, True, WIDTH, BLOCK_D
    )
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    low, full_low, full_high, high = query_range(
        tile * BLOCK_N, tile * BLOCK_N + BLOCK_N - 1, shift, q_len, left, right, LEFT, RIGHT, BLOCK_M
    )
    first_row = (batch * num_heads + kv_head * group) * tokens + first_q
    # All heads that share these keys, one after the other: the sum needs no atomics.
    whole = q_len // BLOCK_M * BLOCK_M if REST else high
    count = tl.maximum(tl.cdiv(tl.minimum(high, whole) - low, BLOCK_M), 0)
    # Never divided by zero, not even where no step is taken: the loads of the first step are started ahead of the loop if there is a step,
    # and a division by the number of steps tells the compiler that there is one. They would then land in memory that is others' by now.
    divisor = tl.maximum(count, 1)
    for step in range(group * count):
        member = step // divisor
        dk, dv = _dkdv_step(
            low + (step - member * count) * BLOCK_M, kv_head * group + member, k, v, dk, dv, keys, shift, q_view, dout_view, offset_view,
            delta_view, q_row, dout_row, offset_ptr, delta_ptr, first_row + tl.cast(member, tl.int64) * tokens, view_row, q_stride_s,
            q_stride_h, dout_stride_s, dout_stride_h, q_len, k_len, full_low, full_high, left, right, scale, softcap, bits_ptr, bits_view,
            batch * num_heads, num_words, num_rows, tile * BLOCK_N, LEFT, RIGHT, SOFTCAP, VIEW, ROWS, WIDTH, BLOCK_D, BLOCK_M,
            BLOCK_N, PRECISION,
        )  # fmt: skip
    if REST:
        start = tl.maximum(low, whole)
        count = tl.maximum(tl.cdiv(high - start, REST), 0)
        divisor = tl.maximum(count, 1)
        for step in tl.range(0, group * count, num_stages=1):
            member = step // divisor
            dk, dv = _dkdv_step(
                start + (step - member * count) * REST, kv_head * group + member, k, v, dk, dv, keys, shift, q_view, dout_view, offset_view,
                delta_view, q_row, dout_row, offset_ptr, delta_ptr, first_row + tl.cast(member, tl.int64) * tokens, view_row, q_stride_s,
                q_stride_h, dout_stride_s, dout_stride_h, q_len, k_len, full_low, full_high, left, right, scale, softcap, bits_ptr,
                None, batch * num_heads, num_words, num_rows, tile * BLOCK_N, LEFT, RIGHT, SOFTCAP, False, False, WIDTH, BLOCK_D,
                REST, BLOCK_N, PRECISION,
            )  # fmt: skip

    if bits_ptr is not None:
        dv = dv * raised
    mask = (keys < k_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        dk_ptr + batch * dk_stride_b + kv_head * dk_stride_h + k_rows * dk_stride_s + cols[None, :],
        (dk * (scale * raised)).to(dk_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        dv_ptr + batch * dv_stride_b + kv_head * dv_stride_h + k_rows * dv_stride_s + cols[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _dq_step(
    start, q, dout, dq, offset, delta, rows, shift, k_view, v_view, k_base, v_base, view_row, k_col, v_col, k_stride_s, v_stride_s, k_len,
    full_low, full_high, left, right, scale, softcap, bits_ptr, bits_view, sequence, num_words, num_rows, query,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, VIEW: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `start` on give to the gradient of a tile of queries."""
    keys, cols = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k = load_tile(k_view, k_base, view_row, k_col, start, k_stride_s, keys, k_len, cols, VIEW, WIDTH, BLOCK_D)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, slope = _probability(s, offset[:, None], scale, softcap, SOFTCAP)
    if (start < full_low) | (start + BLOCK_N > full_high):
        p = tl.where(visible_tile((rows + shift)[:, None], keys[None, :], k_len, left, right, LEFT, RIGHT), p, 0.0)
    v = load_tile(v_view, v_base, view_row, v_col, start, v_stride_s, keys, k_len, cols, VIEW, WIDTH, BLOCK_D)
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if bits_ptr is not None:
        words = load_words(bits_view, bits_ptr, sequence, num_words, num_rows, start, query, BLOCK_N, BLOCK_M)
        dp = dp * keep_keys(words, BLOCK_N)
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds = ds * slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=LENGTHS)
def _bwd_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, offset_ptr, delta_ptr, k_view, v_view, bits_ptr, bits_view, cu_q_ptr, cu_k_ptr, dq_ptr, num_tiles,
    num_heads, group, q_len, k_len, documents, steps,
    dout_stride_b, dout_stride_s, dout_stride_h, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h,
    dq_stride_b, dq_stride_s, dq_stride_h, scale, softcap, align, left, right, num_words, num_rows, raised,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, VIEW: tl.constexpr, REST: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dout_stride_b, dout_stride_s, dout_stride_h = steps_of(dout_stride_b, dout_stride_s, dout_stride_h)
    q_stride_b, q_stride_s, q_stride_h = steps_of(q_stride_b, q_stride_s, q_stride_h)
    k_stride_b, k_stride_s, k_stride_h = steps_of(k_stride_b, k_stride_s, k_stride_h)
    v_stride_b, v_stride_s, v_stride_h = steps_of(v_stride_b, v_stride_s, v_stride_h)
    dq_stride_b, dq_stride_s, dq_stride_h = steps_of(dq_stride_b, dq_stride_s, dq_stride_h)
    tile, sequence = place_program(num_tiles, RIGHT and not LEFT)
    tile = num_tiles - 1 - tile  # under a causal mask the last tiles are the longest
    head = (sequence % num_heads).to(tl.int64)
    batch = (sequence // num_heads).to(tl.int64)
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
    at = (rows.to(tl.int64) + first_q)[:, None]
    kv_head = head // group
    k_base = k_ptr + batch * k_stride_b + kv_head * k_stride_h + first_k * k_stride_s
    v_base = v_ptr + batch * v_stride_b + kv_head * v_stride_h + first_k * v_stride_s
    k_col, v_col = (kv_head * k_stride_h).to(tl.int32), (kv_head * v_stride_h).to(tl.int32)
    row_of = (batch * num_heads + head) * tokens + first_q + rows

    q = load_rows(
        q_ptr + batch * q_stride_b + head * q_stride_h + at * q_stride_s + cols[None, :], 0, rows, q_len, cols, True, WIDTH, BLOCK_D
    )
    dout = load_rows(
        dout_ptr + batch * dout_stride_b + head * dout_stride_h + at * dout_stride_s + cols[None, :],
        0,
        rows,
        q_len,
        cols,
        True,
        WIDTH,
        BLOCK_D,
    )
    offset = tl.load(offset_ptr + row_of, mask=rows < q_len, other=float("inf"))
    delta = tl.load(delta_ptr + row_of, mask=rows < q_len, other=0.0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = tile * BLOCK_M + shift
    low, full_low, full_high, high = key_range(first, first + BLOCK_M - 1, k_len, left, right, LEFT, RIGHT, BLOCK_N)
    whole = k_len // BLOCK_N * BLOCK_N if REST else high
    for start in range(low, tl.minimum(high, whole), BLOCK_N):
        dq = _dq_step(
            start, q, dout, dq, offset, delta, rows, shift, k_view, v_view, k_base, v_base, view_row, k_col, v_col, k_stride_s, v_stride_s,
            k_len, full_low, full_high, left, right, scale, softcap, bits_ptr, bits_view, batch * num_heads + head, num_words, num_rows,
            tile * BLOCK_M, LEFT, RIGHT, SOFTCAP, VIEW, WIDTH, BLOCK_D, BLOCK_M, BLOCK_N, PRECISION,
        )  # fmt: skip
    if REST:
        for start in tl.range(tl.maximum(low, whole), high, REST, num_stages=1):
            dq = _dq_step(
                start, q, dout, dq, offset, delta, rows, shift, k_view, v_view, k_base, v_base, view_row, k_col, v_col, k_stride_s,
                v_stride_s, k_len, full_low, full_high, left, right, scale, softcap, bits_ptr, None, batch * num_heads + head,
                num_words, num_rows, tile * BLOCK_M, LEFT, RIGHT, SOFTCAP, False, WIDTH, BLOCK_D, BLOCK_M, REST, PRECISION,
            )  # fmt: skip

    mask = (rows < q_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        dq_ptr + batch * dq_stride_b + head * dq_stride_h + at * dq_stride_s + cols[None, :],
        (dq * (scale * raised)).to(dq_ptr.dtype.element_ty),
        mask=mask,
    )
