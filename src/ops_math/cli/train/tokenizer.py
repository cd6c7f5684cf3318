"""A byte-level byte-pair tokenizer, trained on the text at hand and kept by the hash of what it was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import filelock
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ops_math import checks, files
from ops_math.cli.train.config import COMMAND

END, MASK, PAD = "<|end|>", "<|mask|>", "<|pad|>"
SPECIAL = (END, MASK, PAD)
# Merges beyond this are rarer than a few in a million tokens of text; a model with a larger vocabulary has unused rows.
LARGEST_VOCABULARY = 32_768
SMALLEST_VOCABULARY = len(SPECIAL) + 256
FORMAT = 1


def train_or_load(texts: list[str], vocab_size: int, folder: Path) -> Tokenizer:
    """The tokenizer for these texts, from the cache when it was trained before.

    Args:
        texts: what to learn merges from; the held-out text is not among them.
        vocab_size: the model's vocabulary [tokens]; the tokenizer has at most as many.
        folder: the cache folder. Several processes may share it.

    Raises:
        ArgumentError: when the vocabulary has no room for the 256 bytes and the special tokens.
        UnsupportedError: when the cache folder cannot be written.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        needs = f"at least {SMALLEST_VOCABULARY} (256 bytes and {len(SPECIAL)} special tokens)"
        checks.fail(COMMAND, "the vocabulary", needs, str(vocab_size), "Choose a larger model.")
    size = min(vocab_size, LARGEST_VOCABULARY)
    path = folder / f"tokenizer-{content_key(texts, size)}.json"
    try:
        with filelock.FileLock(path.with_suffix(".lock")):
            if path.exists() and (cached := _read(path)) is not None:
                return cached
            trained = train(texts, size)
            files.replace(path, trained.to_str())
            return trained
    except OSError as error:
        checks.refuse(f"{COMMAND}: the cache folder {folder}", f"it cannot be written ({error.strerror})", "Name another with --cache")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from the texts; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def content_key(texts: Iterable[str], vocab_size: int) -> str:
    """A hash of everything that the tokenizer depends on, 20 hexadecimal digits."""
    digest = hashlib.sha256(f"{FORMAT} {tokenizers.__version__} {vocab_size} {SPECIAL}".encode())
    for text in texts:
        raw = text.encode("utf-8")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()[:20]


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """One stream of token ids; each text is followed by the end token."""
    end = token_id(tokenizer, END)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        stream.extend(encoding.ids)
        stream.append(end)
    return stream


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(f"the tokenizer has no {token}")
    return int(found)


def _read(path: Path) -> Tokenizer | None:
    """The cached tokenizer, or None for a file that another program or a full disk left damaged: it is made again."""
    try:
        cached = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, UnicodeDecodeError):
            raise
        return None
    return cached if all(cached.token_to_id(token) is not None for token in SPECIAL) else None
