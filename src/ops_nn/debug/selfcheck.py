"""Does a training step repeat? Two runs in fresh processes, held against each other bit by bit, and the likely cause where they part."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import ops_math as om
from ops_nn.debug.causes import Cause
from ops_nn.debug.selfcheck_child import AS_IT_IS, FACTS, PROBE, SEEDED
from ops_nn.debug.trace import FORWARD, INPUT, PARAMETER, Key, Trace

FUNCTION = "make_step"
REFUSED = "ops-math-refused: "
UNSEEDED, ATOMICS, TUNING, ORDER = "unseeded source", "atomics", "tuning", "data order"


class Run(NamedTuple):
    """What one process wrote: a trace of each step, and the facts of the run."""

    traces: tuple[Trace, ...]
    facts: dict[str, Any]


class Part(NamedTuple):
    """Where two runs first part: the step from 0, and the tensor."""

    step: int
    key: Key

    def __str__(self) -> str:
        return f"step {self.step}: {self.key}"


class SelfCheck(NamedTuple):
    """What `selfcheck` found.

    Attributes:
        steps, tensors: how many were compared.
        differing: how many tensors have other bits.
        first: where the runs first part, None where every bit repeats.
        cause: the likely cause, None where every bit repeats.
        notes: what is to be known besides: sources of entropy that were used, operators without a deterministic implementation.
        folder: where the traces are; None where every bit repeats and no folder was named.
    """

    steps: int
    tensors: int
    differing: int
    first: Part | None
    cause: Cause | None
    notes: tuple[str, ...]
    folder: Path | None

    @property
    def repeats(self) -> bool:
        """Whether both runs agree in every bit that was seen."""
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            lines = [f"repeats: {self.tensors} tensors of {self.steps} steps have the same bits in two processes"]
        else:
            lines = [f"does not repeat: {self.differing} of {self.tensors} tensors of {self.steps} steps differ", f"first: {self.first}"]
            lines.append(f"likely cause: {self.cause}")
        lines += [f"note: {note}" for note in self.notes]
        if self.first is not None and self.folder is not None:
            step = self.first.step
            lines.append(f"traces: ops-math compare {self.folder / 'a' / f'step-{step}'} {self.folder / 'b' / f'step-{step}'}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "repeats": self.repeats,
            "steps": self.steps,
            "tensors": self.tensors,
            "differing": self.differing,
            "first": None if self.first is None else {"step": self.first.step, **self.first.key._asdict()},
            "cause": None if self.cause is None else self.cause._asdict(),
            "notes": list(self.notes),
            "folder": None if self.folder is None else str(self.folder),
        }


class _Runner(NamedTuple):
    """How the script is run."""

    script: Path
    function: str
    folder: Path
    steps: int
    seconds: float

    def run(self, name: str, mode: str, hash_seed: str = "") -> Run:
        """One fresh process."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        own = [sys.executable, "-m", "ops_nn.debug.selfcheck_child"]
        command = [*(["env", f"PYTHONHASHSEED={hash_seed}"] if hash_seed else []), *own]
        arguments = [str(self.script), self.function, str(folder), str(self.steps), mode]
        try:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=self.seconds, check=False)
        except subprocess.TimeoutExpired:
            raise om.UnsupportedError(
                f"selfcheck: {self.script.name} did not end within {self.seconds:g} s. Give it fewer steps, or more time by --seconds."
            ) from None
        if done.returncode:
            said = [line for line in done.stderr.strip().splitlines() if "RuntimeWarning: 'ops_nn" not in line]
            last = said[-1] if said else f"its process ended with code {done.returncode}"
            if last.startswith(REFUSED):
                raise om.ArgumentError(last.removeprefix(REFUSED))
            lines = re.findall(rf'File "{re.escape(str(self.script))}", line (\d+)', done.stderr)
            where = f" at line {lines[-1]}" if lines else ""
            do = f"Call {self.function}() and its step() by themselves first."
            raise om.UnsupportedError(f"selfcheck: {self.script.name} failed{where} ({last}). {do}")
        traces = tuple(Trace.load(folder / f"step-{n}") for n in range(self.steps))
        return Run(traces, json.loads((folder / FACTS).read_text()))


