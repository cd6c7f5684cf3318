"""A trace: what a checker saw of one run, in memory and on disk.

On disk it is a folder: `trace.json` with the modules, the calls and the figures, and in full mode `tensors-00000.safetensors` and so on.
Each file is written beside its place, flushed and moved there, so a reader meets whole files only. The JSON comes first and the files of
tensors do not depend on each other: what was written before a disk was full is readable.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ops_math as om
from ops_nn.debug.figures import Figures

FORMAT = 3  # 2: other fingerprints and sketches; 3: large weights of light traces are read in part
OLDEST_FORMAT = 1
INDEX = "trace.json"
HEADER = "ops_nn.debug"
SHARD_BYTES = 256 * 2**20

LIGHT = "light"
INPUT, FORWARD = "input", "forward"
OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT = "output gradient", "input gradient", "parameter gradient"
GRADIENTS = (OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT)
PARAMETER = "parameter"
ENDED = "the run ended with"  # begins the note of a trace that an exception ended
DIRECTIONS = (PARAMETER, INPUT, FORWARD, OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT)


class Key(NamedTuple):
    """Where a tensor stands: module path without wrappers, call number from 0, direction, and which tensor of several.

    `forward`, `input gradient` and `parameter gradient` are results, which a fault in the module makes wrong; `input`, `output gradient`
    and `parameter` are what it was given.
    """

    module: str
    call: int
    direction: str
    name: str = ""

    def __str__(self) -> str:
        which = f" of {self.name}" if self.name else ""
        return f"{self.module or 'the model'}, {self.direction}{which}" + (f", call {self.call + 1}" if self.call else "")


class Record(NamedTuple):
    """What is kept of a tensor. `order` counts records of a trace; `tensor` is there in full mode, on the CPU.

    Figures of a `parameter` in a light trace are those of its `thinned` elements.
    """

    figures: Figures
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    order: int
    tensor: Tensor | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Call(NamedTuple):
    """One call of a module: path, number, the index of the call around it (-1 for none), and its place in the order of ends."""

    module: str
    number: int
    parent: int
    end: int


class Trace:
    """One run, seen by a checker.

    Attributes:
        mode: `light` or `full`.
        model: dotted class name.
        modules: for each shared name the module's facts, its other names and, in full mode, how to build it.
        arguments: in full mode how each call was made, by `module#number`, with names in the place of tensors.
        autocast: dtype of autocast, empty where it was off.
        ties: parameters that are one with another, by full name.
        calls: every observed call, in the order of their starts.
        notes: what is to be known of the observation, in words.
        versions: of ops-math and torch, the device, and what else identifies the run.
        format: of the version that made it; figures of different formats cannot be compared.
    """

    def __init__(self, mode: str, model: str) -> None:
        self.mode, self.model = mode, model
        self.format = FORMAT
        self.modules: dict[str, dict[str, Any]] = {}
        self.ties: dict[str, str] = {}
        self.arguments: dict[str, Any] = {}
        self.autocast = ""
        self.calls: list[Call] = []
        self._records: dict[Key, Record] = {}
        self._arriving: Callable[[], dict[Key, Record]] | None = None
        self.notes: list[str] = []
        self.open = False  # while it is being made
        self.versions: dict[str, str] = {"ops_math": om.__version__, "torch": torch.__version__}

    @property
    def records(self) -> dict[Key, Record]:
        """Figures, and in full mode tensors, by `Key`; waits for them where they are still on their way from a device."""
        if self._arriving is not None:
            self._records |= self._arriving()
            self._arriving = None
        return self._records

    def will_have(self, arriving: Callable[[], dict[Key, Record]]) -> None:
        """Take records that are asked for when somebody looks."""
        self._arriving = arriving

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_records": self.records, "_arriving": None}

    def __str__(self) -> str:
        kept = sum(record.tensor is not None for record in self.records.values())
        tensors = f", {kept} tensors kept" if kept else ""
        return f"{self.mode} trace of {self.model}: {len(self.calls)} calls, {len(self.records)} tensors seen{tensors}"

    def save(self, path: str | Path) -> Path:
        """Write the trace into a folder, which is made.

        Raises:
            ArgumentError: where the folder holds something else.
            UnsupportedError: where it cannot be written; what was written until then can be read.
        """
        folder = Path(path)
        _check_free(folder)
        written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("tensors-*.safetensors"):
                old.unlink()
            replace(folder / INDEX, lambda place: place.write_text(json.dumps(self._index(), allow_nan=False) + "\n"))
            for number, shard in enumerate(_shards(self.records)):
                write_tensors(folder / f"tensors-{number:05d}.safetensors", shard, {HEADER: json.dumps({"format": FORMAT})})
                written += len(shard)
        except OSError as error:
            what = f"its figures and {written} of its tensors can be read there" if (folder / INDEX).is_file() else "nothing was written"
            raise om.UnsupportedError(
                f"Trace.save: {folder}: it cannot be written ({error.strerror or error}); {what}. Free space or choose another folder."
            ) from error
        return folder

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace back. Files of tensors that are damaged are left out and named in `notes`.

        Raises:
            ArgumentError: where there is none.
            UnsupportedError: for a truncated index, or a format that this version does not read.
        """
        folder = Path(path)
        index = folder / INDEX
        if not index.is_file():
            raise om.ArgumentError(f"Trace.load: path must be a folder with {INDEX} in it; got {folder}. Name what Trace.save wrote.")
        try:
            fields = json.loads(index.read_text())
        except (ValueError, RecursionError) as error:
            raise om.UnsupportedError(f"Trace.load: {index}: it is not complete ({error}). Trace the run again.") from error
        found = fields.get("format") if isinstance(fields, dict) else None
        if not isinstance(found, int) or not OLDEST_FORMAT <= found <= FORMAT:
            reads = f"{OLDEST_FORMAT} to {FORMAT}" if OLDEST_FORMAT < FORMAT else str(FORMAT)
            raise om.UnsupportedError(
                f"Trace.load: {index}: a trace of format {found}, and this version reads format {reads}. "
                "Compare with the version that wrote it, or trace the run again."
            )
        try:
            return _of_index(fields, *_read_shards(folder))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise om.UnsupportedError(f"Trace.load: {index}: a field is missing or was edited ({what}). Trace the run again.") from error

    def _index(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "mode": self.mode,
            "model": self.model,
            "versions": self.versions,
            "modules": self.modules,
            "ties": self.ties,
            "arguments": self.arguments,
            "autocast": self.autocast,
            "notes": self.notes,
            "calls": self.calls,
            "kept": sum(record.tensor is not None for record in self.records.values()),
            "records": [[*key, *_plain_figures(r.figures), r.shape, r.stride, r.dtype, r.order] for key, r in self.records.items()],
        }


