"""Arithmetic of whole rows as tiles [BLOCK_M, BLOCK_N] in fp32: moments, and what norms send back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import triton
import triton.language as tl

from ops_math.backends import launch as launching
from ops_math.layout import alignment
from ops_math.spec import Device


def held_whole(
    rows: int, block_n: int, wishes: Iterable[tuple[int, int, int, int]], device: Device, phase: str
) -> Iterator[tuple[int, int, int, int, int]]:
    """Rows and columns a tile, warps, programs and stages, of each wish that is legal, once, where a row lies in registers.

    A wish is values a tile, values a thread, stages, and warps a core, as many as the registers hold. The forward starts one program for
    each tile unless it loads ahead; else programs are persistent.
    """
    lanes, most_warps = (64, 16) if device.kind == "hip" else (32, 32)
    seen = set()
    for tile, values, num_stages, warps_a_core in wishes:
        block_m = max(1, min(tile // block_n, 16))
        num_warps = min(max(block_m * block_n // (values * lanes), 1), most_warps)
        tiles, most = max(-(-rows // block_m), 1), device.num_cores * max(warps_a_core // num_warps, 1)
        found = (block_m, block_n, num_warps, min(tiles, most) if phase == "bwd" or num_stages > 1 else tiles, num_stages)
        fits = block_m * block_n <= max(values, 32) * num_warps * lanes
        if found not in seen and fits and (device.kind != "hip" or num_stages == 1):
            seen.add(found)
            yield found


class Limitable(Protocol):
    """A configuration whose kernel can be given fewer registers."""

    block_n: int
    num_warps: int
    num_stages: int

    def _replace(self, **fields: Any) -> Any: ...


C = TypeVar("C", bound=Limitable)


def limits_known(cols: int, device: Device) -> bool:
    """Whether rows are read 16 bytes at a time, and the device is one of those that limits were found for; sm_80 spills."""
    return device.kind == "cuda" and int(device.arch) >= 90 and alignment(cols) == 16


def limits_hold() -> bool:
    """Whether limits were found, and measured, with this Triton's compiler: with that of 3.9 a thread keeps 24 to 96 bytes on the stack."""
    return launching.triton_minor() == "3.6"


def limited(found: Iterable[C], limits: dict[tuple[int, int], int]) -> Iterator[C]:
    """Each configuration with the limit of its columns and warps, where there is one, before itself without; behind all where nobody knows
    that limits hold."""
    late = []
    for config in found:
        limit = limits.get((config.block_n, config.num_warps), 0) if config.num_stages == 1 else 0
        if limit and limits_hold():
            yield config._replace(registers=limit)
        elif limit:
            late.append(config._replace(registers=limit))
        yield config
    yield from late


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
