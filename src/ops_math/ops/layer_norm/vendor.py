"""PyTorch's own layer norm; the residual is added in a pass of its own."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import features
from ops_math.dispatch import absent
from ops_math.layout import as_rows, dense, row_pieces
from ops_math.ops.layer_norm.eager import dropped, scratch, summed
from ops_math.ops.layer_norm.problem import LayerNormProblem, total_dtype
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Device, dtype_name

KINDS = ("cpu", "cuda", "hip")
WHY = "rows of a norm", "PyTorch's kernel takes tensors without gaps"
PASSES = {"fwd": 1.7, "bwd": 2.6}  # H200, bf16: 1714 to 2623 GB/s forward, 950 to 1754 backward (2026-11-29)
CALLS = 2


def passes(p: LayerNormProblem, phase: str) -> float:
    """Memory traffic over the least possible."""
    return PASSES[phase]


def supports(p: LayerNormProblem, device: Device, phase: str) -> str | None:
    """One dtype for all; on the CPU parameters may be wider than the input."""
    name = "native_layer_norm" if phase == "fwd" else "native_layer_norm_backward"
    total = dtype_name(total_dtype(p))
    if not features.has_kernel(name, device.kind):
        return f"this PyTorch has no {name} kernel for {device.kind}"
    if p.narrow:
        return "stores y once, and takes one gradient of it"
    if p.out != total:
        return "wants one dtype for input and output"
    if device.kind != "cpu" and (p.residual or p.dsum):
        return "does not add a residual"
    for parameter in (p.weight, p.bias):
        if parameter not in ("", total) and (device.kind != "cpu" or ITEM_SIZE[parameter] < ITEM_SIZE[total]):
            return "wants one dtype for input and parameters"
    if p.rows == 0 or p.cols < 2:
        return "cannot take an empty input, and on one column does not cancel exactly"
    return None


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
    """y, sum (empty without a residual), mean [rows], rstd [rows], and empty: it stores no narrow copy."""
    if residual is None:
        total = dense(x, *WHY)
    else:
        x_MN, residual_MN = as_rows(x), as_rows(residual)
        total = torch.empty(x.shape, dtype=total_dtype(p), device=x.device)
        for s in row_pieces(p.rows, p.cols, x.device):
            summed(p, x_MN, residual_MN, x_bias, state, s, total.view(p.rows, p.cols)[s])
    if total.device.type == "cpu" and total.element_size() < 4:  # with wide parameters PyTorch keeps mean and rstd in fp32
        weight = torch.ones(p.cols, dtype=torch.float32) if weight is None else weight.float()
        bias = None if bias is None else bias.float()
    y, mean, rstd = features.aten("native_layer_norm")(total, [p.cols], weight, bias, p.eps)
    return y, absent(x) if residual is None else total, mean.reshape(-1), rstd.reshape(-1), absent(x)


def launch_bwd(
    p: LayerNormProblem,
    config: None,
    dy: torch.Tensor,
    dy_narrow: None,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """dtotal, dx, dweight, dbias, dx_bias. On the CPU narrow dtypes are widened by pieces: PyTorch would sum in bf16 there."""
    narrow = total.device.type == "cpu" and total.element_size() < 4
    dtype = torch.float32 if narrow else total.dtype
    need_rows = p.need_dtotal or p.need_dx or p.need_dx_bias
    mask = [need_rows, p.need_dw, p.need_db]
    weight = weight.to(dtype) if narrow and weight is not None else weight
    stand_in = (
        (weight if p.bias == p.weight else total.new_empty(p.cols, dtype=dtype if narrow else DTYPE_OF[p.bias])) if p.need_db else None
    )
    total_MN, dy_MN, mean_M1, rstd_M1 = as_rows(total), as_rows(dy), mean.view(-1, 1), rstd.view(-1, 1)
    dsum_MN = None if dsum is None else as_rows(dsum)
    sums: list[Any] = [None, None, None]
    dtotal_MN = torch.empty((p.rows, p.cols), dtype=total.dtype, device=total.device) if narrow and p.need_dtotal else None
    dx_MN = torch.empty((p.rows, p.cols), dtype=DTYPE_OF[p.x], device=total.device) if p.need_dx else None
    for s in row_pieces(p.rows, p.cols, total.device) if narrow else [slice(0, p.rows)]:
        inputs = (dense(t[s].to(dtype), *WHY) for t in (dy_MN, total_MN))
        dtotal, dw, db = features.aten("native_layer_norm_backward")(*inputs, [p.cols], mean_M1[s], rstd_M1[s], weight, stand_in, mask)
        if need_rows and dsum_MN is not None:
            dtotal += dsum_MN[s]
        if dtotal_MN is not None:
            dtotal_MN[s] = dtotal
        elif p.need_dtotal:
            dtotal_MN = dtotal
        dx = dtotal
        if state is not None and (p.need_dx or p.need_dx_bias):
            dx = dropped(p, dtotal, state, s.start, scratch(None if dx_MN is None else dx_MN[s], dtotal))
        if dx_MN is not None and (state is None or dx.dtype != dx_MN.dtype):
            dx_MN[s] = dx
        found = dw if p.need_dw else None, db if p.need_db else None, dx.sum(0) if p.need_dx_bias else None
        sums = [new if old is None else old.add_(new) for old, new in zip(sums, found, strict=True)]
    rows = (absent(total) if t is None else t.view(total.shape) for t in (dtotal_MN, dx_MN))
    names = p.weight, p.bias, p.x_bias
    return *rows, *(absent(total) if t is None else t.to(DTYPE_OF[name]) for t, name in zip(sums, names, strict=True))
