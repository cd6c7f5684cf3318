"""PyTorch's own products: cuBLAS, hipBLAS, oneDNN or MKL."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops_math import features
from ops_math.layout import as_rows, dense, reshaped
from ops_math.ops.linear.problem import LinearProblem
from ops_math.spec import DTYPE_OF, Device

KINDS = ("cpu", "cuda", "hip")


def supports(p: LinearProblem, device: Device, phase: str) -> str | None:
    """It multiplies one dtype into the same."""
    if p.out != p.store:
        return "gives the dtype of its operands"
    if device.kind == "cpu" and p.store in ("bf16", "fp16"):
        return "may add up in 16 bits on a CPU"
    return None


def launch_fwd(p: LinearProblem, config: None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    store = DTYPE_OF[p.store]
    flat = x if x.dim() == 2 or x.is_contiguous() else reshaped(x, (-1, x.shape[-1]), "rows of linear's input", "its strides make no rows")
    made = F.linear(flat.to(store), weight.to(store), None if bias is None else bias.to(store))
    return dense(
        made if flat is x else made.view(*x.shape[:-1], p.outputs), "result of linear", "PyTorch's product wrote it in other strides"
    )


def launch_bwd(
    p: LinearProblem, config: None, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight, in fp32 where the device can and the weight is, and dbias; empty where not needed."""
    store = DTYPE_OF[p.store]
    dy_MN, bias = as_rows(dy, p.outputs), DTYPE_OF[p.bias or p.weight]
    dx = (dy_MN @ weight.to(store)).to(x.dtype).view(x.shape) if p.need_dx else x.new_empty(0)
    dw = weight.new_empty(0)
    if p.need_dw:
        x_MK = as_rows(x).to(store)
        wide = weight.dtype == torch.float32 != store and features.widens("mm", dy.device)
        dw = features.aten("mm", "dtype")(dy_MN.t(), x_MK, torch.float32) if wide else (dy_MN.t() @ x_MK).to(weight.dtype)
    wider = torch.promote_types(bias, torch.float32)
    db = dy_MN.sum(0, dtype=wider).to(bias) if p.need_db else x.new_empty(0, dtype=bias)
    return dx, dw, db
