"""Tile functions of a loss with class targets: what the target of a row says, the row's loss, the factors of its gradient."""

import triton
import triton.language as tl

from ops_math.ops._tiles.log_sum_exp import lane_update


@triton.jit
def read_target(target, num_cols, ignore_index):
    """Of one target or a vector: whether it is kept, a class that can be read, and 1 (0 if ignored, NaN if outside the vocabulary)."""
    y = target.to(tl.int64)
    kept = y != ignore_index
    inside = (y >= 0) & (y < num_cols)
    one = tl.where(kept, tl.where(inside, 1.0, float("nan")), 0.0)
    return kept, tl.where(inside, y, 0), one


@triton.jit
def reference_of(z_target):
    """What logits are summed relative to for smoothing, known before the row is read: the target's logit, 0 where that is -inf."""
    return tl.where(z_target == float("-inf"), 0.0, z_target)


@triton.jit
def row_results(
    top, below, others, smooth_sum, smooth_total, kept, weight, one, smoothing, smooth, z_loss, SMOOTHING: tl.constexpr
):  # fmt: skip
    """A row's loss (1 - s) w_y (lse - z_y) + s / V (W lse - sum of w z) + z_loss lse^2, 0 where ignored; and what its gradient needs: top,
    a and b in dz = a exp(z - top) - s / V w, with b in place of the first term at the target. b holds p - 1 as minus the other classes'
    share. An ignored row, which need not have been read, has top = inf: every exponential is then 0.

    `top` and `below` are those of `joined`, `others` the other classes' exponentials, `smooth_sum` the sum of w (z - reference). Every
    thread of a row does all of this, so it is kept short: it took a sixth of the time of rows of 1,000 (H200, 2026-11-29).
    """
    own = tl.exp(-below)
    u = (own - 1.0) + others  # the total less 1, with all its digits: `others` is small only where `own` is 1
    total = 1.0 + u
    share = 1.0 / total
    log_total = tl.log(total) + (u - (total - 1.0)) * share  # of what rounding the total lost, the first order
    lse, surprise = top + log_total, below + log_total
    at_target, on_each = (1.0 - smoothing) * weight, one * (smooth_total + 2.0 * z_loss * lse)
    loss = at_target * surprise + one * (z_loss * lse * lse)
    if SMOOTHING:
        above = tl.where(below == float("inf"), lse, surprise)  # lse - reference
        loss += one * (smooth_total * above - smooth * smooth_sum)
    a, b = (at_target + on_each) * share, (on_each * own - at_target * others) * share
    return tl.where(kept, loss, 0.0), tl.where(kept, top, float("inf")), tl.where(kept, a, 0.0), tl.where(kept, b, 0.0)


@triton.jit
def taken_in(
    z, mask, cols, places, hidden, class_weight_ptr, reference, top, total, smooth_lanes, HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """The lanes of a row after the logits `z` of its columns `cols`, -inf where masked, without the one whose place is `hidden`."""
    if SMOOTHING:
        every = tl.where(mask, z - reference, 0.0)
        if HAS_WEIGHT:
            every = every * tl.load(class_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        smooth_lanes += tl.sum(every, 1)
    if hidden is not None:
        z = tl.where(places == hidden, float("-inf"), z)
    top, total = lane_update(top, total, z)
    return top, total, smooth_lanes
