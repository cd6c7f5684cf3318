"""Backward kernels with masks, key padding and dropout, whose mask is drawn again from the same words."""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.attention import LOG2E
from ops_math.ops._tiles.philox import keep_tile
from ops_math.ops.attention.triton_gpu_bwd import load_vector, query_range
from ops_math.ops.attention.triton_gpu_fwd import LENGTHS, key_range, load_rows, place_document, place_program, steps_of
from ops_math.ops.attention.triton_gpu_masked_fwd import hide_scores, kept_keys, load_kept


@triton.jit(do_not_specialize=(*LENGTHS, "threshold"))
def _bwd_dkdv_masked_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, offset_ptr, delta_ptr, offset_view, delta_view, mask_ptr, keep_ptr, cu_q_ptr, cu_k_ptr, state_ptr,
    dk_ptr, dv_ptr,
    num_tiles, num_heads, group, q_len, k_len, documents, steps,
    dout_stride_b, dout_stride_s, dout_stride_h, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, keep_stride_b, keep_stride_k,
    dk_stride_b, dk_stride_s, dk_stride_h, dv_stride_b, dv_stride_s, dv_stride_h, scale, softcap, align, left, right, threshold, raised,
    MASK: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dout_stride_b, dout_stride_s, dout_stride_h = steps_of(dout_stride_b, dout_stride_s, dout_stride_h)
    q_stride_b, q_stride_s, q_stride_h = steps_of(q_stride_b, q_stride_s, q_stride_h)
    k_stride_b, k_stride_s, k_stride_h = steps_of(k_stride_b, k_stride_s, k_stride_h)
    v_stride_b, v_stride_s, v_stride_h = steps_of(v_stride_b, v_stride_s, v_stride_h)
    dk_stride_b, dk_stride_s, dk_stride_h = steps_of(dk_stride_b, dk_stride_s, dk_stride_h)
    dv_stride_b, dv_stride_s, dv_stride_h = steps_of(dv_stride_b, dv_stride_s, dv_stride_h)
    tile, sequence = place_program(num_tiles, False)  # under a causal mask the first tiles are the longest
    kv_heads = num_heads // group
    kv_head = (sequence % kv_heads).to(tl.int64)
    batch = (sequence // kv_heads).to(tl.int64)
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
    kept = kept_keys(keep_ptr + batch * keep_stride_b, keep_stride_k, keys, k_len, PADDING)
    if DROPOUT:
        seed, stream = tl.load(state_ptr), tl.load(state_ptr + 1)
        first_number = batch * tokens + first_q + tl.load(state_ptr + 2)

    k = load_kept(k_ptr + batch * k_stride_b + kv_head * k_stride_h + k_rows * k_stride_s + cols[None, :], 0, kept, cols, WIDTH, BLOCK_D)
    v = load_kept(v_ptr + batch * v_stride_b + kv_head * v_stride_h + k_rows * v_stride_s + cols[None, :], 0, kept, cols, WIDTH, BLOCK_D)
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    low, _, _, high = query_range(tile * BLOCK_N, tile * BLOCK_N + BLOCK_N - 1, shift, q_len, left, right, True, True, BLOCK_M)
    for member in range(group):
        head = kv_head * group + member
        q_ptrs = q_ptr + batch * q_stride_b + head * q_stride_h + spread * q_stride_s + cols[None, :]
        dout_ptrs = dout_ptr + batch * dout_stride_b + head * dout_stride_h + spread * dout_stride_s + cols[None, :]
        row_of = (batch * num_heads + head) * tokens + first_q
        mask_base = mask_ptr + batch * mask_stride_b + head * mask_stride_h
        for start in range(low, high, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q = load_rows(q_ptrs, tl.cast(start, tl.int64) * q_stride_s, rows, q_len, cols, True, WIDTH, BLOCK_D)
            offset = load_vector(offset_view, offset_ptr, row_of, start, rows, q_len, float("inf"), ROWS)
            delta = load_vector(delta_view, delta_ptr, row_of, start, rows, q_len, 0.0, ROWS)
            if ROWS:
                offset, delta = tl.where(rows < q_len, offset, float("inf")), tl.where(rows < q_len, delta, 0.0)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            x, slope = hide_scores(
                s, rows[None, :], keys[:, None], kept[:, None], shift, q_len, k_len, left, right, scale, softcap, mask_base,
                mask_stride_q, mask_stride_k, MASK, SOFTCAP
            )  # fmt: skip
            p = tl.exp2(x * LOG2E - offset[None, :])
            dout = load_rows(dout_ptrs, tl.cast(start, tl.int64) * dout_stride_s, rows, q_len, cols, True, WIDTH, BLOCK_D)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            dropped = p
            if DROPOUT:
                chosen = tl.trans(keep_tile(seed, stream, first_number + rows, head, tile * BLOCK_N, threshold, BLOCK_N))
                dropped, dp = tl.where(chosen, p, 0.0), tl.where(chosen, dp * raised, 0.0)
            dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            if SOFTCAP:
                ds = ds * slope
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    mask = (keys < k_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(
        dk_ptr + batch * dk_stride_b + kv_head * dk_stride_h + k_rows * dk_stride_s + cols[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        mask=mask,
    )
    tl.store(
        dv_ptr + batch * dv_stride_b + kv_head * dv_stride_h + k_rows * dv_stride_s + cols[None, :],
        (dv * raised).to(dv_ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit(do_not_specialize=(*LENGTHS, "threshold"))
def _bwd_dq_masked_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, offset_ptr, delta_ptr, mask_ptr, keep_ptr, cu_q_ptr, cu_k_ptr, state_ptr, dq_ptr,
    num_tiles, num_heads, group, q_len, k_len, documents, steps,
    dout_stride_b, dout_stride_s, dout_stride_h, q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b,
    v_stride_s, v_stride_h,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, keep_stride_b, keep_stride_k,
    dq_stride_b, dq_stride_s, dq_stride_h, scale, softcap, align, left, right, threshold, raised,
    MASK: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dout_stride_b, dout_stride_s, dout_stride_h = steps_of(dout_stride_b, dout_stride_s, dout_stride_h)
    q_stride_b, q_stride_s, q_stride_h = steps_of(q_stride_b, q_stride_s, q_stride_h)
    k_stride_b, k_stride_s, k_stride_h = steps_of(k_stride_b, k_stride_s, k_stride_h)
    v_stride_b, v_stride_s, v_stride_h = steps_of(v_stride_b, v_stride_s, v_stride_h)
    dq_stride_b, dq_stride_s, dq_stride_h = steps_of(dq_stride_b, dq_stride_s, dq_stride_h)
    tile, sequence = place_program(num_tiles, False)
    tile = num_tiles - 1 - tile  # under a causal mask the last tiles are the longest
    head = (sequence % num_heads).to(tl.int64)
    batch = (sequence // num_heads).to(tl.int64)
    tokens = q_len
    first_q, first_k = batch * 0, batch * 0
    if PACKED:
        first_q, q_len, first_k, k_len, tile = place_document(cu_q_ptr, cu_k_ptr, tile, documents, steps, BLOCK_M)
        if tile * BLOCK_M >= q_len:
            return
    rows, cols = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    shift = (k_len - q_len) * align
    at = rows.to(tl.int64) + first_q
    spread = (first_k + tl.arange(0, BLOCK_N).to(tl.int64))[:, None]
    k_ptrs = k_ptr + batch * k_stride_b + head // group * k_stride_h + spread * k_stride_s + cols[None, :]
    v_ptrs = v_ptr + batch * v_stride_b + head // group * v_stride_h + spread * v_stride_s + cols[None, :]
    mask_base = mask_ptr + batch * mask_stride_b + head * mask_stride_h
    row_of = (batch * num_heads + head) * tokens + at
    if DROPOUT:
        seed, stream = tl.load(state_ptr), tl.load(state_ptr + 1)
        numbers = at + batch * tokens + tl.load(state_ptr + 2)

    q = load_rows(
        q_ptr + batch * q_stride_b + head * q_stride_h + at[:, None] * q_stride_s + cols[None, :],
        0,
        rows,
        q_len,
        cols,
        True,
        WIDTH,
        BLOCK_D,
    )
    dout_ptrs = dout_ptr + batch * dout_stride_b + head * dout_stride_h + at[:, None] * dout_stride_s + cols[None, :]
    dout = load_rows(dout_ptrs, 0, rows, q_len, cols, True, WIDTH, BLOCK_D)
    offset = tl.load(offset_ptr + row_of, mask=rows < q_len, other=float("inf"))
    delta = tl.load(delta_ptr + row_of, mask=rows < q_len, other=0.0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, _, _, high = key_range(tile * BLOCK_M + shift, tile * BLOCK_M + BLOCK_M - 1 + shift, k_len, left, right, True, True, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        kept = kept_keys(keep_ptr + batch * keep_stride_b, keep_stride_k, keys, k_len, PADDING)
        k = load_kept(k_ptrs, tl.cast(start, tl.int64) * k_stride_s, kept, cols, WIDTH, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x, slope = hide_scores(
            s, rows[:, None], keys[None, :], kept[None, :], shift, q_len, k_len, left, right, scale, softcap, mask_base, mask_stride_q,
            mask_stride_k, MASK, SOFTCAP
        )  # fmt: skip
        p = tl.exp2(x * LOG2E - offset[:, None])
        v = load_kept(v_ptrs, tl.cast(start, tl.int64) * v_stride_s, kept, cols, WIDTH, BLOCK_D)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(keep_tile(seed, stream, numbers, head, start, threshold, BLOCK_N), dp * raised, 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)

    mask = (rows < q_len)[:, None] & (cols < WIDTH)[None, :]
    dq_ptrs = dq_ptr + batch * dq_stride_b + head * dq_stride_h + at[:, None] * dq_stride_s + cols[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)
