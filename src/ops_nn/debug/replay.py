"""One call of one module in a file that runs alone: inputs, weights, output gradients, and what both runs made of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ops_math as om
from ops_nn.debug import recipe, trees
from ops_nn.debug.trace import FORWARD, INPUT, INPUT_GRADIENT, OUTPUT_GRADIENT, PARAMETER, PARAMETER_GRADIENT, Key, Trace, write_tensors
from ops_nn.debug.verdict import distance, limit

FORMAT = 1
HEADER = "ops_nn.debug.replay"
_GRADIENTS = (INPUT_GRADIENT, PARAMETER_GRADIENT)


class Line(NamedTuple):
    """One result of the replay: relative l2 distances, None where one of the two is not there.

    `repeats_a` and `repeats_b`: what this machine computes against what was recorded; `apart`: B's module from A's, both run here on A's
    inputs; `float64_a`, `float64_b`: their distances from A's module in float64; `limit`: what rounding explains.
    """

    what: str
    repeats_a: float | None
    repeats_b: float | None
    apart: float | None
    float64_a: float | None
    float64_b: float | None
    limit: float


class Replay(NamedTuple):
    """What `ops-math replay` shows."""

    key: Key
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether B's module is further from A's than rounding explains."""
        return any(line.apart is not None and not line.apart <= line.limit for line in self.lines)

    def __str__(self) -> str:
        head = f"{'what':44} {'A again':>9} {'B again':>9} {'B from A':>9} {'A-fp64':>9} {'B-fp64':>9} {'limit':>9}"
        return "\n".join([str(self.key), head, *(_text(line) for line in self.lines), *self.notes])


def _text(line: Line) -> str:
    cells = ["-" if v is None else ("same" if v == 0 else f"{v:.2e}") for v in line[1:]]
    return f"{line.what:44} " + " ".join(f"{cell:>9}" for cell in cells)


