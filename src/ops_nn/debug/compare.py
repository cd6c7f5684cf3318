"""Hold two traces against each other, in the order of the forward and then of the backward, and find whose error is its own.

A module is a culprit where what it was given agrees and what it made of it does not: its error is beyond what rounding explains plus
`GROWTH` times the error that it was given. Of nested ones the innermost is named. What it was given is, in the forward, its inputs; in
the backward its output gradients, and the values of the forward, which the backward reads. The code between modules may be a culprit in
the backward too: then the output gradient that it sent to a module is named. Of compiled code only the boundary is seen:
what rounding explains of each of the n modules inside counts as given too, as of n independent errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import ops_math as om
from ops_nn.debug.facing import RESULTS, check_formats, check_seen, pairs, structure
from ops_nn.debug.trace import (
    DIRECTIONS,
    FORWARD,
    GRADIENTS,
    INPUT,
    INPUT_GRADIENT,
    OUTPUT_GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    Call,
    Key,
    Record,
    Trace,
)
from ops_nn.debug.verdict import BITWISE, DIFFERENT, FLOOR_FACTOR, GROWTH, GROWTH_BETWEEN, ROUNDING, Difference, difference

# A gradient that only one run has. It is a fault of its module where the gradients that arrived there agree to this.
LOST = Difference(False, math.inf, math.inf, 0.0, True)
LOST_BELOW = 0.1


class Row(NamedTuple):
    """One tensor of both runs. `given` is the largest error of what it was computed from; None where that was not seen."""

    key: Key
    difference: Difference
    verdict: str
    given: float | None = None


class Culprit(NamedTuple):
    """A module whose error is its own. `tied` are others that cannot be told from it: they share the tensor."""

    key: Key
    difference: Difference
    given: float
    tied: tuple[str, ...] = ()


class Comparison:
    """Two traces, tensor by tensor, as `ConsistencyChecker.compare` makes it.

    Attributes:
        rows: every tensor that both have, in the order of A.
        culprits: forward order first, then backward order.
        missing: keys that only one has, with `A` or `B`.
        structure: how the models differ, in words, the first first.
    """

    def __init__(self, a: Trace, b: Trace, precision: float, floors: dict[Key, float] | None = None) -> None:
        check_formats(a, b)
        self.a, self.b, self.precision = a, b, precision
        self.structure = structure(a, b)
        self.floors = floors or {}
        self.differences = {key: self._difference(key, *pair) for key, pair in pairs(a, b).items()}
        for name, trace in (("A", a), ("B", b)):
            check_seen(name, trace)
        shared, fewest = len(a.modules.keys() & b.modules.keys()), min(len(a.modules), len(b.modules))
        if not any(key.direction in RESULTS for key in self.differences) or 2 * shared < fewest:
            first = self.structure[0] if self.structure else "no result was seen in both"
            raise om.UnsupportedError(
                f"compare: the traces are of different models; what differs first: {first}. Trace the same model twice."
            )
        self.missing = self._missing()
        self._of_call: dict[tuple[str, int, str], list[Key]] = {}
        for key in self.differences:
            self._of_call.setdefault((key.module, key.call, key.direction), []).append(key)
        self._ends = {(call.module, call.number): call.end for call in a.calls}
        self._sharing = self._shared_inputs()
        forward = self._forward()
        self.culprits = [*forward, *self._backward()]
        self.rows = self._rows()

    def _difference(self, key: Key, own: Record, other: Record) -> Difference:
        alike = self.a.autocast if self.a.autocast == self.b.autocast else ""
        found = difference(own, other, self.precision, alike)
        return found._replace(limit=max(found.limit, FLOOR_FACTOR * self.floors.get(key, 0.0)))

    def worst(self, module: str, call: int, *directions: str) -> float | None:
        """The largest error of a call's tensors of these directions; None where there are none."""
        found = [self.differences[key].l2 for direction in directions for key in self._of_call.get((module, call, direction), ())]
        return max(found, default=None)

    def _missing(self) -> list[tuple[Key, str]]:
        """Gradients that only one has though the other side's call was seen too."""
        found = []
        calls = [{(c.module, c.number) for c in trace.calls} for trace in (self.a, self.b)]
        graded = [any(k.direction == PARAMETER_GRADIENT for k in t.records) for t in (self.a, self.b)]
        for own, other, name, theirs in ((self.a, self.b, "B", calls[1]), (self.b, self.a, "A", calls[0])):
            for key in own.records:
                if key in other.records or key.module not in other.modules:
                    continue
                by_call = key.direction in RESULTS and (key.module, key.call) in theirs
                by_weight = key.direction == PARAMETER_GRADIENT and all(graded) and key._replace(direction=PARAMETER) in other.records
                if by_call or by_weight:
                    found.append((key, name))
        return found

    def _shared_inputs(self) -> dict[Key, list[tuple[str, int]]]:
        """For each input's key, the calls of A that were given the same tensor.

        Not those that return what they were given, as dropout of nothing does: their output's gradient is that very sum over the others.
        """
        returned = {(k.module, k.call, r.figures.fingerprint) for k, r in self.a.records.items() if k.direction == FORWARD}
        users: dict[tuple[str, tuple[int, ...]], list[tuple[str, int]]] = {}
        keys = {key: (r.figures.fingerprint, r.shape) for key, r in self.a.records.items() if key.direction == INPUT}
        for key, tensor in keys.items():
            if (key.module, key.call, tensor[0]) not in returned:
                users.setdefault(tensor, []).append((key.module, key.call))
        return {key: users.get(tensor, []) for key, tensor in keys.items()}

    def _forward(self) -> list[Culprit]:
        """Modules whose results are not explained by what they had: their inputs, and what the modules inside them returned.

        An inner module's input that no module returned was made by the code around it, and is held against what that code had then.
        """
        a = self.a
        own_calls: dict[int, list[int]] = {}
        for index, call in enumerate(a.calls):
            own_calls.setdefault(call.parent, []).append(index)
        found = []
        for index, call in sorted(enumerate(a.calls), key=lambda item: item[1].end):
            had = self.worst(call.module, call.number, INPUT) or 0.0
            blame: Culprit | None = None
            for inner in (a.calls[i] for i in own_calls.get(index, ())):
                blame = blame or self._blame(call, (inner.module, inner.number, INPUT), had)
                had = max(had, self.worst(inner.module, inner.number, FORWARD) or 0.0)
            blame = blame or self._blame(call, (call.module, call.number, FORWARD), had)
            found += [] if blame is None else [blame]
        return self._innermost(found)

    def _blame(self, call: Call, where: tuple[str, int, str], had: float) -> Culprit | None:
        """The call as a culprit, if a tensor there is not explained by what it had; its own result is what is named."""
        bad = [key for key in self._of_call.get(where, ()) if self._unexplained(key, had)]
        if not bad:
            return None
        own = [key for key in self._of_call.get((call.module, call.number, FORWARD), ()) if self._unexplained(key, had)]
        key = min(own or bad, key=lambda k: self.a.records[k].order)  # an operator inside is seen before the module's result
        return Culprit(key, self.differences[key], had)

    def _unexplained(self, key: Key, given: float) -> bool:
        """Whether an error is beyond rounding, and beyond what may have become of the error that was given."""
        found = self.differences[key]
        if found.bitwise or math.isinf(given):
            return False
        return not found.l2 <= found.limit + GROWTH * (given + self._given_inside(key))

    def _given_inside(self, key: Key) -> float:
        """What rounding explains of the modules that ran unseen in the compiled code that a tensor came out of; a measured floor holds
        that already. Where no call at all was seen, as of a compiled function, that code is the whole model."""
        if key in self.floors:
            return 0.0
        traces = (self.a, self.b)
        compiled = (path for path in _outwards(key.module) if any(t.modules.get(path, {}).get("compiled") for t in traces))
        region = next(compiled, None if all(t.calls for t in traces) else "")
        if region is None:
            return 0.0
        calls = [sum(_holds(region, call.module) for call in t.calls) for t in traces]
        return self.differences[key].limit * math.sqrt(max(*calls, sum(_holds(region, path) for path in self.a.modules)))

    def _innermost(self, found: list[Culprit]) -> list[Culprit]:
        """Without those that hold another one."""
        guilty = {(c.key.module, c.key.call) for c in found}
        outer: set[tuple[str, int]] = set()
        for call in self.a.calls:
            if (call.module, call.number) in guilty:
                outer.update((c.module, c.number) for c in self._around(call))
        return [c for c in found if (c.key.module, c.key.call) not in outer]

    def _around(self, call: Call) -> Iterable[Call]:
        while call.parent >= 0:
            call = self.a.calls[call.parent]
            yield call

    def _backward(self) -> list[Culprit]:
        found: list[Culprit] = []
        for call in sorted(self.a.calls, key=lambda c: -c.end):
            for key in self._of_call.get((call.module, call.number, INPUT_GRADIENT), ()):
                given = self._given_backward(key)
                if given is not None and self._unexplained(key, given) and not self._vanishes(key):
                    found.append(Culprit(key, self.differences[key], given))
        for key in self._gradients_of_one(INPUT_GRADIENT):
            given = self._given_backward(key)
            if given is not None and given <= LOST_BELOW:
                found.append(Culprit(key, LOST, given))
        found = self._innermost(_joined(found + self._between(), self.a))
        blamed = {c.key.module for c in found}
        for key in self._parameter_keys():
            given = self._given_parameter(key)
            wrong = given is not None and self._unexplained(key, given) and not self._cancels(key)
            if wrong and not self._inside(key.module, blamed):
                found.append(Culprit(key, self.differences[key], given or 0.0))
        for key in self._gradients_of_one(PARAMETER_GRADIENT):
            given = self._given_parameter(key)
            if given is not None and given <= LOST_BELOW and not self._inside(key.module, blamed):
                found.append(Culprit(key, LOST, given))
        found = [c for c in found if "." not in c.key.name or not any(_holds(c.key.module, o.key.module) for o in found)]
        return sorted(found, key=lambda c: (-self._last_end(c.key.module), DIRECTIONS.index(c.key.direction)))

    def _between(self) -> list[Culprit]:
        """Output gradients that came from the code between modules and are not explained by what that code had: those of the call
        around it, what the modules behind it sent back, and the values of the forward. What a module sent back itself is judged there."""
        found = []
        for index, call in enumerate(self.a.calls):
            inner = sorted((c for c in self.a.calls if c.parent == index), key=lambda c: -c.end)
            had = self.worst(call.module, call.number, OUTPUT_GRADIENT)
            if had is None:
                continue
            had += max(self.worst(c.module, c.number, INPUT, FORWARD) or 0.0 for c in (call, *inner))
            sent = self._bits(call, OUTPUT_GRADIENT)
            for one in inner:
                new = [k for k in self._keys(one, OUTPUT_GRADIENT) if self.a.records[k].figures.fingerprint not in sent]
                bad = [k for k in new if self._unexplained(k, GROWTH_BETWEEN / GROWTH * had)]
                if bad:
                    found.append(Culprit(bad[0], self.differences[bad[0]], had))
                    break
                sent |= self._bits(one, INPUT_GRADIENT)
                had = max(had, self.worst(one.module, one.number, INPUT_GRADIENT) or 0.0)
        return found

    def another_loss(self) -> Key | None:
        """The output gradient of a model's call that what the call returned does not explain: the code behind the model made it."""
        for call in self.a.calls:
            given = self.worst(call.module, call.number, INPUT, FORWARD) or 0.0
            for key in self._keys(call, OUTPUT_GRADIENT) if call.parent < 0 else ():
                if self._unexplained(key, GROWTH_BETWEEN / GROWTH * given):
                    return key
        return None

    def _keys(self, call: Call, direction: str) -> list[Key]:
        return self._of_call.get((call.module, call.number, direction), [])

    def _bits(self, call: Call, direction: str) -> set[str]:
        return {self.a.records[key].figures.fingerprint for key in self._keys(call, direction)}

    def _vanishes(self, key: Key) -> bool:
        """Whether an input's gradient is what is left of a sum that cancels: its error is rounding beside the summands.

        They are of the size of the output's gradient times the module's gain, |output| / |input|. So is a norm's input gradient where the
        output's gradient points along the output, as under a loss that is a function of its length.
        """
        size = self._size(key.module, key.call, OUTPUT_GRADIENT) * self._size(key.module, key.call, FORWARD)
        record, given = self.a.records[key], self.a.records.get(key._replace(direction=INPUT))
        if given is None or not given.figures.l2:
            return False
        found = self.differences[key]
        return found.l2 * record.figures.l2 <= found.limit * size / given.figures.l2

    def _size(self, module: str, call: int, direction: str) -> float:
        return max((self.a.records[key].figures.l2 for key in self._of_call.get((module, call, direction), ())), default=0.0)

    def _cancels(self, key: Key) -> bool:
        """Whether a bias's or norm's gradient is a sum that cancels: its error is rounding beside the gradients next to it.

        The gradient of a key's bias is zero but for rounding, since softmax does not see a shift of all scores.
        """
        record = self.a.records[key]
        if len(record.shape) != 1:
            return False
        parent = key.module.rpartition(".")[0]
        near = [
            r
            for k, r in self.a.records.items()
            if k.direction == PARAMETER_GRADIENT and k.name == key.name and k.module.rpartition(".")[0] == parent
        ]
        found = self.differences[key]
        return found.l2 * record.figures.l2 <= found.limit * max(r.figures.l2 for r in near)

    def _gradients_of_one(self, direction: str) -> list[Key]:
        return [key for key, _ in self.missing if key.direction == direction]

    def _inside(self, module: str, blamed: set[str]) -> bool:
        return any(module != b and module.startswith(f"{b}." if b else "") for b in blamed)

    def _parameter_keys(self) -> list[Key]:
        return [key for key in self.differences if key.direction == PARAMETER_GRADIENT]

    def _last_end(self, module: str) -> int:
        """When the module, or the innermost observed one around it, ended for the last time."""
        for path in _outwards(module):
            ends = [end for (name, _), end in self._ends.items() if name == path]
            if ends:
                return max(ends)
        return -1

    def _given_backward(self, key: Key) -> float | None:
        """The largest error of what an input's gradient is made of."""
        users = [*self._sharing.get(key._replace(direction=INPUT), ()), (key.module, key.call)]
        gradients = [self.worst(module, call, OUTPUT_GRADIENT) for module, call in users]
        if self.worst(key.module, key.call, OUTPUT_GRADIENT) is None:
            return None
        values = self.worst(key.module, key.call, INPUT, FORWARD) or 0.0
        return max((g for g in gradients if g is not None), default=0.0) + values

    def _given_parameter(self, key: Key) -> float | None:
        """The same for a parameter's gradient: over all modules that hold it, in both runs alike."""
        found = [self._given_holder(module) for module in self._holders(key)]
        known = [g for g in found if g is not None]
        if not known and not any(k.direction == OUTPUT_GRADIENT for k in self.differences):
            return 0.0  # no call was seen in both, so that nothing else can show an error
        return max(known) if known else None

    def _holders(self, key: Key) -> list[str]:
        full = f"{key.module}.{key.name}".strip(".")
        groups = [{full, *_tied_with(t, full)} for t in (self.a, self.b)]
        return sorted(name.rpartition(".")[0] for name in groups[0] & groups[1]) if "." not in key.name else [key.module]

    def _given_holder(self, module: str) -> float | None:
        """Where the module was not called as such, what the one around it was given."""
        for path in _outwards(module):
            numbers = [number for name, number in self._ends if name == path]
            gradients = [g for n in numbers if (g := self.worst(path, n, OUTPUT_GRADIENT)) is not None]
            if gradients:
                return max(gradients) + max((self.worst(path, n, INPUT, FORWARD) or 0.0) for n in numbers)
        return None

    def _rows(self) -> list[Row]:
        """Every tensor with its verdict: an error that was inherited from within rounding is within rounding."""
        guilty = {c.key for c in self.culprits}
        fed_alike = all(
            found.l2 <= found.limit
            for call in self.a.calls
            if call.parent < 0
            for key in self._of_call.get((call.module, call.number, INPUT), ())
            for found in (self.differences[key],)
        )
        same_loss = self.another_loss() is None
        earliest = min((self.a.records[k].order for k in guilty if k.direction == FORWARD), default=math.inf)
        rows = []
        for key, found in sorted(self.differences.items(), key=lambda item: self.a.records[item[0]].order):
            before = not guilty or (key.direction in (INPUT, FORWARD) and self.a.records[key].order < earliest)
            clean = before and fed_alike and math.isfinite(found.l2) and (same_loss or key.direction not in GRADIENTS)
            if found.bitwise:
                verdict = BITWISE
            elif key not in guilty and (found.l2 <= found.limit or (clean and key.direction != PARAMETER)):
                verdict = ROUNDING
            else:
                verdict = DIFFERENT
            rows.append(Row(key, found, verdict))
        return rows


