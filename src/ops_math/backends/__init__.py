"""Facts about hardware: what a tensor's device is, and whether Triton kernels can run on it."""

from __future__ import annotations

import platform
import re
from functools import lru_cache
from pathlib import Path

import torch

from ops_math import settings
from ops_math.spec import Device

# Named devices to plan and compile for without having one. Bandwidth [GB/s] and bf16 products [TFLOP/s]: H200 measured with
# a 4 GiB copy and an 8192^3 cuBLAS product (2026-11-29); the others are the vendors' data sheets times the share the H200 reaches
# of its own (0.89 of bandwidth, 0.78 of products).
NAMED: dict[str, Device] = {
    "a100": Device("cuda", "80", "NVIDIA A100", 108, 166912, 1810.0, 243.0, 8.0),
    "h100": Device("cuda", "90", "NVIDIA H100", 132, 232448, 2980.0, 770.0, 8.0),
    "h200": Device("cuda", "90", "NVIDIA H200", 132, 232448, 4272.0, 770.0, 8.0),
    "b200": Device("cuda", "100", "NVIDIA B200", 148, 232448, 7120.0, 1755.0, 8.0),
    "mi300x": Device("hip", "gfx942", "AMD Instinct MI300X", 304, 65536, 4717.0, 1019.0, 8.0),
}


@lru_cache(maxsize=64)
def _device_of(kind: str, index: int, interpreted: bool) -> Device:
    if kind != "cuda":
        return Device("interpreter" if interpreted else kind, "", kind, torch.get_num_threads(), 0, 20.0, 0.1, 3.0)
    facts = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch = facts.gcnArchName.partition(":")[0] if hip else f"{facts.major}{facts.minor}"
    known = next((d for d in NAMED.values() if d.name in facts.name), NAMED["a100"])
    shared = getattr(facts, "shared_memory_per_block_optin", known.shared_bytes)
    return Device(
        "hip" if hip else "cuda",
        arch,
        facts.name,
        facts.multi_processor_count,
        shared,
        known.bandwidth_gbs,
        known.product_tflops,
        known.launch_us,
    )


def device_of(device: torch.device) -> Device:
    """Facts about a torch device. CPU tensors are on the `interpreter` device when TRITON_INTERPRET=1."""
    return _device_of(device.type, device.index or 0, device.type == "cpu" and settings.triton_interpret())


@lru_cache(maxsize=1)
def processor_name() -> str:
    """The model of the CPU, as Linux names it, else the architecture."""
    try:
        found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


@lru_cache(maxsize=4)
def driver_version(kind: str) -> str:
    """The kernel driver's version for `cuda` or `hip` as Linux shows it; empty for other devices, `unknown` where it is not shown."""
    place = {"cuda": "/proc/driver/nvidia/version", "hip": "/sys/module/amdgpu/version"}.get(kind)
    if place is None:
        return ""
    try:
        text = Path(place).read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\d+\.\d+(?:\.\d+)*", text)
    return found.group(0) if found else "unknown"


@lru_cache(maxsize=1)
def _triton_missing() -> str | None:
    try:
        import triton  # noqa: F401 (importing Triton costs 0.3 s and must not happen at import of this package)
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install triton"
    return None


def triton_unavailable(device: Device) -> str | None:
    """Why Triton kernels cannot run on this device, or None if they can."""
    if device.kind not in ("cuda", "hip", "interpreter"):
        return f"Triton kernels need a GPU, this is {device.kind}"
    if device.kind == "cuda" and int(device.arch) < 80:
        return f"Triton kernels are tested from sm_80 on, this is sm_{device.arch}"
    return _triton_missing()
