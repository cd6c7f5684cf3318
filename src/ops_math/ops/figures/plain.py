"""The sizes, counts and samples as one writes them with plain torch, in float64 and many passes: what both implementations are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from ops_math.ops.figures.problem import spaced


def sizes(t: Tensor) -> Tensor:
    """Sum of squares, largest magnitude, NaN and infinities [4], float64."""
    values = (torch.view_as_real(t) if t.is_complex() else t).double().flatten()
    counts = torch.stack([torch.isnan(values).sum(), torch.isinf(values).sum()]).double()
    finite = values[torch.isfinite(values)]
    largest = finite.abs().max() if finite.numel() else torch.zeros((), dtype=torch.float64, device=t.device)
    return torch.cat([torch.stack([finite.square().sum(), largest]), counts])


def samples(t: Tensor) -> Tensor:
    """Up to 16 values, float64."""
    values = (torch.view_as_real(t) if t.is_complex() else t).double().flatten()
    return values[torch.tensor(spaced(values.numel()), dtype=torch.int64, device=t.device)]
