"""A padded batch cut to its own longest sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops_nn.data.sizes import fail, integral, rounded_up, whole

_WHAT = "trim_to_longest"


def trim_to_longest(mask: Tensor, *tensors: Tensor | None, multiple: int = 64) -> Any:
    """Cut a padded batch to its longest sequence, rounded up.

    Call it where batches are made, on the CPU: it looks at the mask's values, and on a GPU that waits for the device.

    Args:
        mask: [B, S], true or 1 at real tokens, which come first in each row (padding on the right).
        *tensors: token ids, labels, positions [B, S, ...], and masks [B, 1 or H, S, S]; None stays None.
        multiple: the new length is a multiple of it [tokens], and at most S, so that at most ceil(S / multiple) different lengths occur.

    Returns:
        The mask and the tensors, as views of length S' in place of S; with no further tensors the mask alone.

    Raises: ArgumentError for a mask of other values or with padding on the left or in the middle, for a tensor of another batch or length.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        got = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        fail(_WHAT, "mask", "a tensor [B, S]", got, "Pass 1 at real tokens and 0 at padding.")
    whole(_WHAT, "multiple", multiple)
    if mask.dtype != torch.bool and not (integral(mask) and bool(((mask == 0) | (mask == 1)).all())):
        got = f"one of {mask.dtype}" + (" with other values" if integral(mask) else "")  # one that is added would be read inside out
        fail(_WHAT, "mask", "of truth values, or of integers 0 and 1", got, "Of a mask that is added to scores pass mask == 0.")
    batch, length = mask.shape
    real = mask.bool()
    lengths = real.sum(1)
    if bool((real != (torch.arange(length, device=mask.device) < lengths[:, None])).any()):
        row = int((real != (torch.arange(length, device=mask.device) < lengths[:, None])).any(1).int().argmax())
        do = "Pad on the right, or pack the documents with pack_documents."
        fail(_WHAT, "mask", "true up to the length of each row and false after it", f"another order in row {row}", do)
    kept = min(rounded_up(int(lengths.max()) if batch else 0, multiple), length)
    cut = tuple(None if t is None else _cut(t, number, batch, length, kept) for number, t in enumerate(tensors))
    return (mask[:, :kept], *cut) if tensors else mask[:, :kept]


def _cut(t: Tensor, number: int, batch: int, length: int, kept: int) -> Tensor:
    if t.dim() == 4 and t.shape[0] in (1, batch) and t.shape[-1] == length and t.shape[-2] in (1, length):
        return t[..., : min(kept, t.shape[-2]), :kept]
    if t.dim() < 2 or tuple(t.shape[:2]) != (batch, length):
        needs = f"of shape [{batch}, {length}, ...], as mask is, or a mask [{batch}, H, {length}, {length}]"
        fail(_WHAT, f"tensor {number}", needs, f"shape {list(t.shape)}", "Check that it comes from the same batch.")
    return t[:, :kept]
