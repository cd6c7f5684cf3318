"""Clipping by norm without a pass that writes gradients: the factor goes into the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.utils import get_total_norm

SMALL = 1e-6  # what `torch.nn.utils.clip_grad_norm_` adds to the norm


class ClipScale(NamedTuple):
    """`coefficient`, by which gradients are to be multiplied, and their `norm` before that; both are tensors [] on their device."""

    coefficient: torch.Tensor
    norm: torch.Tensor


def clip_scale(
    params: Iterable[torch.Tensor], max_norm: float, *, norm_type: float = 2.0, grad_scale: torch.Tensor | None = None
) -> ClipScale:
    """What `torch.nn.utils.clip_grad_norm_` would multiply gradients by, without multiplying: pass it to `AdamW.step(clip=...)`.

    coefficient = min(1, max_norm / (norm + 1e-6))

    The gradients are read once more for their norm; that they are not written saves two thirds of the clipping's traffic. Nothing
    synchronises.

    Args:
        params: parameters of any shapes; those without a gradient count nothing.
        max_norm: the largest norm that passes, above 0.
        norm_type: which norm over all gradients as one vector.
        grad_scale: what a loss scaler multiplied the loss by [], where the gradients still carry it; the norm is that of unscaled ones.

    Returns:
        ClipScale of two fp32 tensors []. Without any gradient the norm is 0 and the coefficient 1.

    Source: Pascanu et al., On the Difficulty of Training Recurrent Neural Networks, 2013.
    """
    grads = [p.grad for p in params if p.grad is not None]
    norm = get_total_norm(grads, norm_type)
    if hasattr(norm, "full_tensor"):  # a DTensor: the norm over all shards
        norm = norm.full_tensor()
    norm = norm.float()
    if grad_scale is not None:
        norm = norm / grad_scale.to(norm.device).reshape(())
    return ClipScale((max_norm / (norm + SMALL)).clamp(max=1.0), norm)
