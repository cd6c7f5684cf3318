"""A plan as one straight Python function: what it was made for is compared at once, then buffers, kernels, results.

A plan that is walked (`plan.compiled`) pays for loops, and the way to it for a key of all shapes, strides and addresses, which is looked up
in a dictionary: 7 us of a call's 11. Here the same steps are written out as Python source. What tensors look like is compared in C++, by
what `torch.compile` guards its own code with, and whoever watches in the dispatcher is seen there too: 0.1 us a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ops_math import features, settings
from ops_math.backends import launch as launching
from ops_math.backends.plan import Address, Buffer, Plan, Start

_strided = torch.empty_strided
_LOW = launching.ALIGNMENT - 1


class _Source:
    """Lines of a function, and the objects that it names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}

    def add(self, line: str, **names: Any) -> None:
        """One line, and what it names."""
        self.lines.append("    " + line)
        self.names.update(names)

    def keep(self, value: Any) -> str:
        """How an object is written: plain numbers as they are, all else by a name."""
        if type(value) in (int, bool, type(None)):
            return repr(value)
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def function(self, head: str) -> Callable[..., Any]:
        """Compile it."""
        exec(compile("\n".join([head, *self.lines]), "<a plan of ops_math>", "exec"), self.names)
        found: Callable[..., Any] = self.names["made"]
        return found


def ordinary(t: torch.Tensor) -> bool:
    """Whether it is a tensor or parameter as PyTorch makes them, and nothing that a transform left behind."""
    return type(t) in (torch.Tensor, torch.nn.Parameter) and features.unwrapped(t) is t


def _compared(source: _Source, tensors: Sequence[torch.Tensor | None], rest: Sequence[Any]) -> tuple[str, list[str]] | None:
    """The head of a function of tensors and plain values, and what makes a call another one than that with these: its tensors, its values
    and their types, settings. None where this PyTorch cannot compare tensors."""
    given = [t for t in tensors if t is not None]
    check = features.tensor_check(given)
    if check is None:
        return None
    names = [f"t{n}" for n in range(len(tensors))]
    present = [name for name, t in zip(names, tensors, strict=True) if t is not None]
    differs = [f"{name} is not None" for name, t in zip(names, tensors, strict=True) if t is None]
    for number, value in enumerate(rest):
        kept, kind = source.keep(value), type(value).__name__
        differs.append(
            f"type(r{number}) is not {kind} or r{number} != {kept}" if kind in ("int", "float", "str") else f"r{number} is not {kept}"
        )
    # `check` ends the process at a nested tensor of strided layout, whose sizes it asks for before it has looked at its keys.
    differs += [f"type({name}) is not {source.keep(type(t))} or {name}.is_nested" for name, t in zip(present, given, strict=True)]
    differs += [f"not check({', '.join(present)})", "STATE.policy is not POLICY", "deterministic() is not LEVEL"]
    level = torch.are_deterministic_algorithms_enabled
    source.names.update(check=check, STATE=settings.STATE, POLICY=settings.policy(), deterministic=level, LEVEL=level())
    return f"def made({', '.join([*names, *(f'r{n}' for n in range(len(rest)))])}):", differs


def like(tensors: Sequence[torch.Tensor | None], rest: Sequence[Any], answer: Any) -> Callable[..., Any] | None:
    """A function of as many tensors and plain values that gives `answer` where a public function would go the same way with them as with
    these: enabled or not, under autocast and autograd as now. Else it gives None, as it does where nothing can be compared."""
    source = _Source()
    compared = _compared(source, tensors, rest)
    kind = next(t.device.type for t in tensors if t is not None)
    if compared is None:
        return None
    head, differs = compared
    differs += [f"STATE.enabled is not {settings.STATE.enabled}", f"recording() is not {torch.is_grad_enabled()}", "not no_tangents()"]
    cast = features.autocasts(kind)
    differs.append(f"autocasts({kind!r}) is not {cast}")
    if cast:
        differs.append(f"cast_to({kind!r}) is not {source.keep(torch.get_autocast_dtype(kind))}")
    source.names.update(
        recording=torch.is_grad_enabled,
        no_tangents=features.no_tangents,
        autocasts=torch.is_autocast_enabled,
        cast_to=torch.get_autocast_dtype,
    )
    source.add(f"if {' or '.join(differs)}:")
    source.add("    return None")
    source.add(f"return {source.keep(answer)}")
    return source.function(head)


