"""Models to step, their gradients, and the ways in which a step can go."""

from __future__ import annotations

import math

import torch
from torch.nn import Parameter

import ops_math as om

SHAPES = ((31,), (), (40, 19), (3, 4, 5), (0,))
STEPS = 50
EXACT = 1e-12
PEER = {"foreach": False, "fused": False}
ROADS = {"chosen": om.enabled, "eager": lambda: om.force(adamw="eager"), "off": lambda: om.enabled(False)}


def parameters(dtype: torch.dtype = torch.float64) -> list[Parameter]:
    make = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=make).to(dtype)) for shape in SHAPES]


def in_groups(params: list[Parameter]) -> list[dict]:
    return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 3e-3, "betas": (0.8, 0.99)}]


def feed(params: list[Parameter], step: int, sometimes: bool = False) -> None:
    """Gradients of a step; with `sometimes` each parameter goes without one now and then."""
    make = torch.Generator().manual_seed(100 + step)
    for number, p in enumerate(params):
        g = torch.randn(p.shape, generator=make).to(p.dtype)
        p.grad = None if sometimes and (step + number) % 3 == 0 else g


def walk(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: range = range(STEPS), sometimes: bool = False) -> None:
    for step in steps:
        feed(params, step, sometimes)
        optimizer.step()


def gap(one: list[Parameter], other: list[Parameter]) -> float:
    worst = max((a.double() - b.double()).abs().max().item() for a, b in zip(one, other, strict=True) if a.numel())
    return math.inf if math.isnan(worst) else worst
