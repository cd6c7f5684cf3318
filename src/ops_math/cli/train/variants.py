"""The three ways to run one model: as it is, compiled, and with ops-math."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import nn

from ops_math import checks
from ops_math.cli.train.batches import seed_of
from ops_math.cli.train.config import COMPILED, OPS_MATH, TrainConfig
from ops_math.cli.train.engine import Run
from ops_nn.models import build


class Unavailable(Exception):
    """A variant that cannot run here, with the reason in words."""


def weights(config: TrainConfig) -> nn.Module:
    """The model with its initial weights, the same for every variant."""
    return build(config.model, seed=seed_of(config.seed, "weights"), device=config.torch_device).train()


def make(name: str, config: TrainConfig) -> tuple[Run, list[str]]:
    """A run of one variant, from the initial weights, and what was replaced in its model.

    Raises:
        Unavailable: for a compiled run where nothing can compile.
    """
    model = weights(config)
    if name == COMPILED:
        return Run(name, model, compiled(model, config), config), []
    adopted = [str(row) for row in adopt(model).report] if name == OPS_MATH else []
    return Run(name, model, model, config), adopted


def compiled(model: nn.Module, config: TrainConfig) -> Any:
    """`torch.compile(model)`.

    On the CPU its kernels are given names in the profiler, so that they can be counted; nothing else differs from the
    defaults.
    """
    options: dict[str, Any] = {}
    if config.torch_device.type == "cpu":
        import torch._inductor.config as inductor

        if hasattr(inductor.cpp, "enable_kernel_profile"):
            options["cpp.enable_kernel_profile"] = True
    try:
        return torch.compile(model, options=options or None)
    except RuntimeError as error:
        raise Unavailable(first_line(error)) from error


def adopt(model: nn.Module) -> Any:
    """Put ops-math into the model, in place; what was adopted is in the result's `report`."""
    if importlib.util.find_spec("ops_nn.adopt") is None:
        checks.refuse("train: the ops-math run", "this installation has no ops_nn.adopt", "Install a complete ops-math")
    from ops_nn.adopt import adopt as adopt_model

    return adopt_model(model)


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
