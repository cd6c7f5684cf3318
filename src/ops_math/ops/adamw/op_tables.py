"""Which implementation updates which tensors, and the tables of addresses that a kernel reads: built once, kept while they are true.

A step with unchanged addresses uploads nothing. Gradients move from step to step where `zero_grad` drops them: their addresses and the
hyper-parameters are one packet, uploaded from pinned memory when an address changed; a changed learning rate alone is one fill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ops_math import backends, checks, schedule, settings
from ops_math.ops.adamw.eager import dense
from ops_math.ops.adamw.problem import TENSOR_LISTS, AdamWProblem, Group, Scaling, cost, storage
from ops_math.spec import Implementation, dtype_name
from ops_math.stats import Counter, note
from ops_math.stats import counter as counter_for

IMPLEMENTATIONS = tuple(
    Implementation("adamw", name, f"{__package__}.{name}", f"{__package__}.levels") for name in ("triton_gpu", "vendor", "eager")
)
settings.IMPLEMENTATIONS["adamw"] = tuple(i.name for i in IMPLEMENTATIONS)
_LOW = 15  # a vector access needs multiples of 16 bytes
_address, _numel, _dtype = torch.Tensor.data_ptr, torch.Tensor.numel, attrgetter("dtype")
_HYPER = 8  # columns of hyper-parameters
_MODEL = schedule.Record(())  # no measurement is looked up: calibration runs operators, and this is not one


class Part(NamedTuple):
    """Tensors of one kind and what updates them; `places` are (group, positions in it)."""

    implementation: Implementation
    config: Any
    problem: AdamWProblem
    counter: Counter
    num_bytes: int
    places: tuple[tuple[int, tuple[int, ...]], ...]

    def seen(self) -> None:
        """One more call for `om.stats()`."""
        self.counter.calls += 1
        self.counter.bytes += self.num_bytes

    def pairs(self) -> Iterator[tuple[int, int]]:
        """(group, position) of each tensor."""
        return ((g, i) for g, positions in self.places for i in positions)


class Table:
    """What the kernels read about the tensors of one device."""

    def __init__(self, device: torch.device, parts: Sequence[Part], groups: Sequence[Group]) -> None:
        self.device, self.parts = device, parts
        self.launchers = parts[0].implementation.module
        self.pairs = [pair for part in parts for pair in part.pairs()]
        self.in_order = self.pairs == [(g, i) for g, group in enumerate(groups) for i in range(len(group.params))]
        self.contiguous = all(tensor.is_contiguous() for tensor in self.tensors("params", groups))
        self.aligned = [part.problem.aligned for part in parts for _ in part.pairs()]
        rows = [_row(groups[g], g, i, number) for number, (g, i) in enumerate(self.pairs)]
        self.addresses = torch.tensor(rows, dtype=torch.int64).to(device)
        self.scalars = torch.empty(len(rows), 8, device=device)
        self.zero, self.one, self.no_key = (
            torch.zeros((), device=device),
            torch.ones((), device=device),
            torch.zeros(3, dtype=torch.int64, device=device),
        )
        self.num_hyper = _HYPER * len(groups)
        self.packet = torch.empty(self.num_hyper + len(rows), dtype=torch.int64, device=device)
        self.gradients: list[int] = []
        self.hyper: list[float] = []
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reserve: torch.Tensor | None = None
        self.chunks = []
        first = 0
        for part in parts:
            sizes = [groups[g].params[i].numel() for g, i in part.pairs()]
            self.chunks.append(_chunks(sizes, first, part.config.chunk).to(device))
            first += len(sizes)

    def tensors(self, name: str, groups: Sequence[Group]) -> list[torch.Tensor]:
        """The `params` or `grads` of the table's tensors, in its order."""
        if self.in_order:
            return list(chain.from_iterable(getattr(group, name) for group in groups))
        return [getattr(groups[g], name)[i] for g, i in self.pairs]

    def gradients_of(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        """The gradients in the table's order and in their parameters' layouts."""
        grads = self.tensors("grads", groups)
        if self.contiguous and all(map(torch.Tensor.is_contiguous, grads)):
            return grads
        return laid_like(grads, self.tensors("params", groups))

    def addresses_of(self, grads: Sequence[torch.Tensor]) -> list[int] | None:
        """Where the gradients are, or None where one has left the grid that vector accesses need."""
        found = list(map(_address, grads))
        if found != self.gradients and any(a & _LOW and aligned for a, aligned in zip(found, self.aligned, strict=True)):
            return None
        return found

    def current(self, gradients: list[int], groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient addresses [T], hyper-parameters [G, 8]) on the device, brought up to date."""
        hyper = list(chain.from_iterable(_hyper(group) for group in groups))
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        packet = self._captured(gradients, hyper) if capturing else self._uploaded(gradients, hyper)
        values = packet[: self.num_hyper].view(torch.float64)
        for number, group in enumerate(groups):
            if isinstance(group.lr, torch.Tensor) and group.lr.device.type != "cpu":
                values[_HYPER * number].copy_(group.lr.reshape(()))
        return packet[self.num_hyper :], values

    def _uploaded(self, gradients: list[int], hyper: list[float]) -> torch.Tensor:
        if gradients != self.gradients:
            self.packet.copy_(_packet(gradients, hyper, self.device), non_blocking=True)
            self.gradients, self.hyper = gradients, hyper
        elif hyper != self.hyper:
            values = self.packet[: self.num_hyper].view(torch.float64)
            for place, (old, new) in enumerate(zip(self.hyper, hyper, strict=True)):
                if old != new:
                    values[place].fill_(new)
            self.hyper = hyper
        if self.reserve is None and self.device.type == "cuda":
            self.reserve = _packet(gradients, hyper, self.device)
        return self.packet

    def _captured(self, gradients: list[int], hyper: list[float]) -> torch.Tensor:
        """A packet of the graph's own, which no later step writes; its pinned source is kept, since every replay reads it again."""
        if self.reserve is None:
            do = "Take one step outside before each capture, with the same parameters."
            checks.refuse("adamw under CUDA graph capture", "no pinned memory is left for it, and none can be made while capturing", do)
        source, packet = self.reserve, torch.empty_like(self.packet)
        source.copy_(_packet(gradients, hyper, torch.device("cpu")))
        packet.copy_(source, non_blocking=True)
        self.captured.append((source, packet))
        self.reserve = None
        return packet


def _packet(gradients: list[int], hyper: list[float], device: torch.device) -> torch.Tensor:
    """Hyper-parameters (fp64, as they lie in memory) and addresses in one int64 tensor on the host, pinned for a GPU."""
    values = torch.tensor(hyper, dtype=torch.float64).view(torch.int64)
    both = torch.cat([values, torch.tensor(gradients, dtype=torch.int64)])
    return both.pin_memory() if device.type == "cuda" else both


def _row(group: Group, number: int, i: int, count: int) -> list[int]:
    """A row of addresses, in the order of the columns in `triton_gpu.py`."""
    p = group.params[i]
    master = group.masters[i].data_ptr() if group.masters else 0
    row = [p.data_ptr(), group.exp_avgs[i].data_ptr(), group.exp_avg_sqs[i].data_ptr(), master, group.steps[i].data_ptr()]
    return [*row, p.numel(), number, group.numbers[i], *[0] * 8]


def _hyper(group: Group) -> list[float]:
    """A row of hyper-parameters, in the order of the columns in `triton_gpu.py`; a learning rate on a device is copied there instead."""
    on_device = isinstance(group.lr, torch.Tensor) and group.lr.device.type != "cpu"
    lr = 0.0 if on_device else float(group.lr)
    logs = [math.log(b) if b > 0 else -math.inf for b in (group.beta1, group.beta2)]
    return [lr, *logs, 1 - group.beta1, 1 - group.beta2, group.eps, group.weight_decay, -1.0 if group.maximize else 1.0]


def _chunks(sizes: list[int], first: int, chunk: int) -> torch.Tensor:
    """[C, 2] int32: for each chunk its tensor, counted from `first`, and its number in that tensor."""
    counts = torch.tensor([-(-n // chunk) for n in sizes], dtype=torch.int64)
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    start = (counts.cumsum(0) - counts)[tensor]
    return torch.stack([tensor + first, torch.arange(len(tensor)) - start], 1).to(torch.int32)


class Plan(NamedTuple):
    """Who updates what: a table for each device with a kernel, and the parts of other implementations."""

    tables: tuple[Table, ...]
    others: tuple[Part, ...]


class AdamWTables:
    """Keeps what `adamw` found out about a model's tensors from one step to the next. Belongs to one optimizer; starts empty."""

    def __init__(self) -> None:
        self._signature: tuple[Any, ...] = ()
        self._plan: Plan | None = None
        self._in_graphs: list[Table] = []

    def __repr__(self) -> str:
        if self._plan is None:
            return "no step taken yet"
        parts = [part for table in self._plan.tables for part in table.parts] + list(self._plan.others)
        return "; ".join(
            f"{p.problem.num_tensors} tensors, {p.problem.num_elements:,} x {p.problem.param} by {p.implementation.name}" for p in parts
        )

    def plan(self, groups: Sequence[Group], scaling: Scaling, *, anew: bool = False) -> Plan:
        """The plan for these tensors: the kept one where every address, size and dtype is what it was."""
        signature = _signature(groups, scaling)
        if self._plan is not None and not anew and signature == self._signature:
            return self._plan
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and any(g.params and g.params[0].is_cuda for g in groups):
            do = "Take one step outside the capture first, with the same parameters."
            checks.refuse("adamw under CUDA graph capture", "its tables are not made for these tensors, and cannot be while capturing", do)
        self._in_graphs += [t for t in (self._plan.tables if self._plan else ()) if t.captured]  # graphs go on reading them
        _check(groups)
        self._plan, self._signature = _build(groups, scaling), signature
        return self._plan


def _signature(groups: Sequence[Group], scaling: Scaling) -> tuple[Any, ...]:
    """All that a plan depends on but the gradients' addresses, as plain numbers. Maps of C functions: it is made at every step."""
    found: list[Any] = [settings.policy(), scaling.grad_scale is None and scaling.clip is None, scaling.key is None]
    for group in groups:
        for name in TENSOR_LISTS:
            if name != "grads":
                found.append(list(map(_address, getattr(group, name))))
        found += [list(map(f, t)) for f, t in ((_dtype, group.grads), (_dtype, group.params), (_numel, group.params))]
        found.append(group.numbers)
    return tuple(found)


def _check(groups: Sequence[Group]) -> None:
    """The lists belong together. Done when a plan is built."""
    for group in groups:
        for name, tensors in group.lists().items():
            if len(tensors) != len(group.params):
                got = f"{len(tensors)} tensors"
                checks.fail("adamw", name, f"a list of {len(group.params)} tensors, one for each of params", got, "Pass parallel lists.")
            for t, p in zip(tensors, group.params, strict=True):
                checks.floating("adamw", name, t)
                checks.same_device("adamw", "params", p, **{name: t})
                if name != "steps":
                    checks.same_shape("adamw", "params", p, name, t)
        for name in ("steps", "masters"):
            for t in getattr(group, name):
                if t.dtype != torch.float32:
                    checks.fail("adamw", name, "fp32", dtype_name(t.dtype), f"Convert it: {name}.float().")
        for m, v in zip(group.exp_avgs, group.exp_avg_sqs, strict=True):
            checks.same_dtype("adamw", "exp_avgs", m, "exp_avg_sqs", v)


def _kind(group: Group, i: int, scaling: Scaling) -> tuple[torch.device, AdamWProblem]:
    """The device of a parameter, and the problem of its kind with sizes left at 0."""
    p, g, m = group.params[i], group.grads[i], group.exp_avgs[i]
    written = [tensors[i] for name, tensors in group.lists().items() if name not in ("grads", "steps")]
    flat = all(dense(t) and t.stride() == p.stride() for t in written)
    problem = AdamWProblem(
        0, 0, dtype_name(p.dtype), dtype_name(g.dtype), dtype_name(m.dtype),
        master=bool(group.masters), stochastic=scaling.key is not None and p.dtype == torch.bfloat16, amsgrad=bool(group.max_exp_avg_sqs),
        dense=flat, aligned=all(t.data_ptr() & _LOW == 0 for t in (*written, g)),
        scaled=scaling.grad_scale is not None or scaling.clip is not None,
    )  # fmt: skip
    return p.device, problem


def _build(groups: Sequence[Group], scaling: Scaling) -> Plan:
    kinds: dict[tuple[torch.device, AdamWProblem], list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for i in range(len(group.params)):
            kinds.setdefault(_kind(group, i, scaling), []).append((number, i))
    on_tables: dict[torch.device, list[Part]] = {}
    others = []
    for (device, kind), pairs in kinds.items():
        sizes = [groups[g].params[i].numel() for g, i in pairs]
        part = _part(device, kind._replace(num_elements=sum(sizes), num_tensors=len(sizes)), pairs)
        if part.implementation.name == "triton_gpu":
            on_tables.setdefault(device, []).append(part)
        else:
            others.append(part)
    return Plan(tuple(Table(device, parts, groups) for device, parts in on_tables.items()), tuple(others))


def _part(device: torch.device, problem: AdamWProblem, pairs: list[tuple[int, int]]) -> Part:
    policy = settings.policy()._replace(determinism=settings.determinism_level())
    moved = cost(problem)
    choice = schedule.choose(IMPLEMENTATIONS, problem, moved, storage(problem), "step", backends.device_of(device), policy, _MODEL)
    counter = counter_for("adamw", "step", choice.implementation.name, choice.reason, choice.rejected, choice.fallback, str(problem))
    positions: dict[int, list[int]] = {}
    for g, i in pairs:
        positions.setdefault(g, []).append(i)
    places = tuple((g, tuple(found)) for g, found in positions.items())
    return Part(choice.implementation, choice.config, problem, counter, moved.bytes, places)


def laid_like(grads: list[torch.Tensor], params: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in their parameters' layouts: themselves, or copies, counted by `om.stats()`."""
    found = []
    for g, p in zip(grads, params, strict=True):
        alike = g.is_contiguous() if p.is_contiguous() else g.stride() == p.stride()
        if not alike:
            note("adamw", "copy", "a gradient is laid out unlike its parameter")
        found.append(g if alike else torch.empty_like(p, dtype=g.dtype).copy_(g))
    return found
