"""What a launcher did, written down once, so that a repeated call does it again without the launcher.

A launcher's host code (views, strides, sizes, the key of each launch) takes 10 to 20 us a call, and depends on shapes, strides,
dtypes and alignments alone. `record` runs it once under a dispatch mode that sees every function of PyTorch it calls. If these are
allocations and views and nothing else, and each kernel is one that can be started directly, the call is written down as a `Plan`:
buffers to allocate, kernels to start with an address for each pointer, and which buffers are the results. Else there is no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops_math import features
from ops_math.backends import launch as launching

_ALLOCATIONS = frozenset(("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"))
Tensors = Sequence[torch.Tensor | None]


class Buffer(NamedTuple):
    """A tensor to allocate."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Descriptor(NamedTuple):
    """A tensor descriptor among the arguments of a kernel, without its tensor."""

    place: int
    tensor: int
    after: int
    kind: type
    fields: dict[str, Any]
    dtype: torch.dtype


class Start(NamedTuple):
    """A kernel to start: what `launch` keeps of it, its grid, its arguments, and (place, tensor, bytes after its address) of each pointer.

    Tensors are counted over the launcher's and, after them, the buffers.
    """

    kernel: launching.Kept
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    descriptors: tuple[Descriptor, ...]


class Address:
    """Stands for a tensor where only its address is asked for."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """As of a tensor."""
        return self.address


class Result(NamedTuple):
    """A result: a buffer, and the view of it where it is not the whole."""

    buffer: int
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None


class Plan(NamedTuple):
    """A launcher's call. `single` says that it returned a tensor, not a tuple; None results where it returned nothing."""

    device: torch.device
    buffers: tuple[Buffer, ...]
    starts: tuple[Start, ...]
    results: tuple[Result, ...] | None
    single: bool


class _NotPlannedError(Exception):
    """The launcher does something that a plan cannot say."""


