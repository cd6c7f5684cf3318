"""What a block reads from a norm it knows, and that norm alone or fused with the residual sum before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ops_math import settings
from ops_math.blocks import recognise
from ops_math.ops.dropout.op import dropout
from ops_math.ops.layer_norm.op import add_layer_norm, layer_norm
from ops_math.ops.rms_norm.op import add_rms_norm, rms_norm
from ops_math.rng import Rng
from ops_math.spec import compute_dtype

KINDS = ("rms_norm", "layer_norm")


class Norm(NamedTuple):
    """What is read from a norm."""

    kind: str
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    weight_offset: float = 0.0


def read(module: Any, x: torch.Tensor) -> Norm | str:
    """The values of a norm over the last dimension of `x`, or why it is not one that is known."""
    if not recognise.sound(module, KINDS):
        return recognise.why_not(module, KINDS)
    held, own = module.__dict__["_parameters"], module.__dict__.get
    shape = own("normalized_shape")
    if shape is not None and tuple(shape) != (x.shape[-1],):
        return f"it normalises over {tuple(shape)}, not over the last dimension alone"
    eps = own("variance_epsilon", own("eps"))
    if eps is None:
        eps = torch.finfo(compute_dtype(x.dtype)).eps  # as F.rms_norm takes it
    kind = recognise.kind_of(module).kind  # type: ignore[union-attr]
    return Norm(kind, held.get("weight"), held.get("bias"), eps, own("weight_offset", 0.0))


def _observed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator's result, seen by the debugger where one is on."""
    debugger = settings.STATE.debug
    return function(*args, **kwargs) if debugger is None else debugger.operator(function, args, kwargs)


def normalise(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    """norm(x)."""
    if norm.kind == "rms_norm":
        return _observed(rms_norm, x, norm.weight, eps=norm.eps, weight_offset=norm.weight_offset)
    return _observed(layer_norm, x, norm.weight, norm.bias, eps=norm.eps)


def adds_bias(kind: str, x: torch.Tensor) -> bool:
    """Whether a norm's kernel adds the bias of the product before it, and sums that bias's gradient: one pass less each way. On a CPU
    the product adds its bias for nothing."""
    return kind == "layer_norm" and x.is_cuda


def takes_bias(module: Any, x: torch.Tensor) -> bool:
    """`adds_bias` of a norm module."""
    part = recognise.kind_of(module)
    return part is not None and adds_bias(part.kind, x)


def add_and_normalise(
    norm: Norm, branch: torch.Tensor, x: torch.Tensor, dropout_p: float, rng: Rng | None, bias: torch.Tensor | None, stream: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(s, norm(s)) with s = x + dropout(branch + bias). Where norm(s) is the residual `stream`, it keeps the stream's dtype: under
    autocast a stream rounded at each norm doubles the error of BERT's gradients."""
    out_dtype = x.dtype if stream else None
    if norm.kind == "layer_norm":
        options = {"eps": norm.eps, "dropout_p": dropout_p, "rng": rng, "x_bias": bias, "out_dtype": out_dtype}
        y, total = _observed(add_layer_norm, branch, x, norm.weight, norm.bias, **options)
        return total, y
    branch = with_bias(branch, bias)
    branch = _observed(dropout, branch, dropout_p, rng=rng) if dropout_p else branch
    y, total = _observed(add_rms_norm, branch, x, norm.weight, eps=norm.eps, weight_offset=norm.weight_offset, out_dtype=out_dtype)
    return total, y


def with_bias(branch: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """branch + bias in the branch's dtype."""
    return branch if bias is None else (branch + bias).to(branch.dtype)
