"""The fused operators inside a module, seen where PyTorch's dispatcher calls them.

On demand, since every call of any operator then passes through Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACE = "ops_math"


class Operators(TorchDispatchMode):
    """Shows the result of every forward operator of ops_math, with its name, to `see`; what it returns is as it was."""

    def __init__(self, see: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == NAMESPACE and func._opname.endswith("_fwd"):
            self.see(func._opname.removesuffix("_fwd"), result)
        return result
