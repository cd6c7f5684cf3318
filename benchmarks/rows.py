"""Result rows: what was measured, and everything needed to measure it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ops_math.cli.bench import live


def environment(device: str) -> dict[str, Any]:
    """Device, versions, commit, date and command of this run."""
    return live.facts(torch.device(device))


def append(path: str | None, rows: list[dict[str, Any]], device: str) -> None:
    """Append rows to a JSON-lines file, each with the environment; nothing when there is no path."""
    if path is not None:
        live.append(Path(path), rows, torch.device(device))
