"""Lockstep: every module of A and of B alone, on A's inputs and A's output gradients, and A once more in float64.

Errors cannot add up, so the culprit stands alone; and modules that share an input have input gradients of their own here. Where most
weights have another dtype in B, the model in the wider one runs cast as the other, on inputs of that dtype: what differs then is not the
dtype's doing.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.debug import casts, names, observe, recipe, trees
from ops_nn.debug.figures import measure, unpack
from ops_nn.debug.numbers import Numbers
from ops_nn.debug.trace import FORWARD, INPUT, INPUT_GRADIENT, OUTPUT_GRADIENT, PARAMETER, PARAMETER_GRADIENT, Call, Key, Record, Trace
from ops_nn.debug.verdict import distance
from ops_nn.features import gradient_hooks

LITTLE = 0.5  # a relative error of a tensor beyond which rounding is no word for what a cast does
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError)


class _Entry:
    """One call of A: what it was given, as copies, and the gradients that arrived at its results."""

    def __init__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> None:
        self.call = call
        self.args, self.kwargs = trees.changed(args, _copy), trees.changed(kwargs, _copy)
        self.gradients: dict[str, Tensor] = {}
        self.random = _random_state()
        self.autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self.grad_mode = torch.is_grad_enabled()


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def _put_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


class _Capture:
    """Watches A's step and keeps every call."""

    def __init__(self, model: nn.Module, below: str) -> None:
        self.layout = names.layout(model)
        self.paths = {
            id(place.module): path
            for path, place in self.layout.places.items()
            if not below or path == below or path.startswith(f"{below}.")
        }
        self.entries: list[_Entry] = []
        self.numbers = Numbers()
        self.open: list[int] = []
        self.ends = 0
        self.device = next((p.device.type for p in model.parameters()), "cpu")

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, and keep what it was given."""
        path = self.paths.get(id(module))
        number, again = (None, False) if path is None else self.numbers.begin(path)
        if path is None or number is None:
            return observe.run_plainly(module, args, kwargs)
        if again:
            return self._recomputed(path, number, module, args, kwargs)
        index = len(self.entries)
        entry = _Entry(Call(path, number, self.open[-1] if self.open else -1, -1), args, kwargs, self.device)
        self.entries.append(entry)
        self.open.append(index)
        try:
            result = observe.run_plainly(module, args, kwargs)
        finally:
            self.open.pop()
        entry.call = entry.call._replace(end=self.ends)
        self.ends += 1
        _keep_gradients(entry, result)
        return result

    def _recomputed(self, path: str, number: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module again whose first run had no graph: gradients arrive now."""
        entry = next(e for e in self.entries if (e.call.module, e.call.number) == (path, number))
        if torch.is_grad_enabled():
            entry.grad_mode = True
            for own, given in zip(trees.arguments(entry.args, entry.kwargs), trees.arguments(args, kwargs), strict=True):
                own.carrier.requires_grad_(given.carrier.requires_grad)
        result = observe.run_plainly(module, args, kwargs)
        _keep_gradients(entry, result)
        return result


def _keep_gradients(entry: _Entry, result: Any) -> None:
    for leaf in trees.leaves(result):
        for part in (leaf.carrier, leaf.also):
            if part is not None and part.requires_grad:
                part.register_hook(_keeper(entry, leaf.name))


def _keeper(entry: _Entry, name: str) -> Any:
    def keep(gradient: Tensor | None) -> None:
        if gradient is None:  # of a node with several results, one that nobody used
            return
        own, other = gradient.detach().clone(), entry.gradients.get(name)
        entry.gradients[name] = own if other is None else other + own

    return keep


class _Alone(NamedTuple):
    """What a module made of an entry."""

    results: dict[str, Tensor]
    input_gradients: dict[str, Tensor]
    parameter_gradients: dict[str, Tensor]
    drew: bool