def _plain_figures(figures: Figures) -> list[Any]:
    """As strict JSON: a number that is none goes as a word."""
    words = [[repr(v) if not math.isfinite(v) else v for v in part] for part in (figures.sketch, figures.samples)]
    single = [repr(v) if not math.isfinite(v) else v for v in (figures.l2, figures.max)]
    return [figures.fingerprint, *single, figures.nans, figures.infinities, *words]


def _of_index(fields: dict[str, Any], tensors: dict[str, Tensor], damaged: list[str]) -> Trace:
    trace = Trace(fields["mode"], fields["model"])
    trace.format = fields["format"]
    trace.modules, trace.ties, trace.versions = fields["modules"], fields["ties"], fields["versions"]
    trace.notes, trace.arguments, trace.autocast = list(fields["notes"]), fields["arguments"], fields["autocast"]
    trace.calls = [Call(*call) for call in fields["calls"]]
    for module, call, direction, name, mark, l2, top, nans, infinities, sketch, samples, shape, stride, dtype, order in fields["records"]:
        key = Key(module, call, direction, name)
        figures = Figures(mark, float(l2), float(top), nans, infinities, tuple(map(float, sketch)), tuple(map(float, samples)))
        trace.records[key] = Record(figures, tuple(shape), tuple(stride), dtype, order, tensors.get(_tensor_name(key)))
    trace.notes += damaged
    kept = sum(record.tensor is not None for record in trace.records.values())
    if kept < fields["kept"]:
        trace.notes.append(f"{fields['kept'] - kept} of {fields['kept']} tensors are missing: the trace was not written to its end")
    return trace


def _tensor_name(key: Key) -> str:
    return json.dumps(key)


def _shards(records: dict[Key, Record]) -> list[dict[str, Tensor]]:
    """Tensors in files of about SHARD_BYTES, in the order in which they were seen."""
    shards: list[dict[str, Tensor]] = []
    size = SHARD_BYTES
    for key, record in sorted(records.items(), key=lambda item: item[1].order):
        if record.tensor is None:
            continue
        if size >= SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][_tensor_name(key)] = record.tensor
        size += record.tensor.nbytes
    return shards


def _read_shards(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of every whole file, and in words which are damaged."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    damaged = []
    for path in sorted(folder.glob("tensors-*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            damaged.append(f"{path.name} is not complete and is left out ({error})")
    return tensors, damaged


def _check_free(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / INDEX).is_file()):
        raise om.ArgumentError(f"Trace.save: path must be a new folder or one with a trace in it; got {folder}. Name another one.")


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write one safetensors file in one step.

    Raises:
        OSError: when it cannot be written; nothing is left then.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(place: Path) -> None:
        try:
            save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, place, metadata)
        except SafetensorError as error:  # how safetensors says that a disk is full
            raise OSError(str(error)) from error

    replace(path, write)


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place, flush it to the disk and move it there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
