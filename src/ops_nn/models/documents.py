"""Several documents in one row, in plain PyTorch: which tokens may see each other."""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(cu_seqlens: Tensor, rows: int, length: int, causal: bool) -> Tensor:
    """True where a query (third dimension) may see a key (last): `[R, 1, S, S]`.

    Args:
        cu_seqlens: `[documents + 1]` integers, the first of the `R * S` tokens of each document, and their number.
        rows: R.
        length: S; a document lies within one row.
        causal: whether a query sees only itself and what stands before it.
    """
    tokens = torch.arange(rows * length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).view(rows, length)
    seen = document[:, None, :, None] == document[:, None, None, :]
    return seen.tril() if causal else seen
