"""The forms in which a residual stream goes from block to block."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Unsummed(NamedTuple):
    """x + branch, not yet summed: the block or norm that takes it fuses the sum with its own norm."""

    x: torch.Tensor
    branch: torch.Tensor


class Narrowed(NamedTuple):
    """The residual stream of a post-norm model, and its copy in autocast's dtype: the next block sums with the one and multiplies the
    other, so that no pass over memory is spent on the cast, nor on the sum of the two gradients."""

    x: torch.Tensor
    narrow: torch.Tensor


Input = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | Unsummed | Narrowed
