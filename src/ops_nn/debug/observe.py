"""Watch the calls of a model's modules while a trace is open, without a hook on any module.

`torch.nn.Module.__call__` is replaced for that time. A module's own state is not touched, so that blocks read its weights, adopted layers
leave their sums to the next norm, and the operators that run are those that run without. Gradients are read by hooks of tensors, which
return nothing. Figures are computed where the tensors are and sent in one transfer at the end.

An input's gradient is what arrives at the tensor, from all who use it: three projections of one tensor have one input gradient.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.debug import compiled, names, recipe, standing, trees
from ops_nn.debug.arriving import Pending, records_of
from ops_nn.debug.figures import step_of
from ops_nn.debug.numbers import Numbers
from ops_nn.debug.operators import Operators
from ops_nn.debug.trace import (
    FORWARD,
    INPUT,
    INPUT_GRADIENT,
    OUTPUT_GRADIENT,
    PARAMETER_GRADIENT,
    Call,
    Key,
    Trace,
)
from ops_nn.features import in_backward

FULL = "full"
_plain_call = nn.Module.__call__


class _Seen(NamedTuple):
    """Figures of a tensor, for as long as it lives and is not written to."""

    tensor: weakref.ref[Tensor]
    version: int
    row: int
    kept: Tensor | None


class _Sum(NamedTuple):
    """Figures of a sum that was not made, for as long as its summands live and are not written to."""

    summands: tuple[weakref.ref[Tensor], weakref.ref[Tensor]]
    versions: tuple[int, int]
    found: Pending


class _Tape(threading.local):
    """The observer that is on, and the calls that are open in this thread."""

    def __init__(self) -> None:
        self.open: list[int] = []


_TAPE = _Tape()
_ON: list[Watcher] = []


def _observed_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not _ON:
        return _plain_call(self, *args, **kwargs)
    return _ON[0].call(self, args, kwargs)


class Watcher(Protocol):
    """What stands in for the calls of modules."""

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, with `run_plainly` for what it does by itself."""


def check_free() -> None:
    """Nobody watches.

    Raises:
        UnsupportedError: where another trace is open.
    """
    if _ON:
        raise om.UnsupportedError("ConsistencyChecker.trace: another trace is open. Close it first; one run is traced at a time.")


def install(watcher: Watcher) -> None:
    """Let a watcher see the calls of all modules."""
    check_free()
    _ON.append(watcher)
    nn.Module.__call__ = _observed_call  # type: ignore[method-assign]


def remove() -> None:
    """Put PyTorch's own call back."""
    nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
    _ON.clear()


