"""The end of a language model: logits and loss in one, so that the logits never exist whole while training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import ops_math as om


def loss_and_logits(hidden: Tensor, linear: Any, labels: Tensor, training: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Mean cross entropy [nats] of a linear head, and the logits where they may be wanted (not in training).

    Args:
        hidden: [..., H].
        linear: the head, weight [V, H].
        labels: [...], int64; -100 is not counted.
        training: whether the model trains, and its caller wants the loss alone.
        **options: as `om.cross_entropy` takes them.
    """
    if training:
        return om.linear_cross_entropy(hidden, linear.weight, labels, bias=linear.bias, **options), None
    logits = linear(hidden)
    return om.cross_entropy(logits, labels, **options), logits