class _Watch(TorchDispatchMode):
    """Sees what a launcher calls: which tensors it allocates, and whether it does anything else than that and look at them."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.given = [t for t in tensors if t is not None]
        self.made: list[torch.Tensor] = []
        self.storages = {_storage(t) for t in self.given}
        self.alone = len(self.storages) == len(self.given)
        self.why = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = list(out) if isinstance(out, tuple | list) else [out]
        if func._schema.name == "aten::promote_types":  # of dtypes
            return out
        if func._schema.name in _ALLOCATIONS:
            self.made.append(out)
            self.storages.add(_storage(out))
        elif func._schema.is_mutable or not all(isinstance(t, torch.Tensor) and _storage(t) in self.storages for t in found):
            self.why = func._schema.name
        elif not self.alone and any(t.numel() and t.data_ptr() != args[0].data_ptr() for t in found):
            self.why = "a view that moves, where inputs share memory"  # its address could be another input's
        return out


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _find(t: torch.Tensor, watch: _Watch, first_made: int, tensors: Tensors) -> tuple[int, int]:
    """The number of the tensor or buffer that `t` is a view of, and how many bytes after its address `t` begins."""
    storage, address = _storage(t), t.data_ptr()
    for number, made in enumerate(watch.made):
        if _storage(made) == storage:
            return first_made + number, address - made.data_ptr()
    same = [(number, address - g.data_ptr()) for number, g in enumerate(tensors) if g is not None and _storage(g) == storage]
    exact = same if len(same) == 1 else [found for found in same if found[1] == 0]
    if len(exact) != 1:
        raise _NotPlannedError("a pointer whose tensor is not known")
    return exact[0]


def _start_of(kept: launching.Kept | None, grid: tuple[int, ...], args: tuple[Any, ...], watch: _Watch, tensors: Tensors) -> Start:
    if kept is None:
        raise _NotPlannedError("a kernel that Triton starts itself")
    places = [place for place, a in enumerate(args) if isinstance(a, torch.Tensor) and a.numel()]  # one without elements has address 0
    pointers = tuple((place, *_find(args[place], watch, len(tensors), tensors)) for place in places)
    described = tuple(_descriptor_of(place, a, watch, tensors) for place, a in enumerate(args) if hasattr(a, "block_shape"))
    arguments = tuple(0 if isinstance(a, torch.Tensor) or hasattr(a, "block_shape") else a for a in args) + kept.tail
    x, y, z = (*grid, 1, 1)[:3]
    return Start(kept, (x, y, z), arguments, pointers, described)


def _descriptor_of(place: int, a: Any, watch: _Watch, tensors: Tensors) -> Descriptor:
    fields = {name: value for name, value in vars(a).items() if name != "base"}
    return Descriptor(place, *_find(a.base, watch, len(tensors), tensors), type(a), fields, a.base.dtype)


def _result_of(t: Any, watch: _Watch) -> Result:
    if isinstance(t, torch.Tensor):
        for number, made in enumerate(watch.made):
            if _storage(made) == _storage(t):
                whole = t.shape == made.shape and t.stride() == made.stride() and t.dtype == made.dtype
                if t.dtype == made.dtype:
                    place = int(t.storage_offset()) - int(made.storage_offset())
                    return Result(number, None if whole and place == 0 else (tuple(t.shape), t.stride(), place))
    raise _NotPlannedError("a result that is no buffer of its own")


def _written_down(watch: _Watch, starts: Sequence[Any], out: Any, tensors: Tensors) -> Plan:
    """The plan of a call that was watched."""
    if watch.why:
        raise _NotPlannedError(watch.why)
    if any(made.data_ptr() & (launching.ALIGNMENT - 1) for made in watch.made):
        raise _NotPlannedError("a buffer off the allocator's usual alignment")
    single = isinstance(out, torch.Tensor)
    results = None if out is None else tuple(_result_of(t, watch) for t in ((out,) if single else out))
    device = watch.given[0].device
    if any(t.device != device for t in (*watch.given, *watch.made)):
        raise _NotPlannedError("tensors of several devices")
    buffers = [Buffer(tuple(made.shape), made.stride(), made.dtype) for made in watch.made]
    results = None if results is None else _shaped(buffers, results)
    return Plan(device, tuple(buffers), tuple(_start_of(kept, grid, args, watch, tensors) for kept, grid, args in starts), results, single)


def _shaped(buffers: list[Buffer], results: tuple[Result, ...]) -> tuple[Result, ...]:
    """The results; a buffer that is a result in another shape is allocated in that shape, since kernels see addresses alone."""
    shaped = []
    for result in results:
        buffer, alone = buffers[result.buffer], sum(r.buffer == result.buffer for r in results) == 1
        if result.view is not None and alone:
            size, stride, place = result.view
            if place == 0 and _span(size, stride) == _span(buffer.size, buffer.stride):
                buffers[result.buffer] = Buffer(size, stride, buffer.dtype)
                result = Result(result.buffer, None)
        shaped.append(result)
    return tuple(shaped)


def _span(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of memory a tensor takes."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def on_their_own(out: Any) -> Any:
    """What a launcher returned, with no tensor a view of another."""
    if out is None:
        return None
    return features.on_its_own(out) if isinstance(out, torch.Tensor) else tuple([features.on_its_own(t) for t in out])


def distinct(tensors: Tensors) -> bool:
    """Whether each tensor can be told from the others by its address."""
    addresses = [t.data_ptr() for t in tensors if t is not None and t.numel()]
    return len(set(addresses)) == len(addresses)


def record(call: Callable[[], Any], tensors: Tensors) -> tuple[Any, Plan | None, str]:
    """Run a launcher, and write down what it did.

    Args:
        call: the launcher with its arguments.
        tensors: those among its arguments, in order.

    Returns: what it returned; the plan, or None; and why there is none. Ask `distinct` first.
    """
    with launching.taped() as starts, _Watch(tensors) as watch:
        out = call()
    try:
        return out, _written_down(watch, starts, out, tensors), ""
    except _NotPlannedError as error:
        return out, None, str(error)


def compiled(plan: Plan) -> Callable[[list[Any]], Any]:
    """The plan as a function of the addresses of its tensors (None for one that is not there), in order.

    It returns what the launcher would, or None, having started nothing, where a buffer came off the usual alignment.
    """
    device, index = plan.device, plan.device.index
    buffers, results, single = plan.buffers, plan.results, plan.single
    starts = [
        (s.kernel.run, *s.grid, s.kernel.function, s.kernel.metadata, list(s.arguments), s.pointers, s.descriptors) for s in plan.starts
    ]
    whole = results is not None and all(r.view is None for r in results)
    order = tuple(r.buffer for r in results or ())
    stream_of, low = features.raw_stream, launching.ALIGNMENT - 1

    def play(addresses: list[Any]) -> Any:
        made, odd = [], 0
        allocate = torch.empty_strided  # looked up here, since tests replace it by one that fills with NaN
        for size, stride, dtype in buffers:
            buffer = allocate(size, stride, dtype=dtype, device=device)
            address = buffer.data_ptr()
            odd |= address
            addresses.append(address)
            made.append(buffer)
        if odd & low:
            return None
        stream = stream_of(index)
        for run, x, y, z, function, metadata, arguments, pointers, descriptors in starts:
            filled = arguments.copy()
            for place, tensor, after in pointers:
                filled[place] = addresses[tensor] + after
            for place, tensor, after, kind, fields, dtype in descriptors:
                made_up: Any = object.__new__(kind)
                filled[place] = made_up
                vars(made_up).update(fields, base=Address(addresses[tensor] + after, dtype))
            run(x, y, z, stream, function, metadata, None, None, None, *filled)
        if whole:
            return made[order[0]] if single else tuple([made[number] for number in order])
        return _views(made, results, single)

    return play


def _views(made: list[torch.Tensor], results: tuple[Result, ...] | None, single: bool) -> Any:
    """The results where some are parts of buffers, or an empty tuple where there are none."""
    found = [made[r.buffer] if r.view is None else features.on_its_own(made[r.buffer].as_strided(*r.view)) for r in results or ()]
    return found[0] if single else tuple(found)
