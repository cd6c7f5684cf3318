"""What two traces have in common, and in which the models that they are of differ, before any number is compared."""

from __future__ import annotations

import ops_math as om
from ops_nn.debug.figures import measure, step_of, thinned, unpack
from ops_nn.debug.trace import ENDED, FORWARD, INPUT_GRADIENT, LIGHT, PARAMETER, PARAMETER_GRADIENT, Key, Record, Trace

RESULTS = (FORWARD, INPUT_GRADIENT, PARAMETER_GRADIENT)


def pairs(a: Trace, b: Trace) -> dict[Key, tuple[Record, Record]]:
    """What both have. A light trace has read some weights in part: so much of a full one is held against it, where tensors were kept."""
    found = {key: (record, b.records[key]) for key, record in a.records.items() if key in b.records}
    if LIGHT not in (a.mode, b.mode) or a.mode == b.mode:
        return found
    for key, pair in list(found.items()):
        if key.direction != PARAMETER or step_of(pair[0].shape) == step_of(pair[1].shape) == 1:
            continue
        whole = pair[a.mode == LIGHT]
        if whole.tensor is None:
            del found[key]
            continue
        part = thinned(whole.tensor)
        same = Record(unpack(measure(part), part.numel()), whole.shape, whole.stride, whole.dtype, whole.order)
        found[key] = (pair[0], same) if a.mode == LIGHT else (same, pair[1])
    return found


def check_formats(a: Trace, b: Trace) -> None:
    """Fingerprints and sketches of one format are other functions than those of another."""
    if a.format != b.format:
        raise om.UnsupportedError(
            f"compare: traces of formats {a.format} and {b.format}, whose fingerprints are not alike. "
            "Trace both runs with one version, or compare both with the version that wrote the older one."
        )


def check_seen(name: str, trace: Trace) -> None:
    """A trace holds a result at all."""
    if not any(key.direction in RESULTS for key in trace.records):
        why = next((note for note in trace.notes if note.startswith(ENDED)), "")
        why = why or ("its `with` has not ended" if trace.open else "no module of its model was called inside its `with`")
        raise om.UnsupportedError(f"compare: {name} holds no result of a module: {why}. Trace a whole step, forward and backward.")


def structure(a: Trace, b: Trace) -> list[str]:
    """How two models differ, in words, in the order of A's modules; empty for models of one build."""
    found: list[str] = []
    replaced: list[str] = []
    for path, entry in a.modules.items():
        where = path or "the model"
        if path not in b.modules:
            found.append(f"{where} is in A only ({entry['facts']['class']})")
            continue
        own, other = entry["facts"], b.modules[path]["facts"]
        for name in dict.fromkeys((*own, *other)):
            x, y = own.get(name, "absent"), other.get(name, "absent")
            if x != y and name == "forward":
                replaced.append(f"{where} ({y if x == 'absent' else x})")
            elif x != y:
                found.append(f"{where}: {name}: {x} in A, {y} in B")
    if replaced:
        found.append(f"{len(replaced)} modules have a forward of their own in one run, the first {replaced[0]}")
    found += [f"{path or 'the model'} is in B only ({e['facts']['class']})" for path, e in b.modules.items() if path not in a.modules]
    for name in sorted(a.ties.keys() | b.ties.keys()):
        x, y = (t.ties.get(name) for t in (a, b))
        if x != y:
            found.append(
                f"{name}: " + (f"tied to {x} in A" if x else "of its own in A") + ", " + (f"tied to {y} in B" if y else "of its own in B")
            )
    counts = [_counts(t) for t in (a, b)]
    for path in counts[0].keys() & counts[1].keys():
        if counts[0][path] != counts[1][path]:
            found.append(f"{path or 'the model'}: called {counts[0][path]} times in A and {counts[1][path]} in B")
    return found


def _counts(trace: Trace) -> dict[str, int]:
    counts: dict[str, int] = {}
    for call in trace.calls:
        counts[call.module] = counts.get(call.module, 0) + 1
    return counts
