"""Which device a command runs on: one of this machine, or an error in words."""

from __future__ import annotations

import torch

from ops_math import checks

KINDS = ("cpu", "cuda")


def chosen(command: str, name: str | None) -> torch.device:
    """The device that `--device` names; without one CUDA where there is a GPU, else the CPU.

    Raises: ArgumentError for a name that is none of `cpu`, `cuda` and `cuda:N`, or a number beyond the GPUs of this machine;
    UnsupportedError for `cuda` where PyTorch sees no GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if count else "cpu")
    kind, colon, number = name.partition(":")
    if kind not in KINDS or (colon and not number.isdecimal()) or (kind == "cpu" and colon):
        checks.fail(command, "--device", "cpu, cuda or cuda:N", repr(name), "Name one of these.")
    if kind == "cuda" and not count:
        checks.refuse(f"{command}: --device {name}", "torch sees no GPU here", "Use --device cpu, or run `ops-math doctor` to see why.")
    if number and int(number) >= count:
        checks.fail(command, "--device", f"one of the {count} GPUs, cuda:0 to cuda:{count - 1}", repr(name), "Name one of these.")
    return torch.device(name)
