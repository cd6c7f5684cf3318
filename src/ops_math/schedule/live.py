"""What this process knows of measurements, and who may change it: load and export, freeze, agreement between ranks.

`record_for(device)` is what a choice reads. Whenever it changes, operators forget what they chose, so a change takes effect at the next
call and never in the middle of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch

from ops_math import backends, checks, files
from ops_math.schedule import store
from ops_math.schedule.identity import Identity, identity_of, source_of
from ops_math.schedule.record import Ceilings, Measurement, Record, load_shipped, of_measurements
from ops_math.schedule.store import NONE, Contents
from ops_math.spec import Device, Implementation

NOT_AGREED = "the ranks have not agreed on measurements: call ops_math.schedule.agree()"


class Operator(Protocol):
    """What the scheduler needs of a catalogue entry."""

    name: str
    phases: dict[str, Any]

    def implementations(self) -> tuple[Implementation, ...]:
        """All of them, preferred first."""

    def cost(self, problem: Any, phase: str) -> Any:
        """Bytes and operations of a phase."""

    def file(self, stem: str) -> Any:
        """A module of its folder."""

    def forget(self) -> None:
        """Drop remembered choices."""


class _Live:
    """The state. `known` is by identity; `records` are what choices read, made when first asked for."""

    def __init__(self) -> None:
        self.known: dict[Identity, Contents] = {}
        self.records: dict[tuple[Any, ...], Record] = {}
        self.operators: dict[str, Operator] = {}
        self.frozen = ""
        self.agreed = False
        self.collector: Callable[[str, str, Any, Any], None] | None = None  # is told of problems while a step is calibrated
        self.first_use_seconds = 0.0
        self.first_use_progress: Callable[[str], None] | None = None
        self.tried: set[tuple[str, ...]] = set()  # by first use; a problem that could not be measured is not tried again


LIVE = _Live()


def register(operator: Operator) -> None:
    """Enter an operator where it is defined: its measurements are used, and it is told when they change."""
    LIVE.operators[operator.name] = operator


def forget_operator(name: str) -> None:
    """Take an operator out again."""
    LIVE.operators.pop(name, None)


def changed() -> None:
    """Drop everything that was derived from the record."""
    LIVE.records.clear()
    for operator in LIVE.operators.values():
        operator.forget()


def contents_of(identity: Identity) -> Contents:
    """What is known of a device: at first what its file holds."""
    found = LIVE.known.get(identity)
    if found is None:
        place = store.folder()
        found = LIVE.known[identity] = store.read(place / identity.file_name, identity) if place is not None else NONE
    return found


def world_size() -> int:
    """How many ranks there are."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def record_for(device: Device) -> Record:
    """What a choice for this device may read: shipped entries, this machine's measurements of today's sources, its ceilings."""
    silent = NOT_AGREED if world_size() > 1 and not LIVE.agreed else ""
    key = (device, LIVE.frozen, silent, torch.get_num_threads() if device.kind == "cpu" else 0)
    found = LIVE.records.get(key)
    if found is None:
        base = load_shipped()._replace(frozen=LIVE.frozen, silent=silent)
        contents = NONE if silent else contents_of(identity_of(device))
        current = [m for m in contents.measurements.values() if m.source == _source(m.op)]
        found = LIVE.records[key] = of_measurements(base, current, contents.ceilings)
    return found


def _source(op: str) -> str | None:
    operator = LIVE.operators.get(op)
    return None if operator is None else source_of(operator.implementations()[0])


