"""What a device reaches at best: copying, products, and the host's cost of starting a kernel. Measured once, kept in the record."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from ops_math.schedule.record import Ceilings

REPEATS = 7
LAUNCHES = 200


class Size:
    """How much is copied [B] and how wide the products are, large enough to leave the caches and small enough to be quick."""

    def __init__(self, kind: str) -> None:
        gpu = kind == "cuda"
        self.copied = (1 << 30) if gpu else (128 << 20)
        self.width = 8192 if gpu else 512


def measure_ceilings(device: torch.device) -> Ceilings:
    """Ceilings of one device, in about a second.

    The copy counts bytes read and written, as `Cost.bytes` does. fp32 products multiply as PyTorch is set.

    Raises: torch.OutOfMemoryError where 2 GiB are not free on a GPU (0.25 GiB on a CPU).
    """
    size = Size(device.type)
    source = torch.ones(size.copied // 4, device=device)
    target = torch.empty_like(source)
    copy_us = _median_us(functools.partial(target.copy_, source), device)
    del source, target
    rates, own = {}, torch.Generator(device).manual_seed(0)  # the user's random numbers stay as they are
    for dtype in (torch.bfloat16, torch.float32):
        a = torch.randn(size.width, size.width, device=device, generator=own).to(dtype)
        rates[dtype] = 2 * size.width**3 / _median_us(functools.partial(torch.mm, a, a), device) / 1e6
    del a
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes that a training step may want
    return Ceilings(
        round(2 * size.copied / copy_us / 1e3, 2), round(rates[torch.bfloat16], 4), round(rates[torch.float32], 4), _launch_us(device)
    )


def _median_us(run: Callable[[], object], device: torch.device) -> float:
    """Median time [us] of a call that takes much longer than starting it."""
    times = []
    for _ in range(REPEATS + 2):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[2:])


def _launch_us(device: torch.device) -> float:
    """Host time [us] of starting one small kernel, or of calling one PyTorch function on a CPU."""
    x = torch.zeros(16, device=device)
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)
        times.append((time.perf_counter() - start) / LAUNCHES * 1e6)
    synchronize(device)
    return round(statistics.median(times), 3)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
