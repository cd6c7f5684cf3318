"""Text that every CPython carries, in tokens by a word list, as batches: learnable, and needing neither network nor tokenizer.

A causal model learns the next token, a masked one those that a seed hides; the same seed gives the same batches on every device.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ops_math import checks
from ops_math.cli.train.batches import Batch, MaskIds, generator, mask_tokens
from ops_math.cli.train.corpus import SKIPPED_FOLDERS
from ops_nn.models import Preset

SOURCE = "sources of CPython's standard library"
# A word or a run of signs with the space before it, a digit, or white space: no character is lost.
PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s+")
RARE, MASK, FIRST = 0, 1, 2


class Tokens(NamedTuple):
    """A text in tokens.

    Attributes:
        ids: `[T]` int64, on the CPU.
        end: one past the last id that is used.
        digest: a hash of `ids`, 16 hexadecimal digits.
    """

    ids: Tensor
    end: int
    digest: str


def standard_library() -> str:
    """The sources of this Python's standard library without its tests, file after file in the order of their names.

    Raises: UnsupportedError where this Python has no sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = SKIPPED_FOLDERS - {"pydoc_data"}  # that one holds the language reference
    files = [path for path in sorted(library.rglob("*.py")) if skipped.isdisjoint(path.relative_to(library).parts[:-1])]
    if not files:
        checks.refuse("bench curves", f"this Python keeps no sources of its standard library in {library}", "Use one that does")
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def tokens_of(text: str, vocabulary: int) -> Tokens:
    """Words to ids, the most frequent first; what has no room in the vocabulary becomes `RARE`."""
    pieces = PIECE.findall(text)
    ordered = sorted(Counter(pieces).items(), key=lambda found: (-found[1], found[0]))[: vocabulary - FIRST]
    known = {piece: FIRST + i for i, (piece, _) in enumerate(ordered)}
    ids = torch.tensor([known.get(piece, RARE) for piece in pieces], dtype=torch.int64)
    return Tokens(ids, FIRST + len(known), hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16])


def batches(tokens: Tokens, preset: Preset, batch: int, seq: int, steps: int, seed: int = 0) -> list[Batch]:
    """The batches of all steps, on the CPU: windows of the text in a drawn order, each once before any comes again.

    Args:
        tokens: the text.
        preset: the model, which says whether it learns masked tokens.
        batch, seq: sequences a step, and tokens a sequence.
        steps: how many.
        seed: of the order and of what is masked.

    Raises: ArgumentError when the text has no window.
    """
    windows = (len(tokens.ids) - 1) // seq
    if windows < 1:
        checks.fail("bench curves", "the text", f"more than {seq} tokens, one sequence", f"{len(tokens.ids)}", "Shorten the sequence.")
    rounds = -(-steps * batch // windows)
    order = torch.cat([torch.randperm(windows, generator=generator(seed, f"order/{i}")) for i in range(rounds)])
    rows = tokens.ids.unfold(0, seq + 1, seq)[order[: steps * batch]].view(steps, batch, seq + 1)
    if not preset.masked:
        return [Batch(row[:, :-1], row[:, 1:]) for row in rows]
    ids = MaskIds(MASK, FIRST, tokens.end)
    return [mask_tokens(row[:, :-1], ids, generator(seed, f"mask/{step}")) for step, row in enumerate(rows)]