def devices_here() -> list[Device]:
    """The devices of this machine that can be measured: the CPU, and each different GPU."""
    gpus = [backends.device_of(torch.device("cuda", n)) for n in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    return list(dict.fromkeys([backends.device_of(torch.device("cpu")), *gpus]))


def add(identity: Identity, found: Iterable[Measurement], ceilings: Ceilings | None = None, *, save: bool = True) -> None:
    """Take measurements in, and keep them in the device's file unless `save` is off."""
    refuse_when_frozen("add measurements")
    new = Contents({m.key: m for m in found}, ceilings)
    known = contents_of(identity)
    place = store.folder() if save else None
    if place is not None:
        known = store.merge(known, store.write(place / identity.file_name, identity, new.measurements.values(), ceilings))
    LIVE.known[identity] = store.merge(known, new)
    changed()


def refuse_when_frozen(what: str) -> None:
    """Raise when the schedule is frozen."""
    if LIVE.frozen:
        checks.refuse(f"schedule: {what}", "the schedule is frozen", "Leave the `with` of freeze(), or call ops_math.schedule.thaw().")


def state_dict() -> dict[str, Any]:
    """All that is known of this machine's devices, as plain data for a checkpoint (`torch.save`, also with `weights_only`).

    Returns: `{"format", "records"}`, one document a device; `load_state_dict` takes it.
    """
    documents = []
    for device in devices_here():
        identity = identity_of(device)
        documents.append(store.document(identity, contents_of(identity)))  # an empty one too: nothing was known, and is not on resume
    return {"format": store.FORMAT, "records": documents}


def load_state_dict(state: dict[str, Any]) -> int:
    """Replay a record: from now on choices are those of the record, and no other measurement of these devices counts.

    Args:
        state: from `state_dict()`.

    Returns: how many measurements are in use. What belongs to another device or version is set aside with a warning; the checkpoint
    keeps it.

    Raises: UnsupportedError while frozen.
    """
    return _take(state, "the checkpoint's record", only=True, save=False)


def export(path: str | Path) -> int:
    """Write all that is known of this machine's devices to a file that `load` takes, also on another machine of the same kind.

    Returns: how many measurements it holds. Raises: OSError where the file cannot be written; one that was there is as it was.
    """
    state = state_dict()
    files.replace(path, json.dumps(state, indent=1, sort_keys=True) + "\n")
    return sum(len(document["measurements"]) for document in state["records"])


def load(path: str | Path, *, only: bool = False, save: bool = False) -> int:
    """Take in a record that `export` wrote, or a file of the cache folder.

    Args:
        path: the file.
        only: replay it: forget what this machine measured itself (for this process; its file stays).
        save: keep it in this machine's own file too.

    Returns: how many measurements are in use. A file that is truncated, of another device or version, or edited into nonsense is set
    aside with a warning and left as it is.

    Raises: UnsupportedError while frozen; OSError where there is no such file.
    """
    text = Path(path).read_text(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        store.warn(f"schedule: the record {path} was set aside: it is not JSON ({error}). Problems are predicted until measured.")
        return 0
    return _take(found, f"the record {path}", only=only, save=save)


def _take(found: Any, what: str, *, only: bool, save: bool) -> int:
    refuse_when_frozen("load a record")
    documents = found.get("records", [found]) if isinstance(found, dict) else [found]
    here = [identity_of(device) for device in devices_here()]
    count = 0
    for one in documents if isinstance(documents, list) else [documents]:
        tried = [(identity, *store.read_document(one, identity)) for identity in here]
        identity, contents, wrong = min(tried, key=lambda t: (not t[1].measurements and t[1].ceilings is None, len(t[2])))
        if wrong and isinstance(one, dict) and one.get("measurements") == [] and one.get("ceilings") is None:
            continue  # of a device that is not here, and of which nothing was known
        if wrong:
            store.warn(f"schedule: {what} was set aside: {wrong}. {len(contents.measurements)} of its measurements are used.")
        if contents.measurements or contents.ceilings or (only and not wrong):
            known = NONE if only else contents_of(identity)
            LIVE.known[identity] = Contents({**known.measurements, **contents.measurements}, contents.ceilings or known.ceilings)
            count += len(contents.measurements)
            place = store.folder() if save else None
            if place is not None:
                store.write(place / identity.file_name, identity, contents.measurements.values(), contents.ceilings)
    changed()
    return count


class _Switch:
    """Set at once; as a context manager it restores what was before."""

    def __init__(self, name: str, value: Any) -> None:
        checks.not_compiled("freeze or first_use")
        self._name, self._before, self._ended = name, getattr(LIVE, name), False
        setattr(LIVE, name, value)
        changed()

    def __enter__(self) -> None:
        checks.not_ended(f"a setting of {self._name}", self._ended)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        setattr(LIVE, self._name, self._before)
        self._ended = True
        changed()

    def __call__(self, *args: Any) -> NoReturn:
        """Refused: as a decorator it would be in force from there on."""
        self.__exit__(None, None, None)
        checks.no_decorator(f"a setting of {self._name}")


def freeze(*, strict: bool = False) -> _Switch:
    """No measurement and no new record from here on; a statement (until `thaw()`) or a context manager.

    Args:
        strict: a problem that the record does not cover raises UnsupportedError. Otherwise it gets the model's choice, which is the same
            everywhere, and `om.stats()` says so.
    """
    return _Switch("frozen", "refuse" if strict else "predict")


def thaw() -> None:
    """End a `freeze()` that was made as a statement."""
    LIVE.frozen = ""
    changed()


def first_use(seconds: float, progress: Callable[[str], None] | None = None) -> _Switch:
    """Measure each problem when it is first met, and record it; a statement or a context manager.

    Args:
        seconds: at most for one problem [s], compilation not counted; 0 does not measure, which is how a process starts.
        progress: called with what is being done.

    A problem like one in the record is not measured, so ever new lengths meet an end. Nothing is measured while frozen, tracing,
    capturing a graph, at determinism level 1, or with more than one rank: those take the model's choice.
    """
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        checks.fail("schedule.first_use", "seconds", "finite and at least 0", repr(seconds), "Pass seconds a problem, 0 for no measuring.")
    LIVE.first_use_progress = progress
    return _Switch("first_use_seconds", float(seconds))


def reread() -> None:
    """Read files anew at the next choice (after the cache folder was changed by hand or by another process)."""
    LIVE.known.clear()
    LIVE.tried.clear()
    LIVE.agreed = False
    changed()
