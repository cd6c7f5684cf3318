"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

Rows are worked through in pieces that stay in the cache, each pass in place: on the CPU a fresh tensor costs more than the arithmetic.
"""

from __future__ import annotations

import torch

from ops_math.dispatch import absent
from ops_math.layout import as_rows, row_pieces
from ops_math.ops.layer_norm.problem import LayerNormProblem, total_dtype
from ops_math.rng import honoured, keep_mask
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 6.0
CALLS = 16


def dropped(p: LayerNormProblem, x: torch.Tensor, state: torch.Tensor, first_row: int, out: torch.Tensor) -> torch.Tensor:
    """Write x / (1 - p) where the mask keeps, 0 elsewhere, for rows from `first_row` on, into `out`, which may be x."""
    keep = keep_mask(state, torch.arange(first_row, first_row + x.shape[0], device=x.device), 0, p.cols, p.dropout_p)
    torch.mul(x, 1.0 / (1.0 - honoured(p.dropout_p)), out=out)
    return torch.where(keep, out, torch.zeros((), dtype=out.dtype, device=out.device), out=out)


def scratch(target: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Where to compute: in the result itself if it has the dtype of arithmetic."""
    return target if target is not None and target.dtype == like.dtype else torch.empty_like(like, memory_format=torch.contiguous_format)


def summed(
    p: LayerNormProblem,
    x_MN: torch.Tensor,
    residual_MN: torch.Tensor,
    x_bias: torch.Tensor | None,
    state: torch.Tensor | None,
    s: slice,
    out: torch.Tensor,
) -> None:
    """Write dropout(x + x_bias) + residual of the rows `s` into `out`, rounded once."""
    if x_bias is None and state is None:
        torch.add(x_MN[s], residual_MN[s], out=out)  # PyTorch adds two bf16 in fp32 and rounds once
        return
    dtype = compute_dtype(out.dtype)
    wide = x_MN[s].to(dtype)
    total = scratch(out, wide)
    total = total.copy_(wide) if x_bias is None else torch.add(wide, x_bias.to(dtype), out=total)
    if state is not None:
        dropped(p, total, state, s.start, total)
    total += residual_MN[s]
    if total.dtype != out.dtype:
        out.copy_(total)


def launch_fwd(
    p: LayerNormProblem,
    config: None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    x_bias: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """y, sum (empty without a residual), mean [rows], rstd [rows] and y once more in the narrow dtype (empty without one)."""
    dtype = compute_dtype(total_dtype(p))
    y_MN = torch.empty((p.rows, p.cols), dtype=DTYPE_OF[p.out], device=x.device)
    narrow_MN = torch.empty((p.rows, p.cols), dtype=DTYPE_OF[p.narrow], device=x.device) if p.narrow else None
    mean_M1, rstd_M1 = (torch.empty((p.rows, 1), dtype=dtype, device=x.device) for _ in range(2))
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    x_MN = total_MN = as_rows(x)
    if residual is not None:
        residual_MN, total_MN = as_rows(residual), torch.empty((p.rows, p.cols), dtype=total_dtype(p), device=x.device)
    for s in row_pieces(p.rows, p.cols, x.device):
        if residual is not None:
            summed(p, x_MN, residual_MN, x_bias, state, s, total_MN[s])
        wide = total_MN[s].to(dtype)
        y, mean, rstd = scratch(y_MN[s], wide), mean_M1[s], rstd_M1[s]
        torch.sub(wide, torch.mean(wide, -1, keepdim=True, out=mean), out=y)
        torch.mean(y.square(), -1, keepdim=True, out=rstd).add_(p.eps).rsqrt_()
        y *= rstd
        if weight is not None:
            y *= weight
        if bias is not None:
            y += bias
        if y.dtype != y_MN.dtype:
            y_MN[s] = y
        if narrow_MN is not None:
            narrow_MN[s] = y
    total, narrow = absent(x) if residual is None else total_MN.view(x.shape), absent(x) if narrow_MN is None else narrow_MN.view(x.shape)
    return y_MN.view(x.shape), total, mean_M1.view(-1), rstd_M1.view(-1), narrow


def launch_bwd(
    p: LayerNormProblem,
    config: None,
    dy: torch.Tensor,
    dy_narrow: torch.Tensor | None,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dtotal = rstd (g - mean(g) - xhat mean(g xhat)) + dsum, g = (dy + dy_narrow) weight; dx = dropout'(dtotal); and sums over rows."""
    dtype = compute_dtype(total.dtype)
    need_rows = p.need_dtotal or p.need_dx or p.need_dx_bias
    needed = (p.need_dw, p.weight), (p.need_db, p.bias), (p.need_dx_bias, p.x_bias)
    sums = [torch.zeros(p.cols, dtype=dtype, device=total.device) if need else None for need, _ in needed]
    dtotal_MN = torch.empty((p.rows, p.cols), dtype=total.dtype, device=total.device) if p.need_dtotal else None
    dx_MN = torch.empty((p.rows, p.cols), dtype=DTYPE_OF[p.x], device=total.device) if p.need_dx else None
    weight = None if weight is None else weight.to(dtype)
    total_MN, dy_MN, mean_M1, rstd_M1 = as_rows(total), as_rows(dy), mean.view(-1, 1), rstd.view(-1, 1)
    dsum_MN, narrow_MN = (None if t is None else as_rows(t) for t in (dsum, dy_narrow))
    for s in row_pieces(p.rows, p.cols, total.device):
        wide, g, rstd_m1 = total_MN[s].to(dtype), dy_MN[s].to(dtype), rstd_M1[s]
        g = g if narrow_MN is None else g + narrow_MN[s]
        xhat = (wide - mean_M1[s]).mul_(rstd_m1)
        t = torch.mul(g, xhat, out=scratch(None if dtotal_MN is None else dtotal_MN[s], wide))
        for column, value in zip(sums[:2], (t, g), strict=True):
            if column is not None:
                column += value.sum(0)
        if not need_rows:
            continue
        if weight is not None:
            t *= weight
        dot = t.mean(-1, keepdim=True)
        t = t.copy_(g) if weight is None else torch.mul(g, weight, out=t)
        g_mean = t.mean(-1, keepdim=True)
        t.addcmul_(xhat, dot, value=-1).sub_(g_mean).mul_(rstd_m1)
        if dsum_MN is not None:
            t += dsum_MN[s]
        if dtotal_MN is not None and t.dtype != dtotal_MN.dtype:
            dtotal_MN[s] = t
        if dx_MN is None and sums[2] is None:
            continue
        dx = t if state is None else dropped(p, t, state, s.start, scratch(None if dx_MN is None else dx_MN[s], t))
        if dx_MN is not None and (state is None or dx.dtype != dx_MN.dtype):
            dx_MN[s] = dx
        if sums[2] is not None:
            sums[2] += dx.sum(0)
    rows = (absent(total) if t is None else t.view(total.shape) for t in (dtotal_MN, dx_MN))
    return *rows, *(absent(total) if t is None else t.to(DTYPE_OF[name]) for t, (_, name) in zip(sums, needed, strict=True))
