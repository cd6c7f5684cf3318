"""Token streams cut into batches. A batch is a function of the seed and the step's number, so a resumed run needs no more."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ops_math import checks
from ops_math.cli.train import corpus, tokenizer
from ops_math.cli.train.batches import Batch, MaskIds, generator, mask_tokens
from ops_math.cli.train.config import COMMAND, TrainConfig
from ops_nn.data import split_rows

VALIDATION_BATCHES = 4


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
