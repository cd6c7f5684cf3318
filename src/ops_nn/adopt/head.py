"""The end of a language model: logits and loss in one, so that the logits never exist whole while training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ops_math as om

IGNORE_INDEX = -100
ROW_MULTIPLE = 256  # labelled rows are rounded up to this, so that few different sizes occur from step to step
WORTH_SELECTING = 0.6  # share of labelled rows above which picking them out saves too little


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


def labelled_rows(labels: Tensor) -> Tensor | None:
    """The positions that carry a label, first, filled up with others to a round number; None where all may as well be computed.

    A masked-language model labels about a seventh of its tokens, and the others' logits count for nothing. Finding them out waits for
    the device once, which is why it is done before the step's work is queued; not while tracing or capturing, which cannot wait.

    Args:
        labels: [...], int64; -100 where there is no label.
    """
    if torch.compiler.is_compiling() or (labels.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    has_label = labels.reshape(-1) != IGNORE_INDEX
    count, total = int(has_label.sum()), has_label.numel()
    rows = max(-(-count // ROW_MULTIPLE), 1) * ROW_MULTIPLE
    if rows > WORTH_SELECTING * total:
        return None
    return torch.argsort(has_label.to(torch.uint8), descending=True, stable=True)[:rows]


def masked_loss(hidden: Tensor, predictions: Any, labels: Tensor, rows: Tensor | None) -> Tensor:
    """Mean cross entropy [nats] of BERT's prediction head over the labelled positions.

    Args:
        hidden: [B, S, C].
        predictions: transform (dense, GELU, LayerNorm) and decoder.
        labels: [B, S], int64; -100 is not counted.
        rows: as from `labelled_rows`; None for all.
    """
    x, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if rows is not None:
        x, target = x.index_select(0, rows), target.index_select(0, rows)
    transform, decoder = predictions.transform, predictions.decoder
    act = om.gelu(F.linear(x, transform.dense.weight), transform.dense.bias, approximate=_approximate(transform))
    norm = transform.LayerNorm
    y = om.layer_norm(act, norm.weight, norm.bias, eps=norm.eps)
    return om.linear_cross_entropy(y, decoder.weight, target, bias=decoder.bias, ignore_index=IGNORE_INDEX)


def _approximate(transform: Any) -> str:
    activation = getattr(transform, "transform_act_fn", None)
    return (
        "tanh"
        if activation is not None and type(activation).__name__ != "GELUActivation" and getattr(activation, "approximate", "tanh") == "tanh"
        else "none"
    )


def why_not_masked(cls: nn.Module) -> str:
    """Why BERT's prediction head runs as it is, or nothing."""
    found = om.part_of(cls)
    if found.kind is None or found.reason:
        return found.reason
    activation = getattr(cls.predictions.transform, "transform_act_fn", None)  # type: ignore[union-attr]
    function = getattr(getattr(activation, "act", F.gelu), "func", getattr(activation, "act", F.gelu))
    return "" if function is F.gelu else "transform_act_fn is not PyTorch's GELU"
