"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

import torch

from ops_math.ops.dropout.problem import DropoutProblem
from ops_math.rng import keep_mask
from ops_math.spec import compute_dtype

CALLS = 100  # Philox is about ninety passes over a fourth of the elements


def launch_fwd(p: DropoutProblem, config: None, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x / (1 - p) where the mask keeps, 0 elsewhere, rounded once."""
    keep = keep_mask(state, torch.arange(p.rows, device=x.device), 0, p.cols, p.p).view(x.shape)
    y = x.to(compute_dtype(x.dtype)) * (1.0 / (1.0 - p.p))
    return torch.where(keep, y, 0.0).to(x.dtype).contiguous()


def launch_bwd(p: DropoutProblem, config: None, dy: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The same function of the gradient, with the mask drawn again."""
    return launch_fwd(p, config, dy, state)
