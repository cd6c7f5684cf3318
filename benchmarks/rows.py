"""Result rows: what was measured, and everything needed to measure it again."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """OPS_MATH_COMMIT where the sources came without their history, else git's answer."""
    given = os.environ.get("OPS_MATH_COMMIT")
    if given:
        return given
    root = Path(__file__).parents[1]
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def environment(device: str) -> dict[str, Any]:
    """Device, versions, commit, date and command of this run."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": "python " + " ".join(sys.argv),
    }


def append(path: str | None, rows: list[dict[str, Any]], device: str) -> None:
    """Append rows to a JSON-lines file, each with the environment; nothing when there is no path."""
    if path is None:
        return
    facts = environment(device)
    with Path(path).open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **facts}) + "\n")
