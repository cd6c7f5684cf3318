"""Losses of language models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ops_math as om


class CrossEntropy(nn.Module):
    """Cross entropy [nats] of logits.

    Args:
        ignore_index: a target that is not counted.
        label_smoothing: share of the target distribution spread over all classes.
        z_loss: factor of the squared log-sum-exp, which keeps logits from drifting.
        softcap: c in c tanh(logit / c).
        reduction: `mean`, `sum` or `none`.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.reduction = (
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
            reduction,
        )

    def forward(self, logits: Tensor, target: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """The loss: a scalar, or [...] without reduction.

        Args:
            logits: [..., V].
            target: [...], int64 or int32.
            num_tokens: a tensor of one element to divide by instead of the number of counted targets (a global count).
        """
        return om.cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            num_tokens=num_tokens,
        )


class LinearCrossEntropy(nn.Module):
    """A language model's head: logits without targets; with targets the loss, whose logits never exist whole.

    Args:
        hidden_size: width H of the input.
        vocab_size: number V of classes.
        bias: whether there is one.
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in `CrossEntropy`.
        device, dtype: of the parameters.

    Parameters: weight [V, H], as `lm_head.weight` in checkpoints (assign an embedding's weight to tie it), and bias [V].
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(vocab_size, device=device, dtype=dtype)) if bias else None
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.reduction = (
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
            reduction,
        )

    def forward(self, x: Tensor, target: Tensor | None = None, num_tokens: Tensor | None = None) -> Tensor:
        """Logits [..., V] of `x` [..., H], or with `target` [...] the loss.

        Args:
            x: [..., H].
            target: [...], int64 or int32, or None for the logits (capped where there is a soft cap).
            num_tokens: a tensor of one element to divide by instead of the number of counted targets.
        """
        if target is None:
            logits = nn.functional.linear(x, self.weight, self.bias)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return om.linear_cross_entropy(
            x,
            self.weight,
            target,
            bias=self.bias,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            num_tokens=num_tokens,
        )
