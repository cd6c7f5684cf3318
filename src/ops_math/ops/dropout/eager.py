"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others."""

from __future__ import annotations

import torch

from ops_math.layout import as_rows, row_pieces
from ops_math.ops.dropout.problem import DropoutProblem
from ops_math.rng import honoured, keep_mask
from ops_math.spec import compute_dtype

PASSES = 10.0  # on the CPU the mask takes ten times as long as moving the data
CALLS = 100


def launch_fwd(p: DropoutProblem, config: None, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """x / (1 - p) where the mask keeps, 0 elsewhere, rounded once."""
    y_MN = torch.empty((p.rows, p.cols), dtype=x.dtype, device=x.device)
    x_MN, dtype = as_rows(x), compute_dtype(x.dtype)
    zero = torch.zeros((), dtype=dtype, device=x.device)
    for s in row_pieces(p.rows, p.cols, x.device, 2**18):
        keep = keep_mask(state, torch.arange(s.start, s.stop, device=x.device), 0, p.cols, p.p)
        wide = x_MN[s].to(dtype)
        y = torch.mul(wide, 1.0 / (1.0 - honoured(p.p)), out=y_MN[s] if x.dtype == dtype else torch.empty_like(wide))
        torch.where(keep, y, zero, out=y)
        if x.dtype != dtype:
            y_MN[s] = y
    return y_MN.view(x.shape)


def launch_bwd(p: DropoutProblem, config: None, dy: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The same function of the gradient, with the mask drawn again."""
    return launch_fwd(p, config, dy, state)
