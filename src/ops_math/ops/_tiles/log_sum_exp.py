"""Tile functions of a row's exponentials, and of the soft cap that may come before them.

The exponentials of a row are summed relative to its top logit and without the target's: at a probability near 1, total - 1 would keep
no digit of what the other classes hold, and with logits of a thousand top + log(total) keeps none of log(total)'s below 6e-5.

A row wider than a tile is read as tiles [L, G] in which each thread holds the G values of one 16-byte load. Every one of the L lanes
keeps a running maximum and sum of its own, so that no thread waits for another before the row's end, and the sum is rescaled once in G
values.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(u):
    """tanh to about 3 units of fp32: a minimax polynomial of our own below 0.6, where 1 - 2 / (exp(2u) + 1) would cancel."""
    square = u * u
    poly = -0.0058951381139219555 * square + 0.020795954087503826
    poly = poly * square - 0.05378382488098363
    poly = poly * square + 0.13331924060014405
    poly = poly * square - 0.33333297999442757
    magnitude = tl.minimum(tl.abs(u), 20.0)  # exp must not overflow; tanh(20) is 1 in fp32
    large = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    large = tl.where(u < 0, -large, large)
    return tl.where(tl.abs(u) < 0.6, u + u * square * poly, tl.where(u == u, large, u))


@triton.jit
def soft_capped(z, softcap):
    """softcap * tanh(z / softcap), between -softcap and softcap."""
    return softcap * tanh(z / softcap)


@triton.jit
def lane_update(top, total, z):
    """The running maximum and sum of exp(z - top) of L lanes after a tile z [L, G]; -inf adds nothing, even to lanes that saw only it."""
    new = tl.maximum(top, tl.max(z, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    total = total * tl.exp(top - base) + tl.sum(tl.exp(z - base[:, None]), 1)
    return new, total


@triton.jit
def joined(top, z_target):
    """The top of a row (0 for a row of -inf) from that of the other classes and the target's logit, and how far the target lies below.

    The target's exponential is exp(-below): made from the one rounded difference that the loss uses too, whatever is contracted.
    """
    row_top = tl.maximum(top, z_target)
    row_top = tl.where(row_top == float("-inf"), 0.0, row_top)
    return row_top, row_top - z_target


@triton.jit
def lane_finish(top, total, z_target):
    """Of all lanes, which have not seen the target, and the target: the row's top and how far the target lies below it, as `joined`
    has them, and the sum of exp(z - top) over the other classes."""
    row_top, below = joined(tl.max(top, 0), z_target)
    return row_top, below, tl.sum(total * tl.exp(top - row_top), 0)
