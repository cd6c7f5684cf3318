"""Forward kernel with masks, key padding and dropout: one loop, every tile masked; bounds are numbers here, large where there is none."""

from __future__ import annotations

import triton
import triton.language as tl

from ops_math.ops._tiles.attention import LOG2E, finish_softmax, softmax_step, tanh_tile, visible_tile
from ops_math.ops._tiles.philox import keep_tile
from ops_math.ops.attention.triton_gpu_fwd import LENGTHS, key_range, load_rows, place_document, place_program, steps_of

MASKED_BELOW = tl.constexpr(-1e30)
NO_MASK, BOOLEAN, ADDITIVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def kept_keys(keep_ptr, stride, keys, k_len, PADDING: tl.constexpr):
    """Which keys of a tile may be seen at all."""
    if PADDING:
        return tl.load(keep_ptr + keys.to(tl.int64) * stride, mask=keys < k_len, other=0) != 0
    return keys < k_len


@triton.jit
def load_kept(ptrs, offset, kept, cols, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [rows, BLOCK_D] of kept rows, zeros elsewhere: padding may hold anything, and 0 times NaN is NaN."""
    if WIDTH != BLOCK_D:
        return tl.load(ptrs + offset, mask=kept[:, None] & (cols < WIDTH)[None, :], other=0.0)
    return tl.load(ptrs + offset, mask=kept[:, None], other=0.0)


@triton.jit
def hide_scores(
    s, rows, keys, kept, shift, q_len, k_len, left, right, scale, softcap, mask_ptr, mask_stride_q, mask_stride_k, MASK: tl.constexpr,
    SOFTCAP: tl.constexpr
):  # fmt: skip
    """Scores, -inf where hidden, and the slope of the soft cap. rows and keys are a column and a row, or a row and a column."""
    x = s * scale
    slope = 1.0
    if SOFTCAP:
        t = tanh_tile(x / softcap)
        x = t * softcap
        slope = 1.0 - t * t
    seen = visible_tile(rows + shift, keys, k_len, left, right, True, True) & kept
    if MASK != NO_MASK:
        inside = (rows < q_len) & (keys < k_len)
        found = tl.load(mask_ptr + rows.to(tl.int64) * mask_stride_q + keys.to(tl.int64) * mask_stride_k, mask=inside, other=0)
        if MASK == BOOLEAN:
            seen = seen & (found != 0)
        else:
            bias = found.to(tl.float32)
            seen = seen & (bias > MASKED_BELOW)
            x = x + bias
    return tl.where(seen, x, float("-inf")), slope


@triton.jit(do_not_specialize=(*LENGTHS, "threshold"))
def _fwd_masked_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, keep_ptr, cu_q_ptr, cu_k_ptr, state_ptr, out_ptr, lse_ptr, num_tiles, num_heads, group, q_len,
    k_len, documents, steps,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_k, keep_stride_b, keep_stride_k,
    scale, softcap, align, left, right, threshold, raised,
    MASK: tl.constexpr, PADDING: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, PACKED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    q_stride_b, q_stride_s, q_stride_h = steps_of(q_stride_b, q_stride_s, q_stride_h)
    k_stride_b, k_stride_s, k_stride_h = steps_of(k_stride_b, k_stride_s, k_stride_h)
    v_stride_b, v_stride_s, v_stride_h = steps_of(v_stride_b, v_stride_s, v_stride_h)
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
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)

    low, _, _, high = key_range(tile * BLOCK_M + shift, tile * BLOCK_M + BLOCK_M - 1 + shift, k_len, left, right, True, True, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        kept = kept_keys(keep_ptr + batch * keep_stride_b, keep_stride_k, keys, k_len, PADDING)
        k = load_kept(k_ptrs, tl.cast(start, tl.int64) * k_stride_s, kept, cols, WIDTH, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        x, _slope = hide_scores(
            s, rows[:, None], keys[None, :], kept[None, :], shift, q_len, k_len, left, right, scale, softcap, mask_base, mask_stride_q,
            mask_stride_k, MASK, SOFTCAP
        )  # fmt: skip
        e, shrink, top, total = softmax_step(x, LOG2E, top, total)
        if DROPOUT:
            e = tl.where(keep_tile(seed, stream, numbers, head, start, threshold, BLOCK_N), e, 0.0)
        v = load_kept(v_ptrs, tl.cast(start, tl.int64) * v_stride_s, kept, cols, WIDTH, BLOCK_D)
        acc = tl.dot(e.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    divisor, lse = finish_softmax(top, total)

    place = (batch * tokens + at)[:, None] * (num_heads * WIDTH) + (head * WIDTH + cols)[None, :]
    mask = (rows < q_len)[:, None] & (cols < WIDTH)[None, :]
    tl.store(out_ptr + place, (acc * (raised / divisor)[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + (batch * num_heads + head) * tokens + at, lse, mask=rows < q_len)
