"""What a step is given: sequences of full length, or documents of unequal length, packed, padded or trimmed."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ops_nn.data import pack_documents, trim_to_longest
from ops_nn.models import PRESETS

FIXED, DOCUMENTS, PADDED, TRIMMED = "fixed", "documents", "padded", "trimmed"
SHORTEST = 16  # documents are from a sixteenth of the full length up to it, each octave as likely: 0.34 of it on average
GRAIN = 64  # lengths of trimmed batches are multiples of it [tokens]


class Workload(NamedTuple):
    """Keyword arguments of a model's forward, and how many of its tokens are not padding."""

    inputs: dict[str, Any]
    tokens: int


def lengths(seq: int, source: random.Random, *, total: int | None = None, count: int | None = None) -> list[int]:
    """Lengths of documents [tokens]: `count` of them, or as many as make up `total`, of which the last is cut."""
    found: list[int] = []
    while len(found) < count if count is not None else sum(found) < (total or 0):
        found.append(round(math.exp(source.uniform(math.log(max(seq // SHORTEST, 1)), math.log(seq)))))
    if total is not None:
        found[-1] -= sum(found) - total
    return found


def workload(kind: str, model: str, batch: int, seq: int, device: str, seed: int = 0) -> Workload:
    """The inputs of one step of a preset.

    Args:
        kind: `fixed`: `batch` sequences of `seq` tokens. `documents`: as many tokens, of documents of unequal length packed in one row.
            `padded`: `batch` such documents, padded to `seq`. `trimmed`: these, cut to the longest.
        model: name of the preset.
        batch, seq: sequences, and tokens a sequence.
        device: where the inputs are made or go.
        seed: the same inputs for the same seed on one kind of device.
    """
    preset = PRESETS[model]
    if kind == FIXED:
        generator = torch.Generator(device=device).manual_seed(seed)
        ids = torch.randint(0, preset.config.vocab_size, (batch, seq), device=device, generator=generator)
        labels = ids if preset.masked else torch.cat([ids[:, 1:], ids.new_full((batch, 1), -100)], 1)
        return Workload({"input_ids": ids, "labels": labels}, batch * seq)
    source, drawn = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = lengths(seq, source, total=batch * seq) if kind == DOCUMENTS else lengths(seq, source, count=batch)
    texts = [torch.randint(0, preset.config.vocab_size, (n,), generator=drawn) for n in sizes]
    if kind == DOCUMENTS:
        packed = pack_documents(texts, labels=texts if preset.masked else None, multiple=1)
        return Workload(packed.to(device).model_inputs(), packed.num_tokens)
    mask = torch.arange(seq)[None] < torch.tensor(sizes)[:, None]
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    ids[:, : max(sizes)] = pad_sequence(texts, batch_first=True)
    following = ids if preset.masked else torch.cat([ids[:, 1:], ids.new_zeros(batch, 1)], 1)
    counted = mask if preset.masked else torch.arange(seq)[None] < torch.tensor(sizes)[:, None] - 1
    labels = following.masked_fill(~counted, -100)
    if kind == TRIMMED:
        mask, ids, labels = trim_to_longest(mask, ids, labels, multiple=GRAIN)
    inputs = {"input_ids": ids.to(device), "labels": labels.to(device)}
    if preset.masked:  # a causal model needs no mask for padding on the right
        inputs["attention_mask"] = mask.to(device)
    return Workload(inputs, sum(sizes))
