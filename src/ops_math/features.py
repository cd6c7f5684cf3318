"""Feature detection: the only file that asks whether a function beyond PyTorch's public, stable API exists."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=128)
def aten(name: str, overload: str = "default") -> Any:
    """`torch.ops.aten.NAME.OVERLOAD`, or None where this PyTorch does not have it."""
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, overload, None) if packet is not None else None


@lru_cache(maxsize=128)
def has_kernel(name: str, device_kind: str, overload: str = "default") -> bool:
    """Whether the aten function has a kernel of its own for `cpu` or `cuda`."""
    key = {"cpu": "CPU", "cuda": "CUDA", "hip": "CUDA"}.get(device_kind)
    if aten(name, overload) is None or key is None:
        return False
    full = f"aten::{name}" + ("" if overload == "default" else f".{overload}")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))
