"""The contract: tensors are added where they are, and all figures are fetched at once.

Not made by `dispatch.define`, and not in the catalogue: it keeps rows of many calls, returns nothing that a model computes with and has no
backward. Its own tests hold it to the same standard.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops_math import checks
from ops_math.ops.figures import eager
from ops_math.ops.figures.problem import COUNTED, LENGTH, LENGTH_FACTORS, signed

_ORDINARY, _STRIDED = frozenset((Tensor, torch.nn.Parameter)), torch.strided


class FigureTable:
    """What is known of tensors' values, a row for each that was added: computed on their device, fetched in one transfer a device.

    A row is 86 numbers in float64: the sum of squares and the largest magnitude of the finite elements, the counts of NaN and of
    infinities, 64 signed sums (the sketch), up to 16 samples evenly spaced from the first element to the last, and a fingerprint of
    128 bits as two int64 in the last two columns (`row[-2:].view(torch.int64)`).

    The fingerprint is a function of the bytes in the order of the elements, the same on every device and in any order of sums: of their
    places, their count, the sign of zero and what NaN carries, not of shape, strides and dtype. The sketch estimates distances: the squared
    distance of two sketches has the squared distance of the tensors as its mean (Charikar, Chen and Farach-Colton, 2002).

    On a CPU a tensor is read from memory once, a MiB at a time; on a GPU by one kernel a tensor, or one for all that are added
    together. A device without Triton has its tensors copied to the CPU, which waits for it: `copied_from` names its kind.

    Precision: sums of float32 and narrower in float32 within a chunk (a GPU: squares in float64) and float64 across, of others in float64.
    Determinism: level 1; the fingerprint level 3.
    Raises: ArgumentError for tensors that are not strided.
    """

    def __init__(self) -> None:
        self._parts: dict[torch.device, Any] = {}
        self._order: list[tuple[Any, int]] = []
        self._lock = threading.Lock()  # a backward adds from the threads of its devices
        self._bytes: list[int] = []
        self.copied_from: set[str] = set()

    def __len__(self) -> int:
        return len(self._order)

    def add(self, tensor: Tensor, sketch: bool = True) -> int:
        """Take a tensor's figures; it may be written to afterwards.

        Args:
            tensor: of any shape, strides and dtype; complex numbers count as pairs.
            sketch: without it the sketch is zeros, which costs less.

        Returns:
            The number of its row.
        """
        with self._lock:
            flat = tensor if _is_usual(tensor) else _flat(tensor)
            part = self._part(flat.device)
            self._order.append((part, part.count))
            self._bytes.append(flat.nbytes)
            part.add([flat if flat.device == part.device else flat.to(part.device)], sketch)
            return len(self._order) - 1

    def add_all(self, tensors: list[Tensor], sketch: bool = True, steps: list[int] | None = None) -> list[int]:
        """Take the figures of several tensors, on a GPU with one kernel for those of one kind.

        Args:
            tensors: as for `add`.
            sketch: as for `add`.
            steps: for each tensor, that only every so-many-th of its elements is meant, from the first on; a GPU does not wait for that
                where the same was asked of the same places in memory before.

        Returns:
            Numbers of rows, as from `add`.
        """
        with self._lock:
            first = len(self._order)
            groups: dict[Any, tuple[list[Tensor], list[int]]] = {}
            for number, tensor in enumerate(tensors):
                step = 1 if steps is None else steps[number]
                if step > 1 and tensor.is_complex():  # a pair is one element
                    tensor, step = tensor.detach().reshape(-1)[::step], 1
                flat = tensor if _is_usual(tensor) else _flat(tensor)
                part = self._part(flat.device)
                found = groups.get(part)
                if found is None:
                    found = groups[part] = ([], [])
                self._order.append((part, part.count + len(found[0])))
                self._bytes.append(-(-flat.numel() // step) * flat.element_size())
                found[0].append(flat if flat.device == part.device else flat.to(part.device))
                found[1].append(step)
            for part, (mine, every) in groups.items():
                if steps is None:
                    part.add(mine, sketch)
                else:
                    part.add_every(mine, every, sketch)
            return list(range(first, len(self._order)))

    def fetch(self) -> Tensor:
        """All rows [N, LENGTH], float64, on the CPU, in the order in which they were added; the table stays as it is."""
        return self.send()()

    def send(self) -> Callable[[], Tensor]:
        """Start the transfer of the rows that are there without waiting; what is returned waits, and gives them as `fetch` does."""
        with self._lock:
            owners, sizes = list(self._order), list(self._bytes)
            sent = {id(part): part.send() for part in self._parts.values()}

        def arrived() -> Tensor:
            rows = torch.zeros(len(owners), LENGTH, dtype=torch.float64)
            for part, take in sent.items():
                mine = [n for n, (owner, _) in enumerate(owners) if id(owner) == part]
                theirs = [number for owner, number in owners if id(owner) == part]
                rows[torch.tensor(mine, dtype=torch.int64)] = take()[torch.tensor(theirs, dtype=torch.int64)]
            lengths = [[signed(count * factor) for factor in LENGTH_FACTORS] for count in sizes]
            hashes = rows[:, -2:].contiguous().view(torch.int64) + torch.tensor(lengths, dtype=torch.int64).view(-1, 2)
            rows[:, -2:] = hashes.view(torch.float64)
            return rows

        return arrived

    def _part(self, device: torch.device) -> Any:
        kept = self._parts.get(device)
        if kept is None:
            if device.type != "cpu" and not (device.type == "cuda" and has_triton()):
                self.copied_from.add(device.type)
                return self._part(eager.CPU)
            with torch.inference_mode(False):  # what is made in it could not be written to outside
                kept = self._parts[device] = _rows(device)
        return kept


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def _rows(device: torch.device) -> Any:
    if device.type == "cpu":
        return eager.Rows()
    from ops_math.ops.figures import triton_gpu

    return triton_gpu.Rows(device)


def _is_usual(tensor: Tensor) -> bool:
    """Whether it can be read by its address and length alone, as most can on a GPU, where making a view takes longer than this."""
    return (
        type(tensor) in _ORDINARY
        and tensor.device.type == "cuda"
        and tensor.layout is _STRIDED
        and tensor.dtype in COUNTED
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_nested
    )


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous view [N] of a tensor's elements, or a copy where there is none; without its graph, so that nothing here is recorded."""
    checks.tensor("FigureTable.add", "tensor", tensor)
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta" or tensor.is_quantized:
        got = f"a {tensor.layout} tensor on {tensor.device}"
        checks.fail("FigureTable.add", "tensor", "a strided tensor with values", got, "Pass tensor.to_dense(), or its parts.")
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous().view(-1)
