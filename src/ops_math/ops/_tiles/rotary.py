"""Rotation of pairs of fp32 tiles."""

import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it)


@triton.jit
def turn(a, b, cos, sin):
    """(a, b) turned by the angle of cos and sin."""
    return a * cos - b * sin, b * cos + a * sin
