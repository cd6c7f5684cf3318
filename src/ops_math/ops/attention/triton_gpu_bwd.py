"""Backward kernels, without atomics: a tile of keys walks the queries that see it (dK, dV), a tile of queries walks its keys (dQ).

Scores are computed in both, which costs seven products instead of five and buys one order of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.attention import LOG2E, exponent_offset, tanh_tile, visible_tile
from ops_math.ops.attention.triton_gpu_fwd import LENGTHS, key_range, load_rows, place_document


@triton.jit
def _delta_kernel(
    dout_ptr, out_ptr, delta_ptr, num_rows, q_len, num_heads, dout_stride_b, dout_stride_s, dout_stride_h,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout out) in fp32, laid out as lse; rows are numbered as `out` lies: (batch, query, head)."""
    rows, cols = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head, query, batch = rows % num_heads, rows // num_heads % q_len, rows // num_heads // q_len
    place = batch * dout_stride_b + query * dout_stride_s + head * dout_stride_h
    mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]

    out = tl.load(out_ptr + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + place[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)

    tl.store(delta_ptr + (batch * num_heads + head) * q_len + query, tl.sum(out * dout, 1), mask=rows < num_rows)


@triton.jit
def _probability(s, offset, scale, softcap, SOFTCAP: tl.constexpr):
    """Probabilities of raw scores, given the exponent of their row's sum, and the slope of the soft cap."""
    if SOFTCAP:
        t = tanh_tile(s * (scale / softcap))
        return tl.exp2(t * (softcap * LOG2E) - offset), 1.0 - t * t
    return tl.exp2(s * (scale * LOG2E) - offset), 1.0


@triton.jit
def query_range(first, last, shift, q_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Queries that see keys first .. last: low, full_low, full_high, high, as in `key_range`, but for the end of the queries:

    rows past it need no mask on their scores, since an lse of -inf makes their probabilities zero.
    """
    low = q_len * 0
    full_low = low
    high, full_high = q_len, q_len
    if LEFT:
        high = tl.maximum(tl.minimum(last + left - shift + 1, q_len), 0)
        full_high = tl.maximum(tl.minimum(first + left - shift + 1, q_len), 0) // BLOCK_M * BLOCK_M
    if RIGHT:
        low = tl.maximum(first - shift - right, 0) // BLOCK_M * BLOCK_M
        full_low = tl.minimum((tl.maximum(last - shift - right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M, tl.cdiv(high, BLOCK_M) * BLOCK_M)
    return low, full_low, full_high, high


@triton.jit
def _walk_queries(
    k, v, dk, dv, q_ptrs, dout_ptrs, lse_ptr, delta_ptr, q_stride, dout_stride, keys, cols, low, high, q_len, k_len, shift, left, right, scale, softcap,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptrs, tl.cast(start, tl.int64) * q_stride, rows, q_len, cols, True, WIDTH, BLOCK_D)
        offset = exponent_offset(tl.load(lse_ptr + rows, mask=rows < q_len, other=float("-inf")))
        delta = tl.load(delta_ptr + rows, mask=rows < q_len, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [keys, queries], so that probabilities are a left operand as they are
        p, slope = _probability(s, offset[None, :], scale, softcap, SOFTCAP)
        if MASKED:
            p = tl.where(visible_tile((rows + shift)[None, :], keys[:, None], k_len, left, right, LEFT, RIGHT), p, 0.0)
        dout = load_rows(dout_ptrs, tl.cast(start, tl.int64) * dout_stride, rows, q_len, cols, True, WIDTH, BLOCK_D)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * slope
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def _bwd_dkdv_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr, num_tiles, num_heads, group, q_len, k_len, documents, steps,
    dout_stride_b, dout_stride_s, dout_stride_h, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    dk_stride_b, dk_stride_s, dk_stride_h, dv_stride_b, dv_stride_s, dv_stride_h, scale, softcap, align, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = pid % num_tiles  # first tiles first: under a causal mask most queries see them
    kv_heads = num_heads // group
    kv_head = (pid // num_tiles % kv_heads).to(tl.int64)
    batch = (pid // num_tiles // kv_heads).to(tl.int64)
    tokens = q_len
    first_q, first_k = batch * 0, batch * 0
    if PACKED:
        first_k, k_len, first_q, q_len, tile = place_document(cu_k_ptr, cu_q_ptr, tile, documents, steps, BLOCK_N)
        if tile * BLOCK_N >= k_len:
            return
    keys, cols = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    shift = (k_len - q_len) * align
    k_rows = (keys.to(tl.int64) + first_k)[:, None]
    spread = (first_q + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]

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
    for member in range(group):  # the heads that share these keys, so that the sum needs no atomics
        head = kv_head * group + member
        q_ptrs = q_ptr + batch * q_stride_b + head * q_stride_h + spread * q_stride_s + cols[None, :]
        dout_ptrs = dout_ptr + batch * dout_stride_b + head * dout_stride_h + spread * dout_stride_s + cols[None, :]
        lse_row, delta_row = (
            lse_ptr + (batch * num_heads + head) * tokens + first_q,
            delta_ptr + (batch * num_heads + head) * tokens + first_q,
        )
        if RIGHT:
            dk, dv = _walk_queries(
                k, v, dk, dv, q_ptrs, dout_ptrs, lse_row, delta_row, q_stride_s, dout_stride_s, keys, cols, low, tl.minimum(full_low, high), q_len, k_len,
                shift, left, right, scale, softcap, True, LEFT, RIGHT, SOFTCAP, WIDTH, BLOCK_D, BLOCK_M, PRECISION,
            )  # fmt: skip
        dk, dv = _walk_queries(
            k, v, dk, dv, q_ptrs, dout_ptrs, lse_row, delta_row, q_stride_s, dout_stride_s, keys, cols, full_low, full_high, q_len, k_len,
            shift, left, right, scale, softcap, False, LEFT, RIGHT, SOFTCAP, WIDTH, BLOCK_D, BLOCK_M, PRECISION,
        )  # fmt: skip
        if LEFT:
            dk, dv = _walk_queries(
                k, v, dk, dv, q_ptrs, dout_ptrs, lse_row, delta_row, q_stride_s, dout_stride_s, keys, cols, tl.maximum(full_low, full_high), high, q_len, k_len,
                shift, left, right, scale, softcap, True, LEFT, RIGHT, SOFTCAP, WIDTH, BLOCK_D, BLOCK_M, PRECISION,
            )  # fmt: skip

    mask = (keys < k_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        dk_ptr + batch * dk_stride_b + kv_head * dk_stride_h + k_rows * dk_stride_s + cols[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        dv_ptr + batch * dv_stride_b + kv_head * dv_stride_h + k_rows * dv_stride_s + cols[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _walk_keys_back(
    q, dout, dq, offset, delta, k_ptrs, v_ptrs, k_stride, v_stride, at, cols, low, high, k_len, left, right, scale, softcap,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptrs, tl.cast(start, tl.int64) * k_stride, keys, k_len, cols, MASKED, WIDTH, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, slope = _probability(s, offset[:, None], scale, softcap, SOFTCAP)
        if MASKED:
            p = tl.where(visible_tile(at[:, None], keys[None, :], k_len, left, right, LEFT, RIGHT), p, 0.0)
        v = load_rows(v_ptrs, tl.cast(start, tl.int64) * v_stride, keys, k_len, cols, MASKED, WIDTH, BLOCK_D)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=LENGTHS)
def _bwd_dq_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, dq_ptr, num_tiles, num_heads, group, q_len, k_len, documents, steps,
    dout_stride_b, dout_stride_s, dout_stride_h, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    dq_stride_b, dq_stride_s, dq_stride_h, scale, softcap, align, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tile = num_tiles - 1 - pid % num_tiles
    head = (pid // num_tiles % num_heads).to(tl.int64)
    batch = (pid // num_tiles // num_heads).to(tl.int64)
    tokens = q_len
    first_q, first_k = batch * 0, batch * 0
    if PACKED:
        first_q, q_len, first_k, k_len, tile = place_document(cu_q_ptr, cu_k_ptr, tile, documents, steps, BLOCK_M)
        if tile * BLOCK_M >= q_len:
            return
    rows, cols = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    shift = (k_len - q_len) * align
    at = (rows.to(tl.int64) + first_q)[:, None]
    spread = (first_k + tl.arange(0, BLOCK_N).to(tl.int64))[:, None]
    k_ptrs = k_ptr + batch * k_stride_b + head // group * k_stride_h + spread * k_stride_s + cols[None, :]
    v_ptrs = v_ptr + batch * v_stride_b + head // group * v_stride_h + spread * v_stride_s + cols[None, :]
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
    offset = exponent_offset(tl.load(lse_ptr + row_of, mask=rows < q_len, other=float("-inf")))
    delta = tl.load(delta_ptr + row_of, mask=rows < q_len, other=0.0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = tile * BLOCK_M + shift
    low, full_low, full_high, high = key_range(first, first + BLOCK_M - 1, k_len, left, right, LEFT, RIGHT, BLOCK_N)
    if LEFT:
        dq = _walk_keys_back(
            q, dout, dq, offset, delta, k_ptrs, v_ptrs, k_stride_s, v_stride_s, rows + shift, cols, low, tl.minimum(full_low, high), k_len, left, right,
            scale, softcap, True, LEFT, RIGHT, SOFTCAP, WIDTH, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    dq = _walk_keys_back(
        q, dout, dq, offset, delta, k_ptrs, v_ptrs, k_stride_s, v_stride_s, rows + shift, cols, full_low, full_high, k_len, left, right,
        scale, softcap, False, LEFT, RIGHT, SOFTCAP, WIDTH, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq = _walk_keys_back(
        q, dout, dq, offset, delta, k_ptrs, v_ptrs, k_stride_s, v_stride_s, rows + shift, cols, tl.maximum(full_low, full_high), high, k_len, left, right,
        scale, softcap, True, LEFT, RIGHT, SOFTCAP, WIDTH, BLOCK_D, BLOCK_N, PRECISION,
    )  # fmt: skip

    mask = (rows < q_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        dq_ptr + batch * dq_stride_b + head * dq_stride_h + at * dq_stride_s + cols[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        mask=mask,
    )