def straight(plan: Plan, tensors: Sequence[torch.Tensor | None], rest: Sequence[Any], known: Any) -> Callable[..., Any] | None:
    """The plan as a function of the arguments that its operator is called with.

    Args:
        plan: what the call does.
        tensors: those of a call that it was made for, on the launcher's alignment, some with elements.
        rest: the values that follow them.
        known: has the call's `counter` and `num_bytes`.

    Returns: the function, or None where this PyTorch cannot compare tensors. It returns what the launcher would (an empty result, which is
    one that was not asked for, is the same tensor at each call), or None, having started nothing, where the call is another one.
    """
    source = _Source()
    compared = _compared(source, tensors, rest)
    if compared is None:
        return None
    head, differs = compared
    differs += ["products() != PRODUCTS", "strided() is not STRIDED"]
    if any(t is not None and t.requires_grad for t in tensors):
        differs.append("recording()")
    if plan.device.type == "cuda":
        differs.append(f"device() != {plan.device.index}")
    source.names.update(recording=torch.is_grad_enabled, device=features.current_device, strided=_current_strided, STRIDED=_strided)
    source.names.update(products=features.gpu_products, PRODUCTS=features.gpu_products())
    source.add(f"if {' or '.join(differs)}:")
    source.add("    return None")
    addresses = [f"a{n}" for n, t in enumerate(tensors) if t is not None and t.numel()]  # without elements, an address is 0
    for address in addresses:
        source.add(f"{address} = t{address[1:]}.data_ptr()")
    source.add(f"if ({' | '.join(addresses)}) & {_LOW} or not ({' and '.join(addresses)}):")
    source.add("    return None")
    shared = _allocations(source, plan, len(tensors), all(t is None or t.numel() for t in tensors))
    source.add("counter.calls += 1", counter=known.counter)
    source.add(f"counter.bytes += {known.num_bytes}")
    _starts(source, plan)
    _results(source, plan, shared)
    return source.function(head)


def _current_strided() -> Any:
    return torch.empty_strided


def _allocations(source: _Source, plan: Plan, first: int, share: bool) -> set[int]:
    """The buffers. Those without elements are made here, once, and told, where no result that is asked for can be one."""
    allocate = features.short_empty(plan.device.type)
    shared, addresses = set(), []
    for number, buffer in enumerate(plan.buffers):
        if share and 0 in buffer.size:
            shared.add(number)
            source.names[f"b{number}"] = _strided(buffer.size, buffer.stride, dtype=buffer.dtype, device=plan.device)
            continue
        source.add(f"b{number} = {_allocation(source, buffer, allocate, plan.device)}")
        if 0 not in buffer.size:
            addresses.append(f"a{first + number}")
            source.add(f"{addresses[-1]} = b{number}.data_ptr()")
    if addresses:
        source.add(f"if ({' | '.join(addresses)}) & {_LOW}:")
        source.add("    return None")
    return shared


def _allocation(source: _Source, buffer: Buffer, allocate: Any, device: torch.device) -> str:
    size, stride, dtype = tuple(buffer.size), tuple(buffer.stride), source.keep(buffer.dtype)
    if allocate is None:
        return f"STRIDED({size}, {stride}, dtype={dtype}, device={source.keep(device)})"
    source.names["allocate"] = allocate
    return f"allocate({size}, {stride}, {dtype})"


def _starts(source: _Source, plan: Plan) -> None:
    if plan.starts:
        source.add(f"stream = stream_of({plan.device.index})", stream_of=features.raw_stream)
    for start in plan.starts:
        arguments = [source.keep(value) for value in start.arguments]
        for place, tensor, after in start.pointers:
            arguments[place] = f"a{tensor} + {after}" if after else f"a{tensor}"
        for place, tensor, after, kind, fields, dtype in start.descriptors:
            made = f"described({source.keep(kind)}, {source.keep(fields)}, a{tensor} + {after}, {source.keep(dtype)})"
            arguments[place] = made
            source.names["described"] = _described
        _call(source, start, arguments)


def _described(kind: Any, fields: dict[str, Any], address: int, dtype: torch.dtype) -> Any:
    made = object.__new__(kind)
    vars(made).update(fields, base=Address(address, dtype))
    return made


def _call(source: _Source, start: Start, arguments: list[str]) -> None:
    """Start a kernel, past the Python part of Triton's launcher where that has nothing to do."""
    run, before, together = launching.innermost(start.kernel)
    head = [*map(str, start.grid), "stream", *(source.keep(value) for value in before)]
    tail = [f"({', '.join(arguments)},)"] if together else arguments
    source.add(f"{source.keep(run)}({', '.join([*head, *tail])})")


def _results(source: _Source, plan: Plan, shared: set[int]) -> None:
    found = []
    for result in plan.results or ():
        if result.view is None or result.buffer in shared:
            found.append(f"b{result.buffer}")
        else:
            found.append(f"own(b{result.buffer}.as_strided{(*result.view,)})")
            source.names["own"] = features.on_its_own
    source.add(f"return {found[0]}" if plan.single else f"return ({', '.join([*found, ''])})" if found else "return ()")
