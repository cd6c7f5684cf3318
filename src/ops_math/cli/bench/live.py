"""What was live while something was measured: device, clocks, versions, overrides, which rivals and which kernels of theirs."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ops_math import __version__, backends, files, settings
from ops_math.cli.bench.rivals import DISTRIBUTIONS, version
from ops_math.schedule.identity import triton_version

# Variables that change speed or numbers.
TELLING = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_MAX_AUTOTUNE", "TRITON_INTERPRET", "OPS_MATH_ENABLED",
    "OPS_MATH_PRECISION", "OPS_MATH_DETERMINISM", "OPS_MATH_CHECKED", "OPS_MATH_FORCE",
)  # fmt: skip
CUTE = ("nvidia-cutlass-dsl", "apache-tvm-ffi")  # without both PyTorch's own CuTe kernels are not live
CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.limit,driver_version"


def commit() -> str:
    """The sources' commit: OPS_MATH_COMMIT where they came without their history, else git's answer, else the version."""
    given = settings.environment(["OPS_MATH_COMMIT"]).get("OPS_MATH_COMMIT")
    if given:
        return given
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():  # installed: a repository around it is not ours
        return f"version {__version__}"
    asked = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"version {__version__}"


def device_name(device: torch.device) -> str:
    """The chip's name, with the threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{backends.processor_name()}, {torch.get_num_threads()} threads"


def clocks(device: torch.device) -> str:
    """The GPU's clocks, power limit and driver at this moment, as its driver's own tool says; `unknown` without that tool."""
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return "unknown"
    asked = [tool, f"--query-gpu={CLOCKS}", "--format=csv,noheader", f"--id={device.index or 0}"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def cute() -> str:
    """Whether the CuTe kernels that PyTorch carries can run (they need two more packages)."""
    absent = [name for name in CUTE if version(name) is None]
    return "possible" if not absent else "not live, without " + " and ".join(absent)


def command() -> str:
    """The command line of this run."""
    program = f"python {sys.argv[0]}" if sys.argv[0].endswith(".py") else Path(sys.argv[0]).name
    return " ".join([program, *sys.argv[1:]])


def facts(device: torch.device) -> dict[str, Any]:
    """What goes into every row."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton_version() or "absent",
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": command(),
    }


def surroundings(device: torch.device) -> dict[str, str]:
    """What else was live: shown once a run."""
    found = {name: version(distribution) or "not installed" for name, distribution in DISTRIBUTIONS.items()}
    found |= {name: version(name) or "not installed" for name in CUTE}
    found |= {"PyTorch's CuTe kernels": cute(), "fp32 products": settings.fp32_products()}
    if device.type == "cuda":
        found["clocks (SM, most, memory), power, driver"] = clocks(device)
    return found | settings.environment(TELLING)


def append(path: Path, rows: list[dict[str, Any]], device: torch.device) -> None:
    """Append rows to a JSON-lines file, each with the facts of this run."""
    known = facts(device)
    files.append(path, "".join(json.dumps({**row, **known}) + "\n" for row in rows))