def _joined(found: list[Culprit], a: Trace) -> list[Culprit]:
    """One culprit for each tensor: modules that share it cannot be told apart, unless one holds the others."""
    groups: dict[str, list[Culprit]] = {}
    for culprit in found:
        record = a.records.get(culprit.key)
        groups.setdefault(str(culprit.key) if record is None else record.figures.fingerprint, []).append(culprit)
    joined = []
    for group in groups.values():
        inner = [c for c in group if not any(_holds(c.key.module, o.key.module) for o in group)]
        joined.append(inner[0]._replace(tied=tuple(c.key.module for c in inner[1:] if c.key.module != inner[0].key.module)))
    return joined


def _tied_with(trace: Trace, full: str) -> set[str]:
    """Other names of a parameter in a trace."""
    first = trace.ties.get(full, full)
    return {first, *(name for name, holder in trace.ties.items() if holder == first)} - {full}


def _holds(outer: str, inner: str) -> bool:
    return outer != inner and inner.startswith(f"{outer}." if outer else "")


def _outwards(module: str) -> list[str]:
    """The module and those around it, by name."""
    parts = module.split(".") if module else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def floors_of(a: Trace, floor: Trace, precision: float) -> dict[Key, float]:
    """The noise floor: how far each tensor of A is from that of A perturbed."""
    check_formats(a, floor)
    moved = [(key, difference(*pair, precision).l2) for key, pair in pairs(a, floor).items()]
    return {key: l2 for key, l2 in moved if math.isfinite(l2)}
