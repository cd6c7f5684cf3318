"""PyTorch's own fused norm."""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.layout import dense
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.spec import Device

KINDS = ("cpu", "cuda", "hip")
WHY = "rows of a norm", "PyTorch's kernel takes tensors without gaps"
PASSES = {"fwd": 1.3, "bwd": 2.6}  # H200, bf16: 0.59 to 0.85 of a copy forward, 0.29 to 0.44 backward (2026-11-29)


def passes(p: RmsNormProblem, phase: str) -> float:
    """Memory traffic over the least possible."""
    return PASSES[phase]


def supports(p: RmsNormProblem, device: Device, phase: str) -> str | None:
    """It knows no residual, no offset, and one dtype for all."""
    name = "_fused_rms_norm" if phase == "fwd" else "_fused_rms_norm_backward"
    if not features.has_kernel(name, device.kind):
        return f"this PyTorch has no {name} kernel for {device.kind}"
    if p.residual and phase == "fwd":
        return "does not add a residual"
    if p.weight_offset and p.weight:
        return "has no weight offset"
    if p.weight not in ("", p.x) or p.out != p.x:
        return "wants one dtype for input, weight and output"
    if p.rows == 0:
        return "cannot take an empty input"
    return None


def launch_fwd(
    p: RmsNormProblem, config: None, x: torch.Tensor, residual: None, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, an empty sum, rstd [rows]."""
    y, rstd = features.aten("_fused_rms_norm")(dense(x, *WHY), [p.cols], weight, p.eps)
    return y, x.new_empty(0), rstd.reshape(-1)


def launch_bwd(
    p: RmsNormProblem,
    config: None,
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, plus dsum in a second pass, and dweight."""
    mask = [p.need_dx, weight is not None and p.need_dw]
    rows = dense(dy, *WHY), dense(x, *WHY)
    dx, dw = features.aten("_fused_rms_norm_backward")(*rows, [p.cols], rstd.view(*x.shape[:-1], 1), weight, mask)
    if dx is not None and dsum is not None:
        dx += dsum
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dw is None else dw
