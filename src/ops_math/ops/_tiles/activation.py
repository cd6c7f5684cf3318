"""Activations of fp32 tiles and their slopes.

tanh is not needed: (1 + tanh u) / 2 = sigmoid(2 u), and sigmoid(z) = 1 / (1 + exp(-z)) goes to 0 and 1 where exp overflows and
vanishes, without a case of its own.

The normal distribution's integral has no `erf` either, whose forty instructions hold the kernel below the speed of memory (H200: 0.65
of a copy): P(-a) = exp(-a^2 / 2) t Q(t) with t = 1 / (1 + 0.3 a) for a >= 0, and P(a) = 1 - P(-a). Q, of degree 7, is the fit of least
largest relative error, 1.5e-7, over a in [0, 14]. The slope needs the same exponential. Where x < 0 the result keeps its relative
accuracy (1e-6 down to -4), which 1 + erf loses by cancellation (5e-4).
"""

import triton
import triton.language as tl

_SLOPE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)
_HALF_LOG2E = tl.constexpr(0.7213475204444817)  # exp(-x^2 / 2) = 2^(-x^2 log2(e) / 2)
_RSQRT_2PI = tl.constexpr(0.3989422804014327)
_BEND = tl.constexpr(0.3)
_Q0 = tl.constexpr(0.11962930113077164)
_Q1 = tl.constexpr(0.12075396627187729)
_Q2 = tl.constexpr(0.09991341084241867)
_Q3 = tl.constexpr(0.12856192886829376)
_Q4 = tl.constexpr(-0.05368424206972122)
_Q5 = tl.constexpr(0.20635418593883514)
_Q6 = tl.constexpr(-0.15720349550247192)
_Q7 = tl.constexpr(0.03567487746477127)


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _normal(x):
    """The normal distribution's integral up to x, and exp(-x^2 / 2)."""
    bell = tl.exp2(x * x * -_HALF_LOG2E)
    root = tl.rsqrt(1.0 + tl.abs(x) * _BEND)  # two instructions to t; a division takes six and is no more exact (2 ulp)
    t = root * root
    q = t * _Q7 + _Q6
    q = q * t + _Q5
    q = q * t + _Q4
    q = q * t + _Q3
    q = q * t + _Q2
    q = q * t + _Q1
    q = q * t + _Q0
    tail = bell * (t * q)
    return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """activation(x) for `silu`, `gelu` (error function) or `gelu_tanh`."""
    if ACTIVATION == "gelu":
        share, _ = _normal(x)
        y = x * share
    elif ACTIVATION == "silu":
        y = x * _sigmoid(x)
    else:
        y = x * _sigmoid(x * (_SLOPE + _SLOPE * _CUBIC * x * x))
    return y


@triton.jit
def activate_with_slope(x, ACTIVATION: tl.constexpr):
    """activation(x) and its derivative."""
    if ACTIVATION == "gelu":
        share, bell = _normal(x)
        y = x * share
        slope = share + x * _RSQRT_2PI * bell
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
