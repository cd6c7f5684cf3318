"""Feature detection: the only file that asks whether a function beyond PyTorch's public, stable API exists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

_ASSUMED: set[str] = set()


@contextmanager
def assumed(device_kind: str) -> Iterator[None]:
    """Within it every aten function that exists counts as having a kernel for this kind of device: a CPU build can then be asked
    what a GPU build supports."""
    added = {device_kind} - _ASSUMED
    _ASSUMED.update(added)
    try:
        yield
    finally:
        _ASSUMED.difference_update(added)


@lru_cache(maxsize=128)
def aten(name: str, overload: str = "default") -> Any:
    """`torch.ops.aten.NAME.OVERLOAD`, or None where this PyTorch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload, None) if packet is not None else None


def has_kernel(name: str, device_kind: str, overload: str = "default") -> bool:
    """Whether the aten function has a kernel of its own for `cpu` or `cuda`."""
    if device_kind in _ASSUMED:
        return aten(name, overload) is not None
    return _has_kernel(name, device_kind, overload)


@lru_cache(maxsize=128)
def _has_kernel(name: str, device_kind: str, overload: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA", "hip": "CUDA"}.get(device_kind)
    if aten(name, overload) is None or key is None:
        return False
    full = f"aten::{name}" + ("" if overload == "default" else f".{overload}")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))
