"""The one place that starts a Triton kernel."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
    """Start `kernel` on `grid` with positional run-time arguments and `constants` as its compile-time ones.

    An empty grid starts nothing. fp fusion is asked for by name, since its default differs between Triton versions.
    """
    if 0 in grid:
        return
    kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True, **constants)
