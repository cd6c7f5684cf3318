"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from ops_math import __version__, settings
from ops_math.cli.train.config import TrainConfig

# Variables that change speed or numbers: shown when they are set.
TELLING = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TRITON_INTERPRET",
    "OPS_MATH_ENABLED",
    "OPS_MATH_PRECISION",
    "OPS_MATH_DETERMINISM",
    "OPS_MATH_CHECKED",
    "OPS_MATH_FORCE",
)


def describe(config: TrainConfig) -> dict[str, str]:
    """Names to values, in the order in which they are shown."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(config.torch_device),
        "threads": str(torch.get_num_threads()),
        "ops-math": __version__,
        "torch": torch.__version__,
        "Triton": distribution("triton") or "not installed",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "fp32 matrix products": settings.fp32_products(),
        "deterministic algorithms": "on" if torch.are_deterministic_algorithms_enabled() else "off",
    }
    if config.torch_device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
    return found | settings.environment(TELLING)


def device_name(device: torch.device) -> str:
    """The chip's name."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"
    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if cpuinfo.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def distribution(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
