"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

Rows are worked through in pieces that stay in the cache, each pass in place: on the CPU a fresh tensor costs more than the arithmetic.
"""

from __future__ import annotations

import torch

from ops_math.dispatch import absent
from ops_math.layout import as_rows, row_pieces
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 4.0
CALLS = 12


def _weight(p: RmsNormProblem, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if weight is None:
        return None
    return weight.to(dtype) + p.weight_offset if p.weight_offset else weight.to(dtype)


def _scratch(target: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Where to compute: in the result itself if it has the dtype of arithmetic."""
    return target if target is not None and target.dtype == like.dtype else torch.empty_like(like, memory_format=torch.contiguous_format)


def launch_fwd(
    p: RmsNormProblem, config: None, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, sum (empty without a residual) and rstd [rows]."""
    dtype = compute_dtype(x.dtype)
    scale = _weight(p, weight, dtype)
    y_MN = torch.empty((p.rows, p.cols), dtype=DTYPE_OF[p.out], device=x.device)
    rstd_M1 = torch.empty((p.rows, 1), dtype=dtype, device=x.device)
    x_MN = as_rows(x)
    if residual is not None:
        residual_MN = as_rows(residual)
        total_MN = torch.empty((p.rows, p.cols), dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    for s in row_pieces(p.rows, p.cols, x.device):
        if residual is None:
            wide = x_MN[s].to(dtype)
        else:
            wide = torch.add(x_MN[s], residual_MN[s], out=total_MN[s]).to(dtype)  # PyTorch adds two bf16 in fp32 and rounds once
        y, rstd = _scratch(y_MN[s], wide), rstd_M1[s]
        torch.mean(torch.mul(wide, wide, out=y), -1, keepdim=True, out=rstd).add_(p.eps).rsqrt_()
        torch.mul(wide, rstd, out=y)
        if scale is not None:
            y *= scale
        if y.dtype != y_MN.dtype:
            y_MN[s] = y
    return y_MN.view(x.shape), absent(x) if residual is None else total_MN.view(x.shape), rstd_M1.view(-1)


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
    scale = _weight(p, weight, dtype)
    need_dw = weight is not None and p.need_dw
    dw = torch.zeros(p.cols, dtype=dtype, device=x.device) if need_dw else None
    dx_MN = torch.empty((p.rows, p.cols), dtype=x.dtype, device=x.device) if p.need_dx else None
    x_MN, dy_MN, rstd_M1 = as_rows(x), as_rows(dy), rstd.view(-1, 1)
    dsum_MN = None if dsum is None else as_rows(dsum)
    for s in row_pieces(p.rows, p.cols, x.device):
        wide, g, rstd_m1 = x_MN[s].to(dtype), dy_MN[s].to(dtype), rstd_M1[s]
        t = torch.mul(g, wide, out=_scratch(None if dx_MN is None else dx_MN[s], wide)).mul_(rstd_m1)
        if dw is not None:
            dw += t.sum(0)
        if dx_MN is None:
            continue
        if scale is not None:
            t *= scale
        share = t.mean(-1, keepdim=True).mul_(rstd_m1)
        t = t.copy_(g) if scale is None else torch.mul(g, scale, out=t)
        t.addcmul_(wide, share, value=-1).mul_(rstd_m1)
        if dsum_MN is not None:
            t += dsum_MN[s]
        if t.dtype != dx_MN.dtype:
            dx_MN[s] = t
    return absent(x) if dx_MN is None else dx_MN.view(x.shape), dw.to(weight.dtype) if dw is not None and weight is not None else absent(x)
