"""Attention on tiles of scores: which are visible, the soft cap, one step of the softmax that never sees a whole row.

Scores are exponents of two inside kernels: exp(s - m) = exp2(s log2(e) - m log2(e)), and the factor is folded into the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def visible_tile(at, keys, k_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Mask of the keys that a query at key position `at` sees; one of the two is a column, the other a row."""
    seen = keys < k_len
    if RIGHT:
        seen = seen & (keys <= at + right)
    if LEFT:
        seen = seen & (keys >= at - left)
    return seen


@triton.jit
def tanh_tile(x):
    """tanh to a few units in the last place: a polynomial near zero, where 1 - 2 / (1 + exp(2x)) would cancel."""
    x2 = x * x
    near = x + x * x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * (-0.0539682540 + x2 * (0.0218694885 - x2 * 0.0088632355))))
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(x2 < 0.09, near, far)


@triton.jit
def softmax_step(x, factor, top, total):
    """Take a tile of scores into a running softmax.

    x [M, N] scores, -inf where hidden; factor > 0 makes exponents of two of them. top [M] is the largest exponent so far, total [M]
    the sum of powers relative to it. Returns the tile's powers, what sums so far shrink by, and the new top and total.
    """
    new_top = tl.maximum(top, tl.max(x, 1) * factor)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet: -inf - -inf must not arise
    e = tl.exp2(x * factor - base[:, None])
    shrink = tl.exp2(top - base)
    return e, shrink, new_top, total * shrink + tl.sum(e, 1)


@triton.jit
def finish_softmax(top, total):
    """What to divide by and the natural logarithm of the sum of exponentials; a row without a key: 1 and -inf."""
    return tl.where(total == 0.0, 1.0, total), (top + tl.log2(total)) * LN2


@triton.jit
def exponent_offset(lse):
    """lse as an exponent of two to subtract from scores; +inf for a row without a key, whose probabilities are then 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
