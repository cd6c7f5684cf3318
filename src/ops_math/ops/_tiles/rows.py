"""Arithmetic of whole rows as tiles [BLOCK_M, BLOCK_N] in fp32: moments, and what norms send back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moments(x, valid, count):
    """(x - mean with masked columns zero, mean [M], mean square of the centred row [M]).

    Two passes over registers, since E[x^2] - E[x]^2 cancels when a row has a large common offset. valid [BLOCK_N] says which columns
    exist, count how many do; x is zero in the others.
    """
    mean = tl.sum(x, 1) / count
    centred = tl.where(valid[None, :], x - mean[:, None], 0.0)
    return centred, mean, tl.sum(centred * centred, 1) / count


@triton.jit
def merged_moments(count, mean, squares, block_count, block_mean, block_squares):
    """Mean and sum of centred squares of two parts of a row together (Chan, Golub and LeVeque, 1979)."""
    total = count + block_count
    delta = block_mean - mean
    share = block_count / total
    return total, mean + delta * share, squares + block_squares + delta * delta * count * share


@triton.jit
def layer_norm_gradient(g, xhat, rstd, g_mean, dot_mean):
    """(g - mean(g) - xhat mean(g xhat)) rstd, the means given as [M].

    g must not be a bare product: the compiler would contract it with the subtraction into an fma, whose product is not rounded as the one
    in the mean was, and a row of one column, whose gradient is 0, would get the difference times rstd. A 0 added to the product rounds it.
    """
    return (g - g_mean[:, None] - xhat * dot_mean[:, None]) * rstd[:, None]


@triton.jit
def rms_norm_gradient(g, xhat, rstd, dot_mean):
    """(g - xhat mean(g xhat)) rstd, the mean given as [M]."""
    return (g - xhat * dot_mean[:, None]) * rstd[:, None]
