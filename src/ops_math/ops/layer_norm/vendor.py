"""PyTorch's own layer norm; the residual is added in a pass of its own."""

from __future__ import annotations

from typing import Any

import torch

from ops_math import features
from ops_math.dispatch import absent
from ops_math.ops.layer_norm.eager import dropped, summed
from ops_math.ops.layer_norm.problem import LayerNormProblem, total_dtype
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Device, dtype_name

KINDS = ("cpu", "cuda", "hip")


def supports(p: LayerNormProblem, device: Device, phase: str) -> str | None:
    """One dtype for all; on the CPU parameters may be wider than the input."""
    name = "native_layer_norm" if phase == "fwd" else "native_layer_norm_backward"
    total = dtype_name(total_dtype(p))
    if not features.has_kernel(name, device.kind):
        return f"this PyTorch has no {name} kernel for {device.kind}"
    if p.out != total:
        return "wants one dtype for input and output"
    if device.kind != "cpu" and (p.residual or p.dsum):
        return "does not add a residual"
    if ITEM_SIZE[total] < 4 and p.dsum:
        return "would round the gradient before the residual's is added"
    if ITEM_SIZE[total] < 4 and (p.need_dx or p.need_dx_bias):
        return "would round the gradient before dropout or the sum over rows"
    if ITEM_SIZE[total] < 4 and device.kind == "cpu" and phase == "bwd" and (p.need_dw or p.need_db):
        return "sums the parameters' gradients in the dtype of the input on the CPU"
    for parameter in (p.weight, p.bias):
        if parameter not in ("", total) and (device.kind != "cpu" or ITEM_SIZE[parameter] < ITEM_SIZE[total]):
            return "wants one dtype for input and parameters"
    if p.rows == 0 or p.cols < 2:
        return "cannot take an empty input, and on one column does not cancel exactly"
    return None


def predict_us(p: LayerNormProblem, device: Device, phase: str) -> float:
    """One and a half passes over input and output, and one for each addition."""
    n = p.rows * p.cols * ITEM_SIZE[p.x]
    passes = (2 if phase == "fwd" else 4.5) * 1.3 + 3 * bool(p.residual) + 20 * bool(p.dropout_p)
    return n * passes / (device.bandwidth_gbs * 1e3) + device.launch_us * (1 + bool(p.residual))


def _parameters(p: LayerNormProblem, total: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> tuple[Any, Any]:
    """On the CPU wide parameters of a narrow input make PyTorch keep mean and rstd in fp32, as the backward needs them."""
    if total.device.type != "cpu" or total.element_size() >= 4:
        return weight, bias
    wide = torch.ones(p.cols, dtype=torch.float32) if weight is None else weight.float()
    return wide, None if bias is None else bias.float()


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
    total = summed(p, x, residual, x_bias, state).contiguous()
    weight, bias = _parameters(p, total, weight, bias)
    y, mean, rstd = features.aten("native_layer_norm")(total, [p.cols], weight, bias, p.eps)
    return y, absent(x) if residual is None else total, mean.reshape(-1), rstd.reshape(-1)


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
    """dtotal, dx, dweight, dbias, dx_bias."""
    need_rows = p.need_dtotal or p.need_dx or p.need_dx_bias
    wide, bias = _parameters(p, total, weight, total.new_empty(p.cols, dtype=DTYPE_OF[p.bias]) if p.need_db else None)
    shape = (*total.shape[:-1], 1)
    dtotal, dw, db = features.aten("native_layer_norm_backward")(
        dy.contiguous(), total.contiguous(), [p.cols], mean.view(shape), rstd.view(shape), wide, bias, [need_rows, p.need_dw, p.need_db]
    )
    dw = dw.to(DTYPE_OF[p.weight]) if p.need_dw else absent(total)
    db = db.to(DTYPE_OF[p.bias]) if p.need_db else absent(total)
    if not need_rows:
        return absent(total), absent(total), dw, db, absent(total)
    if dsum is not None:
        dtotal += dsum
    dx = dtotal if state is None else dropped(p, dtotal, state)
    dx_bias = dx.reshape(-1, p.cols).sum(0).to(DTYPE_OF[p.x_bias]) if p.need_dx_bias else absent(total)
    return dtotal if p.need_dtotal else absent(total), dx.to(DTYPE_OF[p.x]) if p.need_dx else absent(total), dw, db, dx_bias
