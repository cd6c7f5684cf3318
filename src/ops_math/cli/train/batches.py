"""What one step of training sees, and the random numbers that decide it; needs torch alone."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from ops_nn.models import IGNORE_INDEX

MASKED_SHARE, REPLACED_BY_MASK, REPLACED_AT_RANDOM = 0.15, 0.8, 0.1


class Batch(NamedTuple):
    """What one step sees: `input_ids` and `labels`, both `[B, S]` int64; labels are aligned, -100 is not counted.

    Where documents are kept apart, `position_ids` `[B, S]` count from 0 in each and `cu_seqlens` says where each begins.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """What there is, by name."""
        return {name: t for name, t in self._asdict().items() if t is not None}

    def to(self, device: torch.device) -> Batch:
        """On another device."""
        return Batch(**{name: t.to(device) for name, t in self.named().items()})


class MaskIds(NamedTuple):
    """Ids that masking needs: of the mask token, of the first ordinary token, and one past the last."""

    mask: int
    first: int
    end: int


def mask_tokens(tokens: Tensor, ids: MaskIds, random: torch.Generator) -> Batch:
    """Hide 15 % of the tokens: of these 80 % become the mask token, 10 % a random one, 10 % stay (Devlin et al., 2018).

    Special tokens are neither hidden nor drawn. At least one token of the batch is hidden, so that the loss is a number.
    """
    ordinary = tokens >= ids.first
    chosen = (torch.rand(tokens.shape, generator=random) < MASKED_SHARE) & ordinary
    if not chosen.any():
        chosen.view(-1)[int(ordinary.view(-1).int().argmax())] = True
    kind = torch.rand(tokens.shape, generator=random)
    drawn = torch.randint(ids.first, ids.end, tokens.shape, generator=random)
    inputs = torch.where(chosen & (kind < REPLACED_BY_MASK), ids.mask, tokens)
    inputs = torch.where(chosen & (kind >= REPLACED_BY_MASK) & (kind < REPLACED_BY_MASK + REPLACED_AT_RANDOM), drawn, inputs)
    return Batch(inputs, torch.where(chosen, tokens, IGNORE_INDEX))


def seed_of(seed: int, purpose: str) -> int:
    """A seed below 2^63 for one purpose; different purposes and seeds have unrelated streams."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(seed_of(seed, purpose))
