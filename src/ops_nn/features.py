"""What is used of PyTorch that is not public, in one file, and what follows where a version lacks it."""

from __future__ import annotations

from collections.abc import Callable

import torch

# The number of the backward that runs on this thread, -1 for none. Where PyTorch does not tell, a module that checkpointing calls again
# is taken for another call of it.
_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Whether this thread runs a backward: a module that is called now is recomputed (activation checkpointing)."""
    return not torch.compiler.is_compiling() and _task() != -1