def dump(folder: Callable[[], Path], name: str, key: Key, a: Trace, b: Trace, precision: float) -> Path | str:
    """Write the call of a key into a folder, which is asked for when there is something to write. Returns the file, or in words why there
    is none.

    The file's name ends with a digest of what is in it: another comparison has another one.

    Raises:
        OSError: where the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    digest = hashlib.blake2b(digest_size=4)
    for side, trace in (("a", a), ("b", b)):
        for own, record in trace.records.items():
            below = own.direction == PARAMETER and (
                own.module == key.module or own.module.startswith(f"{key.module}." if key.module else "")
            )
            if below or (own.module, own.call) == (key.module, key.call) or _sums_calls(own, key):
                if record.tensor is None:
                    return "tensors were not kept: trace both runs with mode='full', or use lockstep"
                part = own.name if not below else f"{own.module}.{own.name}".removeprefix(f"{key.module}." if key.module else "").strip(".")
                tensors[f"{side}/{own.direction}/{part}"] = record.tensor
                digest.update(f"{side}{own}{record.figures.fingerprint}".encode())
    if not any(part.startswith(f"a/{INPUT}/") for part in tensors):
        return "the module was not called as such in A: its inputs were not seen"
    call = a.arguments.get(f"{key.module}#{key.call}", {"reason": "the call was not described"})
    header = {
        "format": FORMAT,
        "key": key,
        "call": call,
        "recipes": [t.modules.get(key.module, {}).get("recipe", {"reason": "it is not in this run"}) for t in (a, b)],
        "versions": [a.versions, b.versions],
        "precision": precision,
    }
    digest.update(json.dumps(header).encode())
    path = folder() / f"{name}-{digest.hexdigest()}.safetensors"
    write_tensors(path, tensors, {HEADER: json.dumps(header)})
    return path


def _sums_calls(own: Key, key: Key) -> bool:
    return own.direction == PARAMETER_GRADIENT and own.module == key.module


def run(path: str | Path) -> Replay:
    """Run a file.

    Raises:
        ArgumentError: where there is none.
        UnsupportedError: for a truncated file, another program's, or another format.
    """
    header, tensors = _read(Path(path))
    key = Key(*header["key"])
    notes: list[str] = []
    sides = {}
    for side, plan in zip("ab", header["recipes"], strict=True):
        for why in (plan.get("reason"), header["call"].get("reason")):
            if why:
                notes.append(f"{side.upper()} is not run again: {why}")
                break
        else:
            sides[side] = _made(plan, header["call"], tensors, side, exact=False)
    if "a" in sides:
        try:
            sides["exact"] = _made(header["recipes"][0], header["call"], tensors, "a", exact=True)
        except (RuntimeError, TypeError, ValueError) as error:
            notes.append(f"no float64 replay: {str(error).splitlines()[0]}")
    return Replay(key, tuple(_lines(sides, tensors, header["precision"])), tuple(notes))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        got = f"{path}, which is a folder. Name a file in it." if path.is_dir() else f"{path}, where there is none. Correct the path."
        raise om.ArgumentError(f"replay: FILE must be a file that ConsistencyChecker wrote; got {got}")
    try:
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get(HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise om.UnsupportedError(f"replay: {path}: it is not complete ({error}). Write it again.") from error
    header = None if found is None else json.loads(found)
    if header is None:
        raise om.UnsupportedError(f"replay: {path}: a safetensors file of another program. Name one that ConsistencyChecker wrote.")
    if header["format"] != FORMAT:
        raise om.UnsupportedError(
            f"replay: {path}: a file of format {header['format']}, and this version reads format {FORMAT}. Use the version that wrote it."
        )
    return header, tensors


def _part(tensors: dict[str, Tensor], side: str, direction: str) -> dict[str, Tensor]:
    start = f"{side}/{direction}/"
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def _made(plan: dict[str, Any], call: dict[str, Any], tensors: dict[str, Tensor], side: str, exact: bool) -> dict[str, Tensor]:
    """Results and gradients of one side's module on A's inputs, by `direction/name`."""
    module = recipe.build(plan, _part(tensors, side, PARAMETER))
    if exact:
        module = module.double()
    inputs = {name: _input(t, torch.float64 if exact else t.dtype) for name, t in _part(tensors, "a", INPUT).items()}
    args, kwargs = recipe.call_of(call, {name: t.clone() for name, t in inputs.items()})
    results = {leaf.name: leaf.carrier for leaf in trees.leaves(module(*args, **kwargs))}
    found = {f"{FORWARD}/{name}": y.detach() for name, y in results.items()}
    gradients = _part(tensors, "a", OUTPUT_GRADIENT)
    pairs = [(results[n], g.to(results[n].dtype)) for n, g in gradients.items() if n in results and results[n].requires_grad]
    sources = {f"{INPUT_GRADIENT}/{name}": t for name, t in inputs.items() if t.requires_grad}
    sources |= {f"{PARAMETER_GRADIENT}/{name}": p for name, p in module.named_parameters() if p.requires_grad}
    if pairs and sources:
        ys, dys = zip(*pairs, strict=True)
        grads = torch.autograd.grad(ys, list(sources.values()), dys, allow_unused=True)
        found |= {name: g for name, g in zip(sources, grads, strict=True) if g is not None}
    return found


def _input(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype).requires_grad_() if t.is_floating_point() else t


def _lines(sides: dict[str, dict[str, Tensor]], tensors: dict[str, Tensor], precision: float) -> list[Line]:
    recorded = {side: {f"{d}/{n}": t for d in (FORWARD, *_GRADIENTS) for n, t in _part(tensors, side, d).items()} for side in "ab"}
    lines = []
    for name in dict.fromkeys((*sides.get("a", {}), *sides.get("b", {}), *recorded["a"], *recorded["b"])):
        here = {side: found.get(name) for side, found in sides.items()}
        there = {side: found.get(name) for side, found in recorded.items()}
        a, b = here.get("a"), here.get("b")
        if a is None or b is None:
            a, b = there["a"], there["b"]
        known = next(t for t in (a, b, *here.values(), *there.values()) if t is not None)
        line = Line(
            name.replace("/", " ", 1),
            _apart(there["a"], here.get("a")),
            _apart(there["b"], here.get("b")),
            _apart(a, b),
            _apart(here.get("exact"), here.get("a")),
            _apart(here.get("exact"), here.get("b")),
            limit(known.dtype, precision),
        )
        lines.append(line)
    return lines


def _apart(x: Tensor | None, y: Tensor | None) -> float | None:
    if x is None or y is None:
        return None
    return distance(x, y)[0] if x.shape == y.shape else math.inf
