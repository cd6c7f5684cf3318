"""Which call of a module this is: the first has number 0, and one that is recomputed in the backward has the number that it had.

Activation checkpointing runs a function again, once for each region of the model, the last region first. Under `use_reentrant=True` the
first run has no graph, and gradients arrive at the second: so it must be known which call of the first run that is, also where a region
calls a module twice, holds regions of its own, or runs backward in another order than it ran forward. The backward of a region is a node of
the graph that was made right before its calls, and PyTorch numbers nodes as they are made. So a region's calls are those that follow its
node, in their order.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import NamedTuple

import torch

from ops_nn.features import in_backward, nodes_made, running_node


class _Made(NamedTuple):
    """A call of a module: how many nodes its thread had made by then, and whether autograd saw it."""

    nodes: int
    path: str
    number: int
    graph: bool


class _Region:
    """The calls of the first run that a backward runs again: from `next` on in `calls`, for as long as they have no graph."""

    def __init__(self, calls: list[_Made], start: int) -> None:
        self.calls, self.next = calls, start

    def find(self, path: str) -> int | None:
        """The number of the module's next call there."""
        for place in range(self.next, len(self.calls)):
            call = self.calls[place]
            if call.graph:
                return None
            if call.path == path:
                self.next = place + 1
                return call.number
        return None


class Numbers:
    """Counts the calls of modules.

    Attributes:
        again: whether any call was one that is run again.
        graphs: recomputed calls, by path and number, that autograd saw at last: gradients arrive at them.
    """

    def __init__(self) -> None:
        self.again = False
        self.graphs: set[tuple[str, int]] = set()
        self._counts: dict[str, int] = {}
        self._calls: dict[int, list[_Made]] = {}  # by thread: each has its own count of nodes
        self._regions: dict[tuple[int, int], _Region | None] = {}

    def begin(self, path: str) -> tuple[int | None, bool]:
        """The number of the call that begins, and whether it is an earlier one that is recomputed.

        A recomputed call has no number where the first run had a graph already: gradients arrive there.
        """
        made = self._counts.get(path, 0)
        if not (in_backward() and made):
            self._counts[path] = made + 1
            self._note(path, made)
            return made, False
        self.again = True
        number = self._again(path)
        if number is not None:
            self._note(path, number)
            if torch.is_grad_enabled():
                self.graphs.add((path, number))
        return number, True

    def _note(self, path: str, number: int) -> None:
        calls = self._calls.setdefault(threading.get_ident(), [])
        calls.append(_Made(nodes_made(), path, number, torch.is_grad_enabled()))

    def _again(self, path: str) -> int | None:
        """The number that a recomputed call had."""
        where = running_node()
        if where not in self._regions:
            self._regions[where] = self._region(where[1], path)
        region = self._regions[where]
        return None if region is None else region.find(path)

    def _region(self, node: int, path: str) -> _Region | None:
        """The calls that followed a node, if the first of them is this module's; of several threads, those that followed at once."""
        found: list[tuple[int, _Region]] = []
        for calls in self._calls.values():
            start = bisect_right(calls, node, key=lambda call: call.nodes)
            if start < len(calls) and calls[start].path == path and not calls[start].graph:
                found.append((calls[start].nodes - node, _Region(calls, start)))
        return min(found, key=lambda item: item[0], default=(0, None))[1]
