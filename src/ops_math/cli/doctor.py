"""`ops-math doctor`: is this machine fit to train on, and if not, what to do about it."""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import platformdirs
import torch
import typer
from rich.console import Console
from rich.table import Table

from ops_math import settings
from ops_math.cli import diagnosis
from ops_math.cli.diagnosis import Gpu, Line

PATH_VARIABLES = ("CC", "CXX", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
SIGNS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failure": "[bold red]failure[/]"}


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_triton() -> str | None:
    """The version of Triton, whichever distribution brought it."""
    names = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-ascend")
    return next((version for name in names if (version := installed_version(name))), None)


def driver_version() -> str | None:
    """What the vendor's own tool says of the driver, or None where there is no such tool or no GPU behind it."""
    for command in (["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], ["rocm-smi", "--showdriverversion", "--csv"]):
        if shutil.which(command[0]):
            result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
            if result.returncode == 0 and result.stdout.strip():
                return result.stdout.strip().splitlines()[-1 if command[0] == "rocm-smi" else 0]
    return None


def visible_gpus() -> list[Gpu]:
    """The GPUs that torch can use."""
    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(number)
        arch = facts.gcnArchName.partition(":")[0] if torch.version.hip else f"{facts.major}{facts.minor}"
        gpus.append(Gpu(facts.name, arch, facts.total_memory))
    return gpus


def examine() -> list[Line]:
    """Look at everything."""
    gpus = visible_gpus()
    paths = settings.environment(PATH_VARIABLES)
    own_cache = Path(settings.cache_folder() or platformdirs.user_cache_dir("ops-math"))
    triton = installed_triton()
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    lines = [
        diagnosis.python_line(sys.version_info[:2], sys.executable),
        diagnosis.torch_line(torch.__version__),
        diagnosis.triton_line(triton, diagnosis.triton_wanted(importlib.metadata.requires("torch") or ()), bool(gpus)),
        diagnosis.driver_line(driver_version(), built_for, bool(gpus)),
        *diagnosis.gpu_lines(gpus),
        *diagnosis.compiler_lines(paths, bool(gpus)),
    ]
    if triton is not None:
        lines.append(diagnosis.kernel_line(diagnosis.run_probe, settings.triton_interpret()))
    lines += diagnosis.folder_lines(paths, own_cache, getpass.getuser())
    lines += diagnosis.environment_lines(settings.environment(diagnosis.NUMBER_VARIABLES))
    lines += diagnosis.optional_kernel_lines(installed_version)
    return lines


def verdict(lines: list[Line]) -> str:
    """One sentence about all lines."""
    failures = sum(line.status == "failure" for line in lines)
    warnings = sum(line.status == "warning" for line in lines)
    if failures:
        return f"{failures} to mend before you train" + (f", {warnings} to know about." if warnings else ".")
    return f"Ready to train; {warnings} to know about." if warnings else "Ready to train."


def show(lines: list[Line]) -> None:
    """Print the findings as a table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        words = line.found if not line.do else f"{line.found}\n-> {line.do}"
        table.add_row(SIGNS[line.status], line.name, words)
    console = Console()
    console.print(table)
    console.print(verdict(lines))


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Examine this machine: versions, GPU, compilers, caches, and what in the environment changes numbers. Exit code 1 on a failure."""
    lines = examine()
    if as_json:
        sys.stdout.write(json.dumps({"verdict": verdict(lines), "lines": [line._asdict() for line in lines]}, indent=2) + "\n")
    else:
        show(lines)
    raise typer.Exit(int(any(line.status == "failure" for line in lines)))