def selfcheck(
    script: str | Path, function: str = FUNCTION, *, steps: int = 2, folder: str | Path | None = None, seconds: float = 600.0
) -> SelfCheck:
    """Run a step twice in fresh processes and compare every bit that its modules saw; where they part, run it again to say why.

    The second look seeds every source of random numbers, fixes Python's hashes, and lets PyTorch name operators that have no
    deterministic implementation: what makes the difference go away, or is named, is the cause.

    Args:
        script: a Python file with `function()`, which returns (model, step); `step()` runs forward and backward of one step.
        function: its name.
        steps: to run in each process.
        folder: for the traces; by default one of its own below the system's folder for temporary files, which is taken away again but for
            the two runs where they part.
        seconds: how long one process may take [s].

    Raises:
        ArgumentError: for a script without that function, one that returns something else, or a step that never calls the model.
        UnsupportedError: where the script fails or takes too long.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise om.ArgumentError(f"selfcheck: SCRIPT must be a Python file; got {script}. Name the file that has {function}().")
    if steps < 1:
        raise om.ArgumentError(f"selfcheck: steps must be at least 1; got {steps}. Pass 2, so that an optimizer's step counts too.")
    if not seconds > 0:
        raise om.ArgumentError(f"selfcheck: seconds must be above 0; got {seconds:g}. Pass the time that one process may take [s].")
    if folder is not None:
        return _checked(_Runner(path, function, Path(folder).resolve(), steps, seconds))
    place = Path(tempfile.mkdtemp(prefix="ops-math-selfcheck-"))
    named: tuple[str, ...] = ()
    try:
        found = _checked(_Runner(path, function, place, steps, seconds))
        named = () if found.repeats else ("a", "b")
        return found if named else found._replace(folder=None)
    finally:
        for part in place.iterdir():
            if part.name not in named:
                shutil.rmtree(part)
        if not named:
            place.rmdir()


def _checked(runner: _Runner) -> SelfCheck:
    """Run twice, and where the runs part once more to say why."""
    a, b = runner.run("a", AS_IT_IS), runner.run("b", AS_IT_IS)
    if all(key.direction == PARAMETER for trace in a.traces for key in trace.records):
        raise om.ArgumentError(
            f"selfcheck: the step of {runner.function}() must call the model that is returned with it; got a step in which no module of it "
            "ran. Return (model, step) of one model."
        )
    keys = differing(a, b)
    tensors = sum(len(t.records) for t in a.traces)
    notes = [f"fresh entropy: {words}" for words in a.facts["entropy"]]
    if not keys:
        return SelfCheck(runner.steps, tensors, 0, None, None, tuple(notes), runner.folder)
    first = earliest(keys)
    cause, alerts = _cause(runner, a, b, first)
    notes += [f"no deterministic implementation: {name}" for name in alerts]
    return SelfCheck(runner.steps, tensors, len(keys), first, cause, tuple(notes), runner.folder)


def differing(a: Run, b: Run) -> list[Part]:
    """Every tensor that has other bits in the two runs, or that one of them has not, in the order in which A saw them."""
    found = []
    for step, (own, other) in enumerate(zip(a.traces, b.traces, strict=True)):
        for key, record in sorted(own.records.items(), key=lambda item: item[1].order):
            theirs = other.records.get(key)
            if theirs is None or theirs.figures.fingerprint != record.figures.fingerprint or theirs.dtype != record.dtype:
                found.append(Part(step, key))
        found += [Part(step, key) for key in other.records if key not in own.records]
    return found


def earliest(parts: list[Part]) -> Part:
    """What came first: weights at the start of the step, then what the model was given, then the first result."""
    step = min(part.step for part in parts)
    here = [part for part in parts if part.step == step]
    for wanted in (lambda k: k.direction == PARAMETER, lambda k: k.direction == INPUT and not k.module, lambda k: k.direction == FORWARD):
        found = [part for part in here if wanted(part.key)]
        if found:
            return found[0]  # of nested modules the innermost: results are seen when a module ends
    return here[0]


def _cause(runner: _Runner, a: Run, b: Run, first: Part) -> tuple[Cause, list[str]]:
    """The likely cause, and operators that PyTorch says have no deterministic implementation."""
    key, sources = first.key, ", ".join(a.facts["entropy"])
    if key.direction == INPUT and not key.module:
        return _data(runner, a, b, sources), []
    other = [f"{x} in A, {y} in B" for x, y in _apart(a.facts["ran"], b.facts["ran"])]
    if other:
        do = "freeze the choice (om.schedule.freeze, load one record), or om.determinism(1)"
        return Cause(TUNING, f"another implementation ran: {'; '.join(other)}: {do}"), []
    seeded = (runner.run("seeded-a", SEEDED, "0"), runner.run("seeded-b", SEEDED, "0"))
    if not differing(*seeded):
        what = "the weights at the start" if key.direction == PARAMETER else f"a random number in {key.module or 'the model'}"
        named = f" ({sources})" if sources else ""
        return Cause(UNSEEDED, f"{what} came from a source that is not seeded{named}: with all of them seeded the runs agree"), []
    alerts = runner.run("probe", PROBE).facts["alerts"]
    if alerts:
        names = ", ".join(alerts)
        return Cause(
            ATOMICS, f"{key.module or 'the model'} uses {names}, which adds or writes in no fixed order: om.determinism(1) refuses it"
        ), alerts
    if a.facts["tuners"]:
        return Cause(
            TUNING, f"{', '.join(a.facts['tuners'])} is on: timing decides which algorithm runs. Switch it off, or om.determinism(1)"
        ), []
    return Cause(
        "unknown", "seeds, hashes, choices and alerts explain nothing: look for time, threads, or kernels of your own in that module"
    ), []


def _data(runner: _Runner, a: Run, b: Run, sources: str) -> Cause:
    """Why the model was given other batches."""
    own, other = (Counter(row for batch in run.facts["batches"] for row in batch) for run in (a, b))
    fixed = a.facts["hash_randomization"] and not differing(runner.run("hash-a", AS_IT_IS, "0"), runner.run("hash-b", AS_IT_IS, "0"))
    if fixed:
        words = (
            "the batches follow Python's hashes, which differ from process to process: sort what comes out of a set, or set PYTHONHASHSEED"
        )
        return Cause(ORDER, words)
    named = f" ({sources})" if sources else ""
    shared = sum((own & other).values())
    if own == other:
        return Cause(
            ORDER, f"both runs read the same rows in another order{named}: seed the sampler, and sort what a directory or a set lists"
        )
    if 2 * shared > own.total():
        return Cause(ORDER, f"{shared} of {own.total()} rows were read by both runs, in another order{named}: seed the sampler")
    return Cause(UNSEEDED, f"the model was given other rows{named}: seed what makes the batch")


def _apart(own: list[str], other: list[str]) -> list[tuple[str, str]]:
    """Operators that ran by another implementation."""
    a, b = (dict(_gathered(lines)) for lines in (own, other))
    return [(f"{op} by {a[op]}", f"by {b[op]}") for op in a if op in b and a[op] != b[op]]


def _gathered(lines: list[str]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for line in lines:
        op, _, implementation = line.partition(": ")
        found.setdefault(op, []).append(implementation)
    return {op: " and ".join(names) for op, names in found.items()}
