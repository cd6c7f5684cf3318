"""Activations of fp32 tiles and their slopes.

tanh is not needed: (1 + tanh u) / 2 = sigmoid(2 u), and sigmoid(z) = 1 / (1 + exp(-z)) goes to 0 and 1 where exp overflows and
vanishes, without a case of its own.
"""

import triton
import triton.language as tl

_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_RSQRT_2 = tl.constexpr(0.7071067811865476)
_RSQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """activation(x) for `silu`, `gelu` (error function) or `gelu_tanh`."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * _RSQRT_2))
    elif ACTIVATION == "silu":
        y = x * _sigmoid(x)
    else:
        y = x * _sigmoid(x * (_SLOPE + _SLOPE * _CUBIC * x * x))
    return y


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr):
    """activation(x) and its derivative."""
    if ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.math.erf(x * _RSQRT_2)
        y = x * share
        slope = share + x * _RSQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "silu":
        s = _sigmoid(x)
        y = x * s
        slope = s + y * (1.0 - s)
    else:
        inner = _SLOPE + _SLOPE * _CUBIC * x * x
        s = _sigmoid(x * inner)
        y = x * s
        curve = y * (1.0 - s)
        # Far out curve is 0 and the slope of z may be infinite: their product is 0.
        slope = s + tl.where(curve == 0.0, 0.0, curve * (3.0 * inner - 2.0 * _SLOPE))
    return y, slope