def _run_alone(module: nn.Module, entry: _Entry, change: Callable[[Tensor], Tensor] = _copy, autocast: bool = True) -> _Alone:
    """Run one module on copies of what A's was given; its buffers, gradients and the generators are as before afterwards."""
    buffers = [(b, b.clone()) for b in module.buffers()]
    before = _random_state()
    _put_random_state(entry.random)
    try:
        leaves, named = trees.changed(entry.args, change), trees.changed(entry.kwargs, change)
        # Modules may write to what they are given, which autograd forbids for leaves.
        args, kwargs = trees.changed(leaves, torch.clone), trees.changed(named, torch.clone)
        device, enabled, dtype = entry.autocast
        with torch.set_grad_enabled(entry.grad_mode), torch.autocast(device, dtype, enabled=enabled and autocast):
            found = module(*args, **kwargs)
        results = {leaf.name: (leaf.carrier, leaf.value()) for leaf in trees.leaves(found)}
        drew = not torch.equal(_random_state()[0], entry.random[0]) or any(
            not torch.equal(x, y) for x, y in zip(_random_state()[1], entry.random[1], strict=True)
        )
        inputs = {leaf.name: leaf.carrier for leaf in trees.arguments(leaves, named) if leaf.carrier.requires_grad}
        parameters = {name: p for name, p in names.parameters(module).items() if p.requires_grad}
        pairs = [(results[n][0], g) for n, g in entry.gradients.items() if n in results and results[n][0].requires_grad]
        sources = [*inputs.values(), *parameters.values()]
        grads: tuple[Any, ...] = (None,) * len(sources)
        pairs = _independent(pairs)
        if pairs and sources:
            ys = [y for y, _ in pairs]
            grads = _gradients(ys, sources, [dy.to(y.dtype) for y, dy in pairs])
    finally:
        _put_random_state(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    kept = [
        {n: g for n, g in zip(group, part, strict=True) if g is not None}
        for group, part in ((inputs, grads[: len(inputs)]), (parameters, grads[len(inputs) :]))
    ]
    return _Alone({n: value.detach() for n, (_, value) in results.items()}, kept[0], kept[1], drew)


def _gradients(ys: list[Tensor], sources: list[Tensor], dys: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of the sources, whose own `.grad` stay as they were.

    Where `checkpoint(use_reentrant=True)` is in the graph, gradients can be had in `.grad` alone; hooks that act on those wait.
    """
    if not _reentrant(ys):
        return torch.autograd.grad(ys, sources, dys, allow_unused=True)
    with _grads_apart(sources):
        torch.autograd.backward(ys, dys)
        return tuple(t.grad for t in sources)


@contextmanager
def _grads_apart(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A backward in there fills `.grad` of its own, and what users do when a gradient is there, as a step of an optimizer, waits."""
    before = [(t, t.grad, hooks, dict(hooks)) for t in tensors for hooks in (gradient_hooks(t),)]
    try:
        for t, _, hooks, _ in before:
            t.grad = None
            hooks.clear()
        yield
    finally:
        for t, grad, hooks, kept in before:
            t.grad = grad
            hooks.update(kept)


def _reentrant(ys: list[Tensor]) -> bool:
    """Whether a function that is recomputed with a backward of its own is in the graph."""
    waiting, seen = [y.grad_fn for y in ys], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def _independent(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Without results that another result is made of, as logits are of the loss: their gradient holds what comes through the other."""
    if len(pairs) < 2:
        return pairs
    kept = []
    for y, dy in pairs:
        others = [(z, dz) for z, dz in pairs if z is not y]
        through = [torch.autograd.grad(z, y, dz.to(z.dtype), retain_graph=True, allow_unused=True)[0] for z, dz in others]
        if all(g is None for g in through):
            kept.append((y, dy))
    return kept


def _double(t: Tensor) -> Tensor:
    return (t.detach().double() if t.is_floating_point() else t.detach().clone()).requires_grad_(t.requires_grad)


class Lockstep(NamedTuple):
    """Two traces of modules that ran alone; the noise floor by key, the smaller of both errors against float64; what B refused; and the
    dtypes of both models where they are two."""

    a: Trace
    b: Trace
    floors: dict[Key, float]
    refusals: list[str]
    dtypes: tuple[str, str] | None


class _Writer:
    """Fills the two traces."""

    def __init__(self, model_a: nn.Module, model_b: nn.Module) -> None:
        self.traces = Trace(observe.FULL, names.class_name(model_a)), Trace(observe.FULL, names.class_name(model_b))
        self.floors: dict[Key, float] = {}
        self.refusals: list[str] = []
        self.order = 0
        for trace, model in zip(self.traces, (model_a, model_b), strict=True):
            found = names.layout(model)
            trace.ties = names.ties(found)
            for path, place in found.places.items():
                trace.modules[path] = {
                    "facts": names.facts(place.module),
                    "aliases": list(place.aliases),
                    "recipe": recipe.describe(names.unwrapped(place.module)),
                }
            for (path, name), value in names.tensors_of(found).items():
                self.put(trace, Key(path, 0, PARAMETER, name), value)

    def put(self, trace: Trace, key: Key, t: Tensor) -> None:
        """One tensor."""
        t = t.detach()
        dtype = str(t.dtype).removeprefix("torch.")
        figures = unpack(measure(t), t.numel())
        trace.records[key] = Record(figures, tuple(t.shape), tuple(t.stride()), dtype, self.order, t.cpu())
        self.order += 1

    def pair(self, call: Call, direction: str, own: dict[str, Tensor], other: dict[str, Tensor], exact: dict[str, Tensor] | None) -> None:
        """The results of a call in both models, and the floor."""
        for name in dict.fromkeys((*own, *other)):
            key = Key(call.module, call.number, direction, name)
            for trace, found in zip(self.traces, (own, other), strict=True):
                if name in found:
                    self.put(trace, key, found[name])
            if (
                exact is not None
                and name in exact
                and name in own
                and name in other
                and own[name].shape == other[name].shape == exact[name].shape
            ):
                errors = [distance(exact[name].cpu(), side[name].cpu())[0] for side in (own, other)]
                self.floors[key] = min(errors)


def lockstep(model_a: nn.Module, model_b: nn.Module, step: Callable[[nn.Module], Tensor], below: str) -> Lockstep:
    """Run A's step, then every module of both alone.

    Args:
        model_a, model_b: models whose modules have the same names; neither is changed.
        step: makes a scalar loss of a model.
        below: only this module and those inside it; empty for all.
    """
    capture = _Capture(model_a, below)
    observe.install(capture)
    try:
        loss = step(model_a)
        if loss.requires_grad:
            with _grads_apart(model_a.parameters()):
                loss.backward()
    finally:
        observe.remove()
    apart = casts.apart(model_a, model_b)
    run_a, run_b = model_a, model_b
    if apart is not None and casts.wide_is_b(apart):
        run_b = casts.as_other(model_b, model_a)
    elif apart is not None:
        run_a = casts.as_other(model_a, model_b)
    writer = _Writer(run_a, run_b)
    runs, others = ([names.layout(model).places for model in pair] for pair in ((run_a, run_b), (model_a, model_b)))
    for entry in capture.entries:
        if entry.autocast[1]:
            for trace in writer.traces:
                trace.autocast = str(entry.autocast[2]).removeprefix("torch.")
        for trace in writer.traces:
            trace.calls.append(entry.call)
            trace.arguments[f"{entry.call.module}#{entry.call.number}"] = recipe.arguments(entry.args, entry.kwargs)
        path = entry.call.module
        if path in others[1]:
            plain = others[0][path].module, others[1][path].module
            how = {} if apart is None else casts.between(*plain) or dict([apart])
            _one(writer, entry, _Modules(*plain, runs[0][path].module, runs[1][path].module, how))
    if not capture.entries:
        where = f"{below} of " if below else ""
        raise om.ArgumentError(
            f"lockstep: batch must be a step that calls {where}model_a; got one that calls none of its modules. Call the model in it."
        )
    return Lockstep(*writer.traces, writer.floors, writer.refusals, apart and casts.shown(apart))


class _Modules(NamedTuple):
    """One module of A and of B as they are, and as they run, where one is cast as the other; and which dtypes of A are others in B."""

    plain_a: nn.Module
    plain_b: nn.Module
    a: nn.Module
    b: nn.Module
    how: casts.Cast

    @property
    def given(self) -> Callable[[Tensor], Tensor]:
        """Makes what both are given of what A was given."""
        return functools.partial(casts.cast, how=self.how) if self.a is not self.plain_a else _copy


def _one(writer: _Writer, entry: _Entry, modules: _Modules) -> None:
    call = entry.call
    where = call.module or "the model"
    own = _run_alone(modules.a, entry, modules.given)
    try:
        other = _run_alone(modules.b, entry, modules.given)
        if modules.a is not modules.plain_a:
            _look_at_cast(writer, where, _run_alone(modules.plain_a, entry), own)
        elif modules.b is not modules.plain_b:
            _look_at_cast(writer, where, _run_alone(modules.plain_b, entry, functools.partial(casts.cast, how=modules.how)), other)
    except REFUSALS as error:
        writer.refusals.append(f"{where}: B refuses A's inputs: {str(error).splitlines()[0]}")
        return
    exact = None
    if not own.drew:
        try:
            exact = _run_alone(copy.deepcopy(names.unwrapped(modules.plain_a)).double(), entry, _double, autocast=False)
        except REFUSALS as error:
            writer.traces[0].notes.append(f"{where}: no float64 replay: {str(error).splitlines()[0]}")
    given = {leaf.name: modules.given(leaf.value()) for leaf in trees.arguments(entry.args, entry.kwargs)}
    writer.pair(call, INPUT, given, given, None)
    writer.pair(call, FORWARD, own.results, other.results, exact and exact.results)
    writer.pair(call, OUTPUT_GRADIENT, entry.gradients, entry.gradients, None)
    writer.pair(call, INPUT_GRADIENT, own.input_gradients, other.input_gradients, exact and exact.input_gradients)
    writer.pair(call, PARAMETER_GRADIENT, own.parameter_gradients, other.parameter_gradients, exact and exact.parameter_gradients)


def _look_at_cast(writer: _Writer, where: str, plain: _Alone, cast: _Alone) -> None:
    """Say what the dtype alone does that is no rounding: numbers beyond its range, and tensors of which it leaves little."""
    for what, before, after in (
        (FORWARD, plain.results, cast.results),
        (INPUT_GRADIENT, plain.input_gradients, cast.input_gradients),
        (PARAMETER_GRADIENT, plain.parameter_gradients, cast.parameter_gradients),
    ):
        for name in before.keys() & after.keys():
            moved = distance(before[name].cpu(), after[name].cpu())[0]
            named = f"{where}: {what} {name}".rstrip()
            if math.isinf(moved):
                wide, narrow = (str(found[name].dtype).removeprefix("torch.") for found in (before, after))
                writer.refusals.append(f"{named}: beyond the range of {narrow}, and finite in {wide}")
            elif moved > LITTLE:
                writer.traces[0].notes.append(f"{named}: the cast alone changes it by {moved:.2g}")
