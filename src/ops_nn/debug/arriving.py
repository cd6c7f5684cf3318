"""What was seen while its figures are on their way: a step does not wait for them, whoever looks at the trace does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

import ops_math as om
from ops_nn.debug.figures import unpack_all
from ops_nn.debug.trace import Key, Record


class Pending(NamedTuple):
    """A tensor whose figures are still on the device, in `row` of a table."""

    key: Key
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    row: int
    tensor: Tensor | None


def records_of(table: om.FigureTable, pending: Sequence[Pending]) -> Callable[[], dict[Key, Record]]:
    """Start the transfer of all figures, one for each device; what is returned waits for it and gives the records."""
    arrived = table.send()

    def records() -> dict[Key, Record]:
        rows = arrived()
        counts = [0] * len(rows)
        for item in pending:
            counts[item.row] = math.prod(item.shape)
        figures = unpack_all(rows, counts)
        return {p.key: Record(figures[p.row], p.shape, p.stride, p.dtype, order, p.tensor) for order, p in enumerate(pending)}

    return records
