"""The operator as one pass over each row, compiled for the CPU: what `eager` does in several."""

from __future__ import annotations

import functools

import torch

from ops_math.backends import inductor
from ops_math.dispatch import absent
from ops_math.layout import as_rows, dense
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.spec import DTYPE_OF, Device, compute_dtype

PASSES = 1.5  # forward and backward, and the weight's gradient reads its rows once more
CALLS = 2
WHY = "rows of a norm", "compiled code walks rows that lie side by side"


def supports(p: RmsNormProblem, device: Device, phase: str) -> str | None:
    """Anything that has values."""
    return None if p.rows and p.cols else "does not take empty tensors"


def _scaled(p: RmsNormProblem, t: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return t if weight is None else t * (weight.to(t.dtype) + p.weight_offset if p.weight_offset else weight.to(t.dtype))


def _forward(p: RmsNormProblem, x_MN: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rest = list(others)
    total_MN = x_MN + rest.pop(0) if p.residual else x_MN
    wide_MN = total_MN.to(compute_dtype(x_MN.dtype))
    rstd_M = torch.rsqrt(wide_MN.square().mean(-1) + p.eps)
    y_MN = _scaled(p, wide_MN * rstd_M[:, None], rest.pop() if rest else None).to(DTYPE_OF[p.out])
    return (y_MN, rstd_M, total_MN) if p.residual else (y_MN, rstd_M)


def _backward(
    p: RmsNormProblem, dy_MN: torch.Tensor, x_MN: torch.Tensor, rstd_M: torch.Tensor, *others: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As `eager` derives it: dx = rstd (g - xhat mean(g xhat)) + dsum with g = dy (weight + offset); dweight = sum of dy xhat."""
    rest, dtype, made = list(others), compute_dtype(x_MN.dtype), []
    dsum_MN = rest.pop(0) if p.residual else None
    weight = rest.pop() if p.weight else None
    dy_MN, normed_MN = dy_MN.to(dtype), x_MN.to(dtype) * rstd_M[:, None]
    if p.need_dx:
        g_MN = _scaled(p, dy_MN, weight)
        dx_MN = (g_MN - normed_MN * (g_MN * normed_MN).mean(-1, keepdim=True)) * rstd_M[:, None]
        made.append((dx_MN if dsum_MN is None else dx_MN + dsum_MN).to(x_MN.dtype))
    if p.need_dw and weight is not None:
        made.append((dy_MN * normed_MN).sum(0).to(weight.dtype))
    return tuple(made)


def launch_fwd(
    p: RmsNormProblem, config: None, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, sum (empty without a residual) and rstd [rows]."""
    rows = [dense(as_rows(t), *WHY) for t in (x, residual) if t is not None]
    tensors = [*rows, *([] if weight is None else [weight.contiguous()])]
    lengths = ((0,),) * len(rows) + ((),) * (weight is not None)
    general = p._replace(rows=-1, need_dx=True, need_dw=True)
    y, rstd, *total = inductor.call(("rms_norm fwd", general), functools.partial(_forward, general), tensors, lengths)
    return y.view(x.shape), total[0].view(x.shape) if total else absent(x), rstd


def launch_bwd(
    p: RmsNormProblem,
    config: None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dweight, empty where not asked for."""
    need_dw = weight is not None and p.need_dw
    if not p.need_dx and not need_dw:
        return absent(x), absent(x)
    rows = [dense(as_rows(t), *WHY) for t in (dy, x)] + [rstd.contiguous()]
    rows += [] if dsum is None else [dense(as_rows(dsum), *WHY)]
    tensors = [*rows, *([] if weight is None else [weight.contiguous()])]
    lengths = ((0,),) * len(rows) + ((),) * (weight is not None)
    general = p._replace(rows=-1)
    made = list(inductor.call(("rms_norm bwd", general), functools.partial(_backward, general), tensors, lengths))
    return made.pop(0).view(x.shape) if p.need_dx else absent(x), made.pop() if need_dw else absent(x)
