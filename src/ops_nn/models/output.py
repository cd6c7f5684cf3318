"""What a baseline model returns, and how its loss is computed."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


class ModelOutput(NamedTuple):
    """Result of a model's forward.

    Attributes:
        loss: mean cross entropy in nats per counted token, a scalar, or None when no labels were given.
        logits: `[B, S, V]`, or None where an adopted model computes the loss without them.
    """

    loss: Tensor | None
    logits: Tensor | None


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy [nats] in fp32 over the tokens whose label is not -100.

    Args:
        logits: `[B, S, V]`.
        labels: `[B, S]` int64, aligned with `logits` (nothing is shifted here).
    """
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
