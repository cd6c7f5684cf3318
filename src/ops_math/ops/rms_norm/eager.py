"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

import torch

from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 4.0
CALLS = 6


def _weight(p: RmsNormProblem, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if weight is None else weight.to(dtype) + p.weight_offset


def launch_fwd(
    p: RmsNormProblem, config: None, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, sum (empty without a residual) and rstd [rows]."""
    dtype = compute_dtype(x.dtype)
    total = x if residual is None else (x.to(dtype) + residual.to(dtype)).to(torch.promote_types(x.dtype, residual.dtype)).contiguous()
    wide = total.to(dtype)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + p.eps)
    y = wide * rstd
    scale = _weight(p, weight, dtype)
    if scale is not None:
        y *= scale
    return y.to(DTYPE_OF[p.out]).contiguous(), total if residual is not None else x.new_empty(0), rstd.reshape(-1)


def launch_bwd(
    p: RmsNormProblem,
    config: None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx = rstd (g - xhat mean(g xhat)) + dsum with g = dy (weight + offset); dweight = sum over rows of dy xhat."""
    dtype = compute_dtype(x.dtype)
    xhat, g = x.to(dtype) * rstd.view(*x.shape[:-1], 1), dy.to(dtype)
    dw = (g * xhat).reshape(-1, p.cols).sum(0).to(weight.dtype) if weight is not None and p.need_dw else x.new_empty(0)
    if not p.need_dx:
        return x.new_empty(0), dw
    scale = _weight(p, weight, dtype)
    if scale is not None:
        g = g * scale
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd.view(*x.shape[:-1], 1)
    if dsum is not None:
        dx += dsum
    return dx.to(x.dtype).contiguous(), dw
