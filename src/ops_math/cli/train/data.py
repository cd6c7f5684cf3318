"""Token streams cut into batches. A batch is a function of the seed and the step's number, so a resumed run needs no more."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ops_math import checks
from ops_math.cli.train import corpus, tokenizer
from ops_math.cli.train.config import COMMAND, TrainConfig
from ops_nn.data import split_rows
from ops_nn.models import IGNORE_INDEX

MASKED_SHARE, REPLACED_BY_MASK, REPLACED_AT_RANDOM = 0.15, 0.8, 0.1
VALIDATION_BATCHES = 4


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


class Data:
    """Tokens to learn from and tokens held out, as batches.

    Args:
        train: `[T]` int64 tokens.
        held_out: `[T']` int64 tokens.
        config: batch, sequence length, seed; whether the model learns masked tokens.
        mask_ids: needed when it does.
        end: id of the token that ends a document; needed where the configuration keeps documents apart.
        source: where the text is from, in words.

    Raises:
        ArgumentError: when there is not enough for one batch.
    """

    def __init__(self, train: Tensor, held_out: Tensor, config: TrainConfig, mask_ids: MaskIds, source: str, end: int = 0) -> None:
        self.end = end
        self.train, self.held_out, self.config, self.mask_ids, self.source = train, held_out, config, mask_ids, source
        needed = config.tokens_per_step + 1
        if len(train) < needed or len(held_out) < 2:
            needs = f"at least {needed:,} tokens, one batch of {config.batch:,} x {config.seq:,}, besides a held-out part"
            got = f"{len(train):,} and {len(held_out):,} held out, from {source}"
            checks.fail(COMMAND, "--data", needs, got, "Give more text, or lower --batch or --seq.")
        self.windows = (len(train) - 1) // config.seq
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    @property
    def digest(self) -> str:
        """A hash of all tokens, 16 hexadecimal digits: the same text and tokenizer, or not."""
        both = hashlib.sha256(self.train.numpy().tobytes())
        both.update(self.held_out.numpy().tobytes())
        return both.hexdigest()[:16]

    def batch(self, step: int) -> Batch:
        """The batch of one step, on the CPU. Every window of the text comes once before any comes again."""
        first = step * self.config.batch
        rows = torch.stack([self._window(number) for number in range(first, first + self.config.batch)])
        return self._batch(rows, f"mask/{step}")

    def validation(self) -> list[Batch]:
        """Fixed batches over the start of the held-out text; shorter ones when there is little of it."""
        seq = min(self.config.seq, len(self.held_out) - 1)
        count = min((len(self.held_out) - 1) // seq, self.config.batch * VALIDATION_BATCHES)
        rows = torch.stack([self.held_out[i * seq : i * seq + seq + 1] for i in range(count)])
        return [self._batch(part, f"validation/{i}") for i, part in enumerate(rows.split(self.config.batch))]

    def _window(self, number: int) -> Tensor:
        epoch, place = divmod(number, self.windows)
        if epoch != self._epoch:
            self._order = torch.randperm(self.windows, generator=generator(self.config.seed, f"order/{epoch}"))
            self._epoch = epoch
        start = int(self._order[place]) * self.config.seq
        return self.train[start : start + self.config.seq + 1]

    def _batch(self, rows: Tensor, purpose: str) -> Batch:
        tokens, following = rows[:, :-1].clone(), rows[:, 1:].clone()
        if self.config.preset.masked:
            batch = mask_tokens(tokens, self.mask_ids, generator(self.config.seed, purpose))
        else:
            batch = Batch(tokens, following)
        if not self.config.documents:
            return batch
        apart = split_rows(tokens, self.end, labels=batch.labels)
        return Batch(batch.input_ids, apart.labels, apart.position_ids, apart.cu_seqlens)


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


def mask_ids(trained: Tokenizer) -> MaskIds:
    """The ids that masking needs. Special tokens come first in our tokenizers."""
    return MaskIds(tokenizer.token_id(trained, tokenizer.MASK), len(tokenizer.SPECIAL), trained.get_vocab_size())


def load(path: Path | None, config: TrainConfig, cache: Path) -> Data:
    """Text to tokens: read it, train or find the tokenizer, encode.

    Raises:
        ArgumentError: when the path holds no text, or less than one batch.
    """
    text = corpus.load(path)
    train_texts = [document.text for document in text.train]
    trained = tokenizer.train_or_load(train_texts, config.preset.config.vocab_size, cache)
    train = torch.tensor(tokenizer.encode(trained, train_texts), dtype=torch.int64)
    held_out = torch.tensor(tokenizer.encode(trained, [document.text for document in text.held_out]), dtype=torch.int64)
    return Data(train, held_out, config, mask_ids(trained), text.source, tokenizer.token_id(trained, tokenizer.END))
