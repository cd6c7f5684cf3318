"""What is used of PyTorch that is not public, in one file, and what follows where a version lacks it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

# The number of the backward that runs on this thread, -1 for none. Where PyTorch does not tell, a module that checkpointing calls again
# is taken for another call of it.
_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# The node whose backward runs on this thread, and how many this thread has made: nodes are numbered so. Where PyTorch does not tell, it is
# not known which call of a module is recomputed, and a trace reads no gradients of it.
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_made: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: -1)


def in_backward() -> bool:
    """Whether this thread runs a backward: a module that is called now is recomputed (activation checkpointing)."""
    return not torch.compiler.is_compiling() and _task() != -1


def nodes_made() -> int:
    """How many nodes of graphs this thread has made, -1 where that is not known: the number of the next one."""
    return _made()


def running_node() -> tuple[int, int]:
    """The backward that runs on this thread and the number of its node that does; the largest number where that is not known."""
    number = getattr(_node(), "_sequence_nr", None)
    return _task(), sys.maxsize if number is None else number()


def gradient_hooks(t: torch.Tensor) -> dict[int, Any]:
    """What runs when the tensor's `.grad` has been added to, by the number of the hook: who empties it holds that back."""
    return getattr(t, "_post_accumulate_grad_hooks", None) or {}