def run_plainly(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module as if nobody watched it."""
    return _plain_call(module, *args, **kwargs)


def _local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this rank holds."""
    if type(t) in standing.ORDINARY:
        return t
    to_local = getattr(t.detach(), "to_local", None) if hasattr(t, "to_local") else None
    return t if to_local is None else to_local()


def _seen_whole(t: Tensor) -> bool:
    """Whether values can be read: not of tensors without data, sparse or nested ones."""
    return t.layout == torch.strided and not t.is_nested and t.device.type != "meta" and not t.is_quantized


class Observer:
    """What stands behind `checker.trace(model)`."""

    def __init__(self, trace: Trace, model: nn.Module, gradients: bool, every_module: bool, limit_bytes: int, operators: bool) -> None:
        self.trace, self.gradients, self.limit = trace, gradients, limit_bytes
        self.standing = standing.of(model, every_module)
        self.paths = self.standing.paths
        self.numbers = Numbers()
        self.operations: dict[str, int] = {}
        self.outside: set[Key] = set()  # gradients of what recomputed functions are given, read where they are summed
        self.table = om.FigureTable()
        self.pending: list[Pending] = []
        self.halves: dict[Key, Tensor] = {}
        self.seen: dict[int, _Seen] = {}
        self.sums: dict[tuple[int, int], _Sum] = {}
        self.ends = self.bytes = 0
        self.notes: dict[str, None] = {}
        self.active = True
        self.operators = Operators(self._operator) if operators else None
        self.device = next((p.device.type for p in model.parameters()), "cpu")
        self._describe()

    def _describe(self) -> None:
        trace, found = self.trace, self.standing
        for path, facts in found.facts.items():
            trace.modules[path] = {"facts": facts, "aliases": list(found.aliases.get(path, ()))}
            if trace.mode == FULL:
                trace.modules[path]["recipe"] = recipe.describe(names.unwrapped(found.places[path]))
        trace.ties = found.ties
        if found.removed:
            self.note(f"taken out of names: {', '.join(found.removed)}")
        for path, others in found.aliases.items():
            self.note(f"{path} is also {', '.join(others)}: its calls are numbered under the first name")
        if found.graded:
            self.note("parameters held gradients when the trace began: what it shows of them is the sum")

    def note(self, words: str) -> None:
        """Say something once."""
        self.notes[words] = None

    def start(self) -> None:
        """Begin to watch.

        Raises:
            UnsupportedError: where another trace is open.
        """
        check_free()
        held = self.standing.held
        if self.trace.mode == FULL:
            self.see_all([(item.key, item.tensor) for item in held])
        else:
            self._see_weights(held)
        install(self)
        if self.operators is not None:
            self.operators.__enter__()

    def stop(self) -> None:
        """Cease to watch."""
        if self.operators is not None:
            self.operators.__exit__(None, None, None)
        remove()

    def finish(self) -> None:
        """Read the parameters' gradients and send all figures to the trace, which waits for them when it is looked at."""
        self.active = False
        if self.gradients:
            held = [item for item in self.standing.held_now() if isinstance(item.tensor, nn.Parameter)]
            found = [(item.gradient, gradient) for item in held if (gradient := item.tensor.grad) is not None]
            self.see_all(found)
            if not found and any(p.key.direction == OUTPUT_GRADIENT for p in self.pending):
                self.note("no parameter held a gradient when the trace ended: end it before optimizer.zero_grad()")
        for key, gradient in self.halves.items():  # only one of the two copies was used
            self.see(key, gradient, lasting=False)
        self.halves.clear()
        if self.numbers.again:
            self.note("activation checkpointing: modules that were recomputed in the backward count once")
        for words in compiled.notes(self.trace, self.standing, any(p.key.direction == PARAMETER_GRADIENT for p in self.pending)):
            self.note(words)
        self.trace.will_have(records_of(self.table, self.pending))
        for kind in sorted(self.table.copied_from):
            self.note(f"tensors on {kind} were copied to the CPU for their figures, since there is no Triton for it")
        self.trace.notes += list(self.notes)
        self.pending, self.table = [], om.FigureTable()
        self.seen.clear()

    def see(self, key: Key, t: Tensor, lasting: bool = True) -> None:
        """Take the figures of a tensor, and in full mode a copy; `lasting` says that others may be given the same tensor."""
        local = _local(t)
        if not self._can_see(key, local):
            return
        known = self._known(local)
        row, kept = (self.table.add(local), self._kept(key, local)) if known is None else (known.row, known.kept)
        self._found(key, t, local, row, kept, lasting)

    def see_all(self, tensors: Iterable[tuple[Key, Tensor]], lasting: bool = True) -> None:
        """The same for several tensors, of which those that are new are looked at together."""
        found = [(key, given, _local(given)) for key, given in tensors]
        found = [item for item in found if self._can_see(item[0], item[2])]
        known = [self._known(t) for _, _, t in found]
        new = {_identity(t): (key, t) for (key, _, t), old in zip(found, known, strict=True) if old is None}
        rows = self.table.add_all([t for _, t in new.values()])
        made = {name: (row, self._kept(*new[name])) for name, row in zip(new, rows, strict=True)}
        for (key, given, t), old in zip(found, known, strict=True):
            row, kept = made[_identity(t)] if old is None else (old.row, old.kept)
            self._found(key, given, t, row, kept, lasting)

    def _found(self, key: Key, given: Tensor, t: Tensor, row: int, kept: Tensor | None, lasting: bool) -> None:
        self.pending.append(Pending(key, tuple(t.shape), t.stride(), _name(t.dtype), row, kept))
        if lasting and type(given) in standing.ORDINARY and not given.is_inference():
            self.seen[given.data_ptr()] = _Seen(weakref.ref(given), given._version, row, kept)

    def _see_weights(self, held: list[standing.Held]) -> None:
        """Take the figures of what a light trace reads of weights, copied together; they are nobody's else, so nothing is remembered but,
        for the next trace, which they are."""
        known = self.standing.kept.get("weights")
        if known is None or _captured(self.device):
            local = [(item.key, _local(item.tensor)) for item in held]
            found = [(key, t, _identity(t)) for key, t in local if self._can_see(key, t)]
            new = {name: t for _, t, name in found}
            rows = {name: row for row, name in enumerate(new)}
            pending = [Pending(key, tuple(t.shape), t.stride(), _name(t.dtype), rows[name], None) for key, t, name in found]
            tensors, steps = list(new.values()), [step_of(t.shape) for t in new.values()]
            if len(found) == len(held):
                firsts = {name: number for number, (_, _, name) in reversed(list(enumerate(found)))}
                self.standing.kept["weights"] = [firsts[name] for name in new], steps, pending
        else:
            places, steps, pending = known
            tensors = [held[number].tensor for number in places]
        self.table.add_all(tensors, steps=steps)  # the first of the table
        self.pending += pending

    def _can_see(self, key: Key, t: Tensor) -> bool:
        if not _seen_whole(t):
            self.note(f"{key}: a {t.layout} tensor on {t.device} is not looked into")
            return False
        if t.is_cuda and torch.cuda.is_current_stream_capturing():
            self.note(f"{key.module or 'the model'} was captured into a CUDA graph: its replays are not seen")
            return False
        return True

    def _known(self, t: Tensor) -> _Seen | None:
        """What was found of the same tensor before."""
        known = self.seen.get(t.data_ptr())
        if known is None:
            return None
        old = known.tensor()
        return known if old is not None and known.version == _version(t) and _same_view(old, t) else None

    def _kept(self, key: Key, t: Tensor) -> Tensor | None:
        """A copy, in full mode and as far as there is room."""
        if self.trace.mode != FULL:
            return None
        if self.bytes + t.nbytes > self.limit:
            self.note(f"tensors beyond {self.limit / 2**30:.3g} GiB were not kept, the first of them {key}; limit_bytes= is the limit")
            return None
        self.bytes += t.nbytes
        return t.detach().to("cpu", copy=True)

    def leaf(self, key: Key, leaf: trees.Leaf) -> None:
        """Take the figures of an argument or result; of a sum that one layer leaves to the next once."""
        if leaf.summands is None:
            value = leaf.value()
            self.see(key, value, lasting=value is leaf.carrier)
            return
        place, versions = (id(leaf.summands[0]), id(leaf.summands[1])), (_version(leaf.summands[0]), _version(leaf.summands[1]))
        known = self.sums.get(place)
        if known is not None and known.versions == versions and all(r() is t for r, t in zip(known.summands, leaf.summands, strict=True)):
            self.pending.append(known.found._replace(key=key))
            return
        before = len(self.pending)
        self.see(key, leaf.value(), lasting=False)
        if len(self.pending) > before and -1 not in versions:
            self.sums[place] = _Sum((weakref.ref(leaf.summands[0]), weakref.ref(leaf.summands[1])), versions, self.pending[-1])

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that may be one of the model's."""
        path = self.paths.get(id(module))
        if path is None or torch.jit.is_tracing():
            return _plain_call(module, *args, **kwargs)
        number, again = self.numbers.begin(path)
        if number is None:
            return _plain_call(module, *args, **kwargs)
        tensors = list(trees.arguments(args, kwargs))
        index = -1
        if not again:
            if torch.is_autocast_enabled(self.device):
                self.trace.autocast = str(torch.get_autocast_dtype(self.device)).removeprefix("torch.")
            index = len(self.trace.calls)
            if self.trace.mode == FULL:
                self.trace.arguments[f"{path}#{number}"] = recipe.arguments(args, kwargs)
            self.trace.calls.append(Call(path, number, _TAPE.open[-1] if _TAPE.open else -1, -1))
            self._see_leaves(path, number, INPUT, tensors)
            _TAPE.open.append(index)
        self._hooks(path, number, INPUT_GRADIENT, tensors)
        try:
            result = _plain_call(module, *args, **kwargs)
        finally:
            if not again:
                _TAPE.open.pop()
        results = list(trees.leaves(result))
        if not again:
            self.trace.calls[index] = self.trace.calls[index]._replace(end=self.ends)
            self.ends += 1
            self._see_leaves(path, number, FORWARD, results)
        self._hooks(path, number, OUTPUT_GRADIENT, results)
        return result

    def _operator(self, operator: str, result: Any) -> None:
        """Take the figures of what an operator returned in the call that is open; not of one that is recomputed."""
        if not _TAPE.open or in_backward():
            return
        call = self.trace.calls[_TAPE.open[-1]]
        place = f"{call.module}#{call.number}#{operator}"
        count = self.operations[place] = self.operations.get(place, 0) + 1
        for leaf in trees.leaves(result, f"{operator} {count}"):
            if leaf.carrier.numel():  # a result that was not asked for is empty
                self.see(Key(call.module, call.number, FORWARD, leaf.name), leaf.carrier, lasting=False)

    def _see_leaves(self, path: str, number: int, direction: str, tensors: Iterable[trees.Leaf]) -> None:
        for leaf in tensors:
            self.leaf(Key(path, number, direction, leaf.name), leaf)

    def _hooks(self, path: str, number: int, direction: str, tensors: Iterable[trees.Leaf]) -> None:
        """Read the gradients when they arrive.

        What a function is given that may be recomputed has two tensors: one for the first run, without a graph, which the gradients of all
        its users reach, and one for the second, which this function's reach. The first is read, if there is a second run.
        """
        graph = torch.is_grad_enabled()
        if not self.gradients or not (graph or direction == INPUT_GRADIENT):
            return
        for leaf in tensors:
            key, carrier, also = Key(path, number, direction, leaf.name), leaf.carrier, leaf.also
            if not carrier.requires_grad or key in self.outside:
                continue
            if not graph:
                self.outside.add(key)
            if also is not None and also.requires_grad:
                for part in (carrier, also):
                    part.register_hook(self._part_reader(key, graph))
            elif carrier.is_floating_point() or carrier.is_complex():
                carrier.register_hook(self._reader(key, graph))

    def _reads(self, key: Key, graph: bool) -> bool:
        """Whether a gradient that arrives is the call's: it has a graph, or had one when it was recomputed."""
        return self.active and (graph or (key.module, key.call) in self.numbers.graphs)

    def _part_reader(self, key: Key, graph: bool) -> Any:
        """One of the two gradients that a tensor and its narrow copy get."""

        def read(gradient: Tensor | None) -> None:
            if gradient is None or not self._reads(key, graph):
                return
            other = self.halves.pop(key, None)
            if other is None:
                self.halves[key] = gradient.detach()
            else:
                wide = torch.promote_types(other.dtype, gradient.dtype)
                self.see(key, other.to(wide) + gradient.detach().to(wide), lasting=False)

        return read

    def _reader(self, key: Key, graph: bool) -> Any:
        def read(gradient: Tensor | None) -> None:
            if gradient is not None and self._reads(key, graph):  # None: of a node with several results, one that nobody used outside
                self.see(key, gradient)

        return read


def _captured(device: Any) -> bool:
    return bool(torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing())


def _version(t: Tensor) -> int:
    """How often it was written to; tensors of inference mode do not count."""
    return -1 if t.is_inference() else t._version


def _identity(t: Tensor) -> tuple[Any, ...]:
    """The same for two names of one tensor."""
    return t.device, t.data_ptr(), t.shape, t.stride(), t.dtype


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same_view(old: Tensor, t: Tensor) -> bool:
    return old.shape == t.shape and old.stride() == t.stride() and old.dtype == t.dtype and old.device == t.device
