"""Tile functions of a loss with class targets: what the target of a row says, the row's loss, the factors of its gradient."""

import triton
import triton.language as tl


@triton.jit
def read_target(target, num_cols, ignore_index):
    """Of one target or a vector: whether it is kept, a class that can be read, and 1 (0 if ignored, NaN if outside the vocabulary)."""
    y = target.to(tl.int64)
    kept = y != ignore_index
    inside = (y >= 0) & (y < num_cols)
    one = tl.where(kept, tl.where(inside, 1.0, float("nan")), 0.0)
    return kept, tl.where(inside, y, 0), one


@triton.jit
def row_loss(lse, surprise, smooth_sum, smooth_total, kept, weight, one, smoothing, smooth, z_loss, SMOOTHING: tl.constexpr):
    """(1 - s) w_y surprise + s / V (W lse - sum of w z) + z_loss lse^2, 0 where ignored; surprise is lse - z_y, without cancellation."""
    loss = (1.0 - smoothing) * weight * surprise + one * (z_loss * lse * lse)
    if SMOOTHING:
        loss += one * (smooth_total * lse - smooth * smooth_sum)
    return tl.where(kept, loss, 0.0)


@triton.jit
def row_factors(lse, smooth_total, weight, one, scale, smoothing, smooth, z_loss):
    """What p, the target's column and each column are multiplied with in dz = p a - b [column = y] - c w, times the row's scale."""
    at_target = (1.0 - smoothing) * weight * scale
    on_p = at_target + one * scale * (smooth_total + 2.0 * z_loss * lse)
    return on_p, at_target, one * scale * smooth
