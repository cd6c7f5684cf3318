"""Tile functions of a logsumexp over a row that is wider than a tile, and of the soft cap that may come before it.

A row is read as tiles [L, G] in which each thread holds the G values of one 16-byte load. Every one of the L lanes keeps a running
maximum and sum of its own, so that no thread waits for another before the row's end, and the sum is rescaled once in G values.
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
def lane_finish(top, total):
    """The maximum of all lanes (0 for a row of -inf) and the log of the sum of exp(z - maximum); their sum is the logsumexp.

    They are given apart because a loss wants (maximum - z_target) + log: near probability 1, lse - z_target would cancel.
    """
    row_top = tl.max(top, 0)
    base = tl.where(row_top == float("-inf"), 0.0, row_top)
    return base, tl.log(tl.sum(total * tl.exp(top - base), 0))
