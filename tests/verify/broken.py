"""Operators with one fault each, beside honest ones, their references and inputs: what `verify` must tell apart.

They are importable, so that a report's snippet can be run in another process.
"""

from __future__ import annotations

from typing import Any

import torch


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def norm_inputs(d: Any, rows: int = 40, cols: int = 48) -> Any:
    return d.normal(rows, cols), d.normal(cols, offset=1.0), {"eps": 1e-6}


class _Norm(torch.autograd.Function):
    """RMSNorm with a hand-written backward. `fault` names what is wrong with it, empty for nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, fault: str) -> torch.Tensor:
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + (1e-5 if fault == "eps" else eps))
        ctx.save_for_backward(x, weight, rstd.bfloat16().float() if fault == "statistic in bf16" else rstd)
        ctx.fault = fault
        y = (wide * rstd * weight.float()).to(x.dtype)
        if fault == "last rows" and len(y) % 16:
            y[len(y) // 16 * 16 :] = 0
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x, weight, rstd), fault = ctx.saved_tensors, ctx.fault
        g, xhat = dy.float() * weight.float(), x.float() * rstd
        dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
        per_row = dy.float() * xhat
        dw = per_row.to(torch.bfloat16).sum(0, dtype=torch.bfloat16).float() if fault == "sum in bf16" else per_row.sum(0)
        if fault == "scale":
            dw = dw * 1.01
        if fault == "overwrites":
            dy.zero_()
        if fault == "no weight gradient":
            return dx.to(x.dtype), None, None, None
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return _Norm.apply(x, weight, eps, "")


def norm_with(fault: str) -> Any:
    return lambda x, weight, eps=1e-6: _Norm.apply(x, weight, eps, fault)


def norm_of_wrong_rows(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """A kernel that takes every input to be contiguous."""
    if not x.is_contiguous() and x.numel():
        x = x.as_strided(x.shape, torch.empty(x.shape).stride())
    return norm(x, weight, eps)


def norm_of_old_memory(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Adds what its padding held: nothing in fresh pages, and NaN is counted where a buffer was used before."""
    y = norm(x, weight, eps)
    return y + torch.isnan(torch.empty_like(y)).to(y.dtype)


def norm_without_repeat(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Rounds in another place on every call."""
    global CALLS
    CALLS += 1
    return norm(x * (1 + 2.0**-22 * (CALLS % 2)), weight, eps)


CALLS = 0


def norm_cut_from_the_graph(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return norm(x.detach(), weight.detach(), eps)


def norm_that_writes(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    y = norm(x, weight, eps)
    with torch.no_grad():
        x.mul_(1.5)
    return y


def norm_of_16(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    if x.shape[-1] % 16:
        raise ValueError("norm_of_16: the width must be a multiple of 16")
    return norm(x, weight, eps)


def norm_dividing_by_rows(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    rows_a_block = 4096 // len(x)
    return norm(x, weight, eps + 0.0 * rows_a_block)


def loss_reference(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[T] losses of logits [T, V]."""
    return torch.logsumexp(z, -1) - z.gather(-1, target[:, None])[:, 0]


def loss_inputs(d: Any, tokens: int = 40, classes: int = 64) -> Any:
    return d.normal(tokens, classes, scale=2.0), d.ints(classes, tokens)


def confident_inputs(d: Any, tokens: int = 40, classes: int = 64) -> Any:
    """The true class has a probability of about 0.99."""
    z, target = d.normal(tokens, classes), d.ints(classes, tokens)
    return z.scatter(-1, target[:, None], 9.0), target


class _Loss(torch.autograd.Function):
    """Cross-entropy that works out dz in the forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, target: torch.Tensor, fault: str) -> torch.Tensor:
        wide = z.float()
        top = wide.max(-1, keepdim=True).values if z.numel() else wide
        e = torch.exp(wide - top)
        total = e.sum(-1, keepdim=True)
        at = target[:, None]
        if fault == "true class":
            dz = (e / total).to(z.dtype)
            dz = dz.scatter_add(-1, at, torch.full_like(at, -1, dtype=z.dtype))
        else:
            others = e.scatter(-1, at, 0.0).sum(-1, keepdim=True)
            dz = (e / total).scatter(-1, at, -others / total)
        ctx.save_for_backward(dz)
        ctx.fault = fault
        return (total.log() + top - wide.gather(-1, at))[:, 0].to(z.dtype)

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> Any:
        (dz,) = ctx.saved_tensors
        scale = dloss[0] if ctx.fault == "first row" else dloss[:, None].float()
        return (dz.float() * scale).to(dz.dtype if ctx.fault == "true class" else dloss.dtype), None, None


def loss(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _Loss.apply(z, target, "")


def loss_of_the_first_gradient(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _Loss.apply(z, target, "first row")


def loss_rounded_before_the_subtraction(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _Loss.apply(z, target, "true class")
