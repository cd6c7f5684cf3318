"""Documents laid end to end in rows: token ids, labels, positions, and where each document begins, as `om.attention` wants it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops_nn.data.sizes import fail, integral, power_of_two, rounded_up, whole

IGNORE_INDEX = -100
_WHAT = "pack_documents"


class PackedDocuments(NamedTuple):
    """A batch of packed documents. R rows of L tokens.

    Attributes:
        input_ids: [R, L] int64.
        labels: [R, L] int64, aligned with `input_ids`; `ignore_index` at each document's last token and at padding.
        position_ids: [R, L] int64, from 0 in each document.
        cu_seqlens: [segments + 1] int32, where each segment begins among the R L tokens, and their number. A segment is a document, a
            piece of one, or padding; empty ones at the end make their number a power of two.
        max_seqlen: at least the length of the longest segment [tokens], a power of two.
        pieces: for each piece in the order in which they lie: (document, first token in it, number of tokens, first of the R L tokens).
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    pieces: tuple[tuple[int, int, int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return sum(count for _, _, count, _ in self.pieces)

    @property
    def document_ids(self) -> Tensor:
        """[R, L] int64: the document of each token, -1 at padding."""
        ids = torch.full((self.input_ids.numel(),), -1, dtype=torch.int64)
        for document, _, count, at in self.pieces:
            ids[at : at + count] = document
        return ids.view(self.input_ids.shape).to(self.input_ids.device)

    def model_inputs(self) -> dict[str, Any]:
        """What the models of `ops_nn.models` take, and any that hand keywords on to `om.residual_attention`."""
        names = ("input_ids", "labels", "position_ids", "cu_seqlens", "max_seqlen")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedDocuments:
        """On another device."""
        ids, labels, positions, bounds = (t.to(device, non_blocking=non_blocking) for t in self[:4])
        return PackedDocuments(ids, labels, positions, bounds, self.max_seqlen, self.pieces)

    def unpack(self, values: Tensor) -> list[Tensor]:
        """Per-token values [R, L, ...] as one tensor [tokens, ...] for each document."""
        flat = values.flatten(0, 1)
        found: dict[int, list[tuple[int, Tensor]]] = {}
        for document, first, count, at in self.pieces:
            found.setdefault(document, []).append((first, flat[at : at + count]))
        return [torch.cat([part for _, part in sorted(found[d], key=lambda p: p[0])]) for d in sorted(found)]


def pack_documents(
    documents: Sequence[Tensor] | Tensor,
    *,
    lengths: Tensor | None = None,
    labels: Sequence[Tensor] | Tensor | None = None,
    row_length: int | None = None,
    multiple: int = 64,
    split: bool = False,
    pad_id: int = 0,
    ignore_index: int = IGNORE_INDEX,
) -> PackedDocuments:
    """Lay documents end to end, so that nothing but a rest is padding and no document sees or predicts another.

    Call it where batches are made: it works on the CPU, and the result goes to the device with `.to`.

    Args:
        documents: token ids, a tensor [tokens] each; or a batch [B, S] padded on the right, with `lengths`.
        lengths: [B], with a padded batch: how many tokens of each row are real.
        labels: in the form of `documents`, aligned with it (for masked tokens). None: the token that follows, and none for the last.
        row_length: L of rows of fixed length [tokens], filled by the longest document that still fits. None: one row for all.
        multiple: without `row_length`, L is a multiple of it [tokens].
        split: cut documents longer than `row_length` into pieces, each on its own; otherwise they are refused.
        pad_id: token id of padding.
        ignore_index: label of what is not counted.

    Returns:
        `PackedDocuments`. For a given L the shapes do not depend on the documents, but for R: a model meets few problems, and a step as a
        CUDA graph few shapes.

    Raises: ArgumentError for documents that are not one-dimensional integer tensors, labels or lengths that do not fit, documents that
        are longer than a row, or none at all.
    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    """
    for name, value in (("row_length", 1 if row_length is None else row_length), ("multiple", multiple)):
        whole(_WHAT, name, value)
    texts = _documents("documents", documents, lengths)
    targets = [_next(t, ignore_index) for t in texts] if labels is None else _documents("labels", labels, lengths)
    if [len(t) for t in texts] != [len(t) for t in targets]:
        at = next((i for i, (a, b) in enumerate(zip(texts, targets, strict=False)) if len(a) != len(b)), min(len(texts), len(targets)))
        fail(_WHAT, "labels", "as many and as long as documents", f"another number at document {at}", "Give a label for each token.")
    total = sum(len(t) for t in texts)
    if not total:
        fail(_WHAT, "documents", "at least one token", "none", "Leave empty batches out.")
    length = rounded_up(total, multiple) if row_length is None else row_length
    pieces, rows = _place([len(t) for t in texts], length, split)
    return _laid_out(texts, targets, pieces, rows, length, (pad_id, ignore_index))


def _documents(name: str, given: Any, lengths: Tensor | None) -> list[Tensor]:
    """A tensor on the CPU for each document."""
    if isinstance(given, Tensor) and given.dim() == 2:
        if lengths is None or tuple(lengths.shape) != (given.shape[0],):
            got = "None" if lengths is None else f"shape {list(lengths.shape)}"
            fail(_WHAT, "lengths", f"a tensor [{given.shape[0]}] with a padded batch", got, "Pass mask.sum(1).")
        counts = _integers("lengths", lengths).tolist()
        if counts and not 0 <= min(counts) <= max(counts) <= given.shape[1]:
            fail(_WHAT, "lengths", f"in [0, {given.shape[1]}]", f"{min(counts)} to {max(counts)}", "Pass mask.sum(1).")
        rows = _integers(name, given).cpu().long()
        return [rows[i, :n] for i, n in enumerate(counts)]
    if lengths is not None:
        fail(_WHAT, "lengths", f"None unless {name} is a batch [B, S]", "a tensor", "Leave it out.")
    found = list(given) if isinstance(given, list | tuple) else []
    for number, one in enumerate(found):
        if not isinstance(one, Tensor) or one.dim() != 1 or not integral(one):
            got = f"shape {list(one.shape)} of {one.dtype}" if isinstance(one, Tensor) else type(one).__name__
            fail(_WHAT, f"{name}[{number}]", "a tensor [tokens] of integers", got, "Convert it: torch.tensor(ids).")
    if not found:
        got = f"shape {list(given.shape)}" if isinstance(given, Tensor) else f"{type(given).__name__} of none"
        fail(_WHAT, name, "a list of tensors [tokens], or a batch [B, S]", got, "Pass one tensor of token ids for each document.")
    return [one.cpu().long() for one in found]  # PyTorch joins no uint16, in which files of tokens are written, with int64


def _integers(name: str, t: Tensor) -> Tensor:
    if not integral(t):
        fail(_WHAT, name, "a tensor of integers", f"one of {t.dtype}", "Pass token ids, and mask.sum(1) as lengths.")
    return t


def _next(text: Tensor, ignore_index: int) -> Tensor:
    """The token that follows each one; none follows the last."""
    return torch.cat([text[1:], text.new_full((min(len(text), 1),), ignore_index, dtype=torch.int64)])


def _place(lengths: list[int], length: int, split: bool) -> tuple[list[tuple[int, int, int, int]], int]:
    """Pieces (document, first token, tokens, place), and how many rows they take: the longest first, each into the fullest row it fits."""
    parts = []
    for document, count in enumerate(lengths):
        if count > length and not split:
            needs = f"at most {length} tokens long, as a row is"
            fail(_WHAT, f"documents[{document}]", needs, f"{count} tokens", "Pass split=True to cut it, or a larger row_length.")
        parts += [(document, first, min(length, count - first)) for first in range(0, max(count, 1), length)]
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows, placed = 0, []
    for document, first, count in sorted(parts, key=lambda part: -part[2]):
        at = bisect.bisect_left(room, (count, 0))
        if at == len(room):
            left, row, rows = length, rows, rows + 1
        else:
            left, row = room.pop(at)
        placed.append((document, first, count, row * length + length - left))
        bisect.insort(room, (left - count, row))
    return sorted(placed, key=lambda piece: (piece[3], piece[2])), rows


def _laid_out(
    texts: list[Tensor], targets: list[Tensor], pieces: list[tuple[int, int, int, int]], rows: int, length: int, fill: tuple[int, int]
) -> PackedDocuments:
    ids, labels = (torch.full((rows * length,), value, dtype=torch.int64) for value in fill)
    positions, starts, end = torch.zeros(rows * length, dtype=torch.int64), [], 0
    for document, first, count, at in pieces:
        starts += [end] if at > end else []  # what lies between is padding, a segment of its own
        starts.append(at)
        end = at + count
        ids[at:end] = texts[document][first : first + count]
        labels[at:end] = targets[document][first : first + count]
        positions[at:end] = torch.arange(count)
    starts += [end] if end < rows * length else []
    bounds, longest = _bounds(starts, rows * length)
    shape = rows, length
    return PackedDocuments(ids.view(shape), labels.view(shape), positions.view(shape), bounds, longest, tuple(pieces))


def _bounds(starts: list[int], total: int) -> tuple[Tensor, int]:
    """`cu_seqlens` with empty segments up to a power of two of them, and the longest segment rounded up to a power of two."""
    longest = max(b - a for a, b in itertools.pairwise([*starts, total]))
    filled = [*starts, *[total] * (power_of_two(len(starts)) + 1 - len(starts))]
    return torch.tensor(filled, dtype=torch.int32), power_of_two(longest)


def split_rows(input_ids: Tensor, end_id: int, *, labels: Tensor | None = None, ignore_index: int = IGNORE_INDEX) -> PackedDocuments:
    """Where documents begin in rows cut from one stream of tokens, in which each document ends with a token of its own.

    Args:
        input_ids: [R, L] integers; a document that a row cuts in two is two.
        end_id: the token that ends a document.
        labels: [R, L], aligned with `input_ids`. None: the token that follows in the row, and none for the last.
        ignore_index: label of what is not counted, among it the label of each `end_id`, which would belong to the next document.

    Returns:
        `PackedDocuments` with the tokens where they are, on the CPU.

    Raises: ArgumentError for tensors of other shapes or of anything but integers, or without a token.
    """
    what = "split_rows"
    for name, t in (("input_ids", input_ids), ("labels", labels)):
        fits = t is None or (isinstance(t, Tensor) and integral(t) and t.dim() == 2 and t.shape == input_ids.shape)
        if not fits or (t is not None and not t.numel()):
            got = f"shape {list(t.shape)} of {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
            fail(what, name, "a tensor [R, L] of integers, of one shape with input_ids", got, "Pass rows of a stream of tokens.")
    ids = input_ids.cpu().long()
    rows, length = ids.shape
    ends = ids == end_id
    begins = torch.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    places = torch.arange(rows * length).view(rows, length)
    firsts = torch.where(begins, places, 0).flatten().cummax(0).values.view(rows, length)
    starts = places[begins].tolist()
    targets = torch.cat([ids[:, 1:], ids.new_full((rows, 1), ignore_index)], 1) if labels is None else labels.cpu().long()
    bounds, longest = _bounds(starts, rows * length)
    pieces = tuple((n, 0, b - a, a) for n, (a, b) in enumerate(itertools.pairwise([*starts, rows * length])))
    return PackedDocuments(ids, targets.masked_fill(ends, ignore_index), places - firsts, bounds, longest, pieces)
