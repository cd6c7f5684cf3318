"""Checkpoints: one safetensors file with every weight and optimizer tensor, and the rest as JSON in its header.

A file is written beside its final place, flushed to the disk and moved there in one step, so that a reader, or a crash,
meets the old checkpoint or the new one and nothing between.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ops_math import __version__, checks
from ops_math.cli.train.config import COMMAND, OPS_MATH
from ops_math.cli.train.engine import WEIGHTS, Run

FILE_NAME = "checkpoint.safetensors"
HEADER = "ops_math.train"
FORMAT = 1
RNG_CPU, RNG_CUDA = "rng/cpu", "rng/cuda"


class State(NamedTuple):
    """What a checkpoint holds besides tensors.

    Attributes:
        step: steps done; the next one has this number, which is also the position in the data.
        starts: steps at which a process began to train.
        config: the run's configuration.
        data_digest: hash of the tokens.
        data_path: the `--data` argument, absolute, or None for the built-in text.
        runs: for each variant its losses, step times [s] and GradScaler state.
        unavailable: variants that could not run, and why.
        versions: of ops-math and torch.
    """

    step: int
    starts: list[int]
    config: dict[str, Any]
    data_digest: str
    data_path: str | None
    runs: dict[str, dict[str, Any]]
    unavailable: dict[str, str]
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Versions that a checkpoint notes."""
    return {"ops_math": __version__, "torch": torch.__version__}


def write(path: Path, state: State, runs: dict[str, Run]) -> None:
    """Write a checkpoint atomically.

    One that stopped early has everything that going on needs. A finished one has the weights of ops-math's run alone: nothing
    resumes it, and the optimizers of a comparison would be eight times as large.

    Raises:
        UnsupportedError: when the place holds a file that is not a checkpoint of ours, or cannot be written.
    """
    if path.exists():
        read_state(path, "it is in the way of a new checkpoint and is left as it is")
    finished = state.step == state.config["steps"]
    tensors = {
        f"{name}/{key}": _alone(value)
        for name, run in runs.items()
        for key, value in run.tensors().items()
        if not finished or (name == OPS_MATH and key.startswith(WEIGHTS))
    }
    tensors[RNG_CPU] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors[RNG_CUDA] = torch.cuda.get_rng_state()
    metadata = {HEADER: json.dumps({"format": FORMAT, **state._asdict()})}
    try:
        _replace(path, tensors, metadata)
    except (OSError, SafetensorError) as error:
        checks.refuse(
            f"{COMMAND}: the checkpoint {path}", f"it cannot be written ({error})", "Free space or choose another --report folder"
        )


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, with a storage of its own: the format takes no views of one buffer."""
    copy = tensor.detach().cpu().contiguous()
    return copy if copy.untyped_storage().nbytes() == copy.nbytes else copy.clone()


def _replace(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".checkpoint-", suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def find(given: Path) -> Path:
    """The checkpoint file that `--resume` means: the file itself, or the one in a report folder.

    Raises:
        ArgumentError: when there is none.
    """
    path = given / FILE_NAME if given.is_dir() else given
    if not path.is_file():
        checks.fail(
            COMMAND,
            "--resume",
            f"a checkpoint, or a report folder with {FILE_NAME} in it",
            f"{given}, where there is none",
            "Correct the path.",
        )
    return path


def read_state(path: Path, otherwise: str = "it is left as it is") -> State:
    """The JSON part of a checkpoint, the file checked for completeness.

    Raises:
        UnsupportedError: for a truncated file, one of another program, or one of another format version.
    """
    what = f"{COMMAND}: {path}"
    advice = "Name another file or folder"
    try:
        # The library compares the header's sizes with the file's: a truncated file fails here.
        with safe_open(path, "pt") as file:
            header = (file.metadata() or {}).get(HEADER)
    except (SafetensorError, OSError) as error:
        checks.refuse(what, f"not a complete checkpoint ({error}); {otherwise}", advice)
    if header is None:
        checks.refuse(what, f"a safetensors file of another program, not a checkpoint of `ops-math train`; {otherwise}", advice)
    fields = json.loads(header)
    found = fields.pop("format")
    if found != FORMAT:
        checks.refuse(what, f"a checkpoint of format {found}, and this version reads format {FORMAT}; {otherwise}", advice)
    return State(**fields)


def check_unfinished(path: Path, state: State) -> None:
    """There is something left to do.

    Raises:
        ArgumentError: when every step was made.
    """
    if state.step >= state.config["steps"]:
        got = f"{path}, which has made all of its {state.step} steps"
        checks.fail(COMMAND, "--resume", "a run that was stopped", got, "Start a new run; the learning rate of this one has ended.")


def restore(path: Path, state: State, runs: dict[str, Run]) -> None:
    """Put weights, optimizer, scaler, history and generators back to where they were.

    Raises:
        UnsupportedError: when the checkpoint does not fit the runs.
    """
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in runs}
    with safe_open(path, "pt") as file:
        for key in file.keys():
            name, _, rest = key.partition("/")
            if name in tensors:
                tensors[name][rest] = file.get_tensor(key)
        torch.set_rng_state(file.get_tensor(RNG_CPU))
        if torch.cuda.is_available() and RNG_CUDA in file.keys():
            torch.cuda.set_rng_state(file.get_tensor(RNG_CUDA))
    for name, run in runs.items():
        run.load_tensors(tensors[name], str(path))
        run.load_history(state.runs[name])
