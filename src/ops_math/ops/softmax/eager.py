"""The operator in plain torch: the yardstick of rounding for the others."""

from __future__ import annotations

import torch

from ops_math.layout import dense
from ops_math.ops.softmax.problem import SoftmaxProblem
from ops_math.spec import DTYPE_OF, compute_dtype

WHY = "result of softmax", "its input has other strides"
PASSES = 4.0
CALLS = 5


def launch_fwd(p: SoftmaxProblem, config: None, x: torch.Tensor) -> torch.Tensor:
    """exp(x - max) over its sum, rounded once."""
    if p.cols == 0:
        return torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    wide = x.to(compute_dtype(x.dtype))
    y = (wide - wide.amax(-1, keepdim=True)).exp_()
    y /= y.sum(-1, keepdim=True)
    return dense(y.to(DTYPE_OF[p.out]), *WHY)


def launch_bwd(p: SoftmaxProblem, config: None, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """dx = y (dy - sum(y dy))."""
    dtype = compute_dtype(y.dtype)
    y, dy = y.to(dtype), dy.to(dtype)
    dx = (dy - (y * dy).sum(-1, keepdim=True)).mul_(y)
    return dense(dx.to(DTYPE_OF[p.x]), *WHY)
