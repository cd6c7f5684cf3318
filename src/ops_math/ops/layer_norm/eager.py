"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

import torch

from ops_math.dispatch import absent
from ops_math.ops.layer_norm.problem import LayerNormProblem, total_dtype
from ops_math.rng import keep_mask
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 4.0
CALLS = 9


def dropped(p: LayerNormProblem, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x / (1 - p) where the mask keeps, 0 elsewhere."""
    keep = keep_mask(state, torch.arange(p.rows, device=x.device), 0, p.cols, p.dropout_p).view(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p.dropout_p)), 0.0)


def summed(
    p: LayerNormProblem, x: torch.Tensor, residual: torch.Tensor | None, x_bias: torch.Tensor | None, state: torch.Tensor | None
) -> torch.Tensor:
    """What is normalised: x, or dropout(x + x_bias) + residual rounded once to the wider of the two dtypes."""
    if residual is None:
        return x
    dtype = compute_dtype(total_dtype(p))
    total = x.to(dtype)
    if x_bias is not None:
        total = total + x_bias.to(dtype)
    if state is not None:
        total = dropped(p, total, state)
    return (total + residual.to(dtype)).to(total_dtype(p)).contiguous()


def launch_fwd(
    p: LayerNormProblem,
    config: None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    x_bias: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, sum (empty without a residual), mean [rows] and rstd [rows]."""
    total = summed(p, x, residual, x_bias, state)
    dtype = compute_dtype(total.dtype)
    wide = total.to(dtype)
    mean = wide.mean(-1, keepdim=True)
    y = wide - mean
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + p.eps)
    y *= rstd
    if weight is not None:
        y *= weight.to(dtype)
    if bias is not None:
        y += bias.to(dtype)
    return y.to(DTYPE_OF[p.out]).contiguous(), absent(x) if residual is None else total, mean.reshape(-1), rstd.reshape(-1)


def launch_bwd(
    p: LayerNormProblem,
    config: None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dtotal = rstd (g - mean(g) - xhat mean(g xhat)) + dsum with g = dy weight; dx = dropout'(dtotal); and sums over rows."""
    dtype = compute_dtype(total.dtype)
    rstd = rstd.view(*total.shape[:-1], 1)
    xhat = (total.to(dtype) - mean.view(*total.shape[:-1], 1)) * rstd
    g = dy.to(dtype)
    dw = (g * xhat).reshape(-1, p.cols).sum(0).to(DTYPE_OF[p.weight]) if p.need_dw else absent(total)
    db = g.reshape(-1, p.cols).sum(0).to(DTYPE_OF[p.bias]) if p.need_db else absent(total)
    if not (p.need_dtotal or p.need_dx or p.need_dx_bias):
        return absent(total), absent(total), dw, db, absent(total)
    if weight is not None:
        g = g * weight.to(dtype)
    dtotal = (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)).mul_(rstd)
    if dsum is not None:
        dtotal += dsum
    dx = dropped(p, dtotal, state) if state is not None else dtotal
    dx_bias = dx.reshape(-1, p.cols).sum(0).to(DTYPE_OF[p.x_bias]) if p.need_dx_bias else absent(total)
    dx = dx.to(DTYPE_OF[p.x]).contiguous() if p.need_dx else absent(total)
    return dtotal.to(total.dtype).contiguous() if p.need_dtotal else absent(total), dx, dw, db, dx_bias
