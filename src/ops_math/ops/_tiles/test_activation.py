"""Activations and slopes of the tiles against float64. Triton decides at import whether it interprets, so the kernel runs in a process
of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl  # noqa: E402

from ops_math.ops._tiles.activation import activate, activate_with_slope  # noqa: E402
from ops_math.testing import interpreter  # noqa: E402

SOURCE = Path(__file__).parents[3]
SIZE = 4096
# Largest error of the value over max(|value|, 2^-8), so relative down to 4e-3, and of the slope. fp32 rounds to 6e-8; the argument of the
# exponential, up to 8 on this range, is rounded before it is raised.
LIMITS = {"gelu": (8e-7, 5e-7), "gelu_tanh": (3e-6, 2e-6), "silu": (1e-6, 5e-7)}
TAIL = 2e-6  # of gelu down to x = -4, where 1 + erf cancels to 5e-4


@triton.jit
def _kernel(x_ptr, y_ptr, again_ptr, slope_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    y, slope = activate_with_slope(x, ACTIVATION)
    tl.store(y_ptr + place, activate(x, ACTIVATION))
    tl.store(again_ptr + place, y)
    tl.store(slope_ptr + place, slope)


def _exact(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and slope in float64; gelu by erfc, which keeps the left tail."""
    if name == "gelu":
        share = 0.5 * torch.erfc(-x / math.sqrt(2.0))
        return x * share, share + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    leaf = x.clone().requires_grad_()
    fn: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu
    y = fn(leaf) if name == "silu" else torch.nn.functional.gelu(leaf, approximate="tanh")
    return y.detach(), torch.autograd.grad(y.sum(), leaf)[0]


def errors() -> dict[str, float | bool]:
    """What each activation is off by; to be called in an interpreting process."""
    interpreter.repair()
    x = torch.linspace(-4.0, 4.0, SIZE)
    found: dict[str, float | bool] = {}
    for name in LIMITS:
        y, again, slope = (torch.full_like(x, math.nan) for _ in range(3))
        _kernel[(1,)](x, y, again, slope, ACTIVATION=name, BLOCK=SIZE)
        value, want = _exact(name, x.double())
        off = (y.double() - value).abs()
        found[f"{name} value"] = (off / value.abs().clamp_min(2.0**-8)).max().item()
        found[f"{name} tail"] = (off / value.abs())[(x < -1e-3)].max().item()
        found[f"{name} slope"] = (slope.double() - want).abs().max().item()
        found[f"{name} same"] = torch.equal(y, again)
        far = torch.tensor([-3e38, -40.0, -14.0, 0.0, 14.0, 40.0, 3e38, math.nan])
        at = [torch.full_like(far, 7.0) for _ in range(3)]
        _kernel[(1,)](far, *at, ACTIVATION=name, BLOCK=8)
        value = at[0]
        vanishes, passes = value[:4].abs().max().item() < 1e-4, torch.equal(value[5:7], far[5:7])
        found[f"{name} far"] = vanishes and passes and bool(value[7:].isnan().all())
    return found


@pytest.mark.interpreter
def test_activations_and_slopes_are_those_of_float64_to_the_rounding_of_fp32() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for name, (value, slope) in LIMITS.items():
        assert found[f"{name} value"] <= value, found
        assert found[f"{name} slope"] <= slope, found
        assert found[f"{name} same"], f"{name}: the two tiles differ"
        assert found[f"{name} far"], f"{name}: wrong far out"
    assert found["gelu tail"] <= TAIL, found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(errors()) + "\n")
