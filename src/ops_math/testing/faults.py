"""Generic faults to plant in an implementation: a budget that lets one live is no budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ops_math.dispatch import Operator

Launcher = Callable[..., Any]


class Fault(NamedTuple):
    """A fault: `wrap(launcher)` gives a launcher with it; it is planted in `phase`.

    `shows_in` lists the dtypes in which it can be seen at all; the rest drown it in rounding that the policy allows.
    """

    name: str
    phase: str
    wrap: Callable[[Launcher], Launcher]
    shows_in: tuple[str, ...] = ("fp32", "bf16", "fp16")


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def on_output(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Launcher], Launcher]:
    """Change one result after the launch."""

    def wrap(launcher: Launcher) -> Launcher:
        def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
            values = list(_tuple(launcher(problem, config, *tensors)))
            if index < len(values) and values[index] is not None and values[index].numel():
                values[index] = change(values[index])
            return tuple(values) if len(values) > 1 else values[0]

        return faulty

    return wrap


def on_inputs(change: Callable[[list[Any]], list[Any]]) -> Callable[[Launcher], Launcher]:
    """Change the tensors before the launch."""

    def wrap(launcher: Launcher) -> Launcher:
        return lambda problem, config, *tensors: launcher(problem, config, *change(list(tensors)))

    return wrap


def on_problem(field: str, change: Callable[[Any], Any]) -> Callable[[Launcher], Launcher]:
    """Change one field of the problem before the launch, where it has that field."""

    def wrap(launcher: Launcher) -> Launcher:
        def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
            if hasattr(problem, field):
                problem = problem._replace(**{field: change(getattr(problem, field))})
            return launcher(problem, config, *tensors)

        return faulty

    return wrap


def _zero_last(dim: int, count: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        if t.dim() <= abs(dim) - (dim < 0):
            return t
        t = t.clone()
        t.narrow(dim, t.shape[dim] - min(count, t.shape[dim]), min(count, t.shape[dim])).zero_()
        return t

    return change


def _shift_rows(t: torch.Tensor) -> torch.Tensor:
    return torch.roll(t.reshape(-1, t.shape[-1]), 1, 0).reshape(t.shape).clone() if t.dim() else t


def _shift_columns(t: torch.Tensor) -> torch.Tensor:
    return torch.roll(t, 1, -1).clone() if t.dim() else t


def _poison(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.view(-1)[-1] = float("nan")
    return t


def _first_gradient_for_all(tensors: list[Any]) -> list[Any]:
    dy = tensors[0]
    if dy.dim() == 0 or dy.shape[0] == 0:
        return tensors
    return [dy[:1].expand_as(dy).contiguous(), *tensors[1:]]


def _last_row_dropped(tensors: list[Any]) -> list[Any]:
    return [_zero_last(0)(tensors[0]), *tensors[1:]] if tensors[0].dim() else tensors


def _narrow_inputs(tensors: list[Any]) -> list[Any]:
    return [t.to(torch.bfloat16).to(t.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]


def _swap_first_two(launcher: Launcher) -> Launcher:
    def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
        values = list(_tuple(launcher(problem, config, *tensors)))
        if len(values) > 1 and values[0].shape == values[1].shape:
            values[0], values[1] = values[1], values[0]
        return tuple(values) if len(values) > 1 else values[0]

    return faulty


def _stale(launcher: Launcher) -> Launcher:
    kept: dict[Any, Any] = {}

    def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
        fresh = launcher(problem, config, *tensors)
        return kept.setdefault(problem, fresh)

    return faulty


def _block(t: torch.Tensor) -> tuple[slice, int]:
    """A block of rows (all dimensions but the last, flattened) in the middle, and how many rows there are."""
    rows = t.numel() // t.shape[-1] if t.dim() and t.numel() else 0
    return slice(rows // 2, rows // 2 + max(1, rows // 8)), rows


def _rows_changed(change: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Change rows [rows, N] in place, in a copy; what has no rows stays as it is."""

    def changed(t: torch.Tensor) -> torch.Tensor:
        if t.dim() < 2 or not t.numel():
            return t
        t_MN = t.reshape(-1, t.shape[-1]).clone()
        change(t_MN)
        return t_MN.view(t.shape)

    return changed


def _zero_block(t_MN: torch.Tensor) -> None:
    t_MN[_block(t_MN)[0]] = 0


def _last_tile_dropped(t_MN: torch.Tensor) -> None:
    t_MN[len(t_MN) - (len(t_MN) % 16 or 16) :] = 0


def _last_columns_dropped(t_MN: torch.Tensor) -> None:
    cols = t_MN.shape[1]
    t_MN[:, cols - (cols % 16 or 1) :] = 0


def _last_row_unmasked(t_MN: torch.Tensor) -> None:
    t_MN[-1] += t_MN[0] if len(t_MN) > 1 else 1


def _last_column_unmasked(t_MN: torch.Tensor) -> None:
    t_MN[:, -1] += t_MN[:, 0] if t_MN.shape[1] > 1 else 1


def _lanes_swapped(t_MN: torch.Tensor) -> None:
    even = t_MN.shape[1] // 2 * 2
    t_MN[:, :even] = t_MN[:, :even].unflatten(1, (-1, 2)).flip(2).flatten(1)


def _one_row_scaled(t_MN: torch.Tensor) -> None:
    t_MN[int(t_MN.square().sum(1).argmax())] *= 1.01


def _one_column_scaled(t_MN: torch.Tensor) -> None:
    t_MN[:, int(t_MN.square().sum(0).argmax())] *= 1.01


def _truncated(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounded towards zero: what a cast by dropping bits does."""

    def change(t: torch.Tensor) -> torch.Tensor:
        if t.dtype != dtype:
            return t
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        bits = t.clone().view(integer)
        return torch.where(bits & 1 == 1, bits - 1, bits).view(dtype)  # nearest even, made one unit smaller where it is odd

    return change


def _minuend_rounded(t: torch.Tensor) -> torch.Tensor:
    """What is left when one of two terms of the size of the largest result was rounded to the storage dtype before they met."""
    if not t.is_floating_point() or not t.numel():
        return t
    offset = t.abs().max().float() * 2
    return ((t.float() + offset).to(torch.bfloat16 if t.dtype == torch.float32 else t.dtype).float() - offset).to(t.dtype)


def _flags_ignored(tensors: list[Any]) -> list[Any]:
    return [torch.ones_like(t) if isinstance(t, torch.Tensor) and t.dtype == torch.bool else t for t in tensors]


def _indices_ignored(tensors: list[Any]) -> list[Any]:
    integers = (torch.int64, torch.int32)
    return [torch.zeros_like(t) if isinstance(t, torch.Tensor) and t.dtype in integers and t.dim() else t for t in tensors]


def _vectors_ignored(tensors: list[Any]) -> list[Any]:
    return [torch.ones_like(t) if i and _is_vector(t) else t for i, t in enumerate(tensors)]


def _is_vector(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() == 1


def _tables_narrowed(tensors: list[Any]) -> list[Any]:
    """Tensors wider than the narrowest, but the largest of all: weights, biases and tables in fp32 beside 16-bit numbers."""
    floating = [t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]
    narrow = min((t.dtype for t in floating), key=lambda d: d.itemsize, default=torch.float32)
    largest = max((t.numel() for t in floating), default=0)

    def one(t: Any) -> Any:
        wide = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype.itemsize > narrow.itemsize
        return t.to(narrow).to(t.dtype) if wide and t.numel() < largest else t

    return [one(t) for t in tensors]


def _incoming(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Launcher], Launcher]:
    """Change the first output gradient before the launch."""
    return on_inputs(lambda tensors: [change(tensors[0]), *tensors[1:]])


def _read_across(t: torch.Tensor) -> torch.Tensor:
    """Read as if its strides were those of a transposed tensor."""
    return t.transpose(0, -1).contiguous().view(t.shape) if t.dim() > 1 else t


def _masked_incoming(tensors: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    """The first output gradient with all but a run of its elements, which is a block of rows, set to zero."""
    dy = torch.zeros_like(tensors[0], memory_format=torch.contiguous_format)
    dy.view(-1)[part] = tensors[0].reshape(-1)[part]
    return dy, *tensors[1:]


def _of_partial_sums(join: Callable[[list[torch.Tensor]], torch.Tensor], count: int = 8) -> Callable[[Launcher], Launcher]:
    """Gradients after the first, which sum over rows: their sums over `count` blocks of rows are made apart, and joined by `join`."""

    def wrap(launcher: Launcher) -> Launcher:
        def faulty(problem: Any, config: Any, *tensors: Any) -> Any:
            whole = launcher(problem, config, *tensors)
            values, dy = list(_tuple(whole)), tensors[0]
            if dy.numel() < count or len(values) < 2:
                return whole
            step = -(-dy.numel() // count)
            blocks = [slice(at, at + step) for at in range(0, dy.numel(), step)]
            parts = [_tuple(launcher(problem, config, *_masked_incoming(tensors, block))) for block in blocks]
            for i in range(1, len(values)):
                if values[i] is not None and values[i].numel() and values[i].is_floating_point():
                    values[i] = join([part[i] for part in parts]).to(values[i].dtype)
            return tuple(values)

        return faulty

    return wrap


def _summed_narrow(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(torch.bfloat16)
    for part in parts[1:]:
        total = total + part.to(torch.bfloat16)
    return total


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.float() if part.dtype != torch.float64 else part for part in parts]).sum(0)


FAULTS: tuple[Fault, ...] = (
    Fault("result scaled by 1.01", "fwd", on_output(0, lambda t: t * 1.01)),
    Fault("last row of the result not written", "fwd", on_output(0, _zero_last(0))),
    Fault("last column of the result not written", "fwd", on_output(0, _zero_last(-1))),
    Fault("rows of the result shifted by one", "fwd", on_output(0, _shift_rows)),
    Fault("columns of the result shifted by one", "fwd", on_output(0, _shift_columns)),
    Fault("last element of the result is NaN", "fwd", on_output(0, _poison)),
    Fault("result of the call before", "fwd", _stale),
    Fault("inputs rounded to bf16", "fwd", on_inputs(_narrow_inputs), ("fp32",)),
    Fault("eps ten times too large", "fwd", on_problem("eps", lambda v: v * 10)),
    *(Fault(f"gradient {i} scaled by 1.01", "bwd", on_output(i, lambda t: t * 1.01)) for i in range(4)),
    *(Fault(f"gradient {i} of opposite sign", "bwd", on_output(i, torch.neg)) for i in range(2)),
    *(Fault(f"last row of gradient {i} not written", "bwd", on_output(i, _zero_last(0))) for i in range(2)),
    *(Fault(f"last column of gradient {i} not written", "bwd", on_output(i, _zero_last(-1))) for i in range(2)),
    *(Fault(f"gradient {i} is zero", "bwd", on_output(i, torch.zeros_like)) for i in range(4)),
    Fault("rows of gradient 0 shifted by one", "bwd", on_output(0, _shift_rows)),
    Fault("gradient of the call before", "bwd", _stale),
    Fault("first output gradient used for every row", "bwd", on_inputs(_first_gradient_for_all)),
    Fault("last row left out of the backward", "bwd", on_inputs(_last_row_dropped)),
    Fault("first two gradients swapped", "bwd", _swap_first_two),
    Fault("saved tensors rounded to bf16", "bwd", on_inputs(_narrow_inputs), ("fp32",)),
    Fault("result scaled by 1.003", "fwd", on_output(0, lambda t: t * 1.003)),
    Fault("result of opposite sign", "fwd", on_output(0, torch.neg)),
    Fault("result added to what was in its buffer", "fwd", on_output(0, lambda t: t + t)),
    Fault("one block of rows of the result not written", "fwd", on_output(0, _rows_changed(_zero_block))),
    Fault("last partial tile of rows not written", "fwd", on_output(0, _rows_changed(_last_tile_dropped))),
    Fault("last partial tile of columns not written", "fwd", on_output(0, _rows_changed(_last_columns_dropped))),
    Fault("last row of the result unmasked", "fwd", on_output(0, _rows_changed(_last_row_unmasked))),
    Fault("last column of the result unmasked", "fwd", on_output(0, _rows_changed(_last_column_unmasked))),
    Fault("neighbouring lanes of the result swapped", "fwd", on_output(0, _rows_changed(_lanes_swapped))),
    Fault("first row of the result in every row", "fwd", on_output(0, lambda t: t[:1].expand_as(t).contiguous() if t.dim() > 1 else t)),
    Fault("one row of the result off by 1 %", "fwd", on_output(0, _rows_changed(_one_row_scaled))),
    Fault("one column of the result off by 1 %", "fwd", on_output(0, _rows_changed(_one_column_scaled))),
    Fault("result truncated to bf16", "fwd", on_output(0, _truncated(torch.bfloat16)), ("bf16",)),
    Fault("result truncated to fp16", "fwd", on_output(0, _truncated(torch.float16)), ("fp16",)),
    Fault("result rounded before a subtraction", "fwd", on_output(0, _minuend_rounded)),
    Fault("masks ignored", "fwd", on_inputs(_flags_ignored)),
    Fault("indices ignored", "fwd", on_inputs(_indices_ignored)),
    Fault("weights of one dimension ignored", "fwd", on_inputs(_vectors_ignored)),
    Fault("wide weights and tables narrowed", "fwd", on_inputs(_tables_narrowed), ("bf16", "fp16")),
    Fault("wide weights and tables narrowed in the backward", "bwd", on_inputs(_tables_narrowed), ("bf16", "fp16")),
    *(Fault(f"gradient {i} scaled by 1.003", "bwd", on_output(i, lambda t: t * 1.003)) for i in range(2)),
    *(Fault(f"one row of gradient {i} off by 1 %", "bwd", on_output(i, _rows_changed(_one_row_scaled))) for i in range(3)),
    *(Fault(f"one column of gradient {i} off by 1 %", "bwd", on_output(i, _rows_changed(_one_column_scaled))) for i in range(2)),
    *(Fault(f"gradient {i} rounded before a subtraction", "bwd", on_output(i, _minuend_rounded)) for i in range(2)),
    Fault("last row of gradient 0 unmasked", "bwd", on_output(0, _rows_changed(_last_row_unmasked))),
    Fault("last partial tile of gradient 0 not written", "bwd", on_output(0, _rows_changed(_last_tile_dropped))),
    Fault("output gradient ignored", "bwd", _incoming(torch.ones_like)),
    Fault("output gradient read across", "bwd", _incoming(_read_across)),
    Fault("one block of rows missing from the sums over rows", "bwd", _of_partial_sums(lambda parts: _total(parts[:3] + parts[4:]))),
    Fault("one block of rows twice in the sums over rows", "bwd", _of_partial_sums(lambda parts: _total([*parts, parts[-1]]))),
    Fault("last block of rows missing from the sums over rows", "bwd", _of_partial_sums(lambda parts: _total(parts[:-1]))),
    Fault("sums over rows accumulated in bf16", "bwd", _of_partial_sums(_summed_narrow, 32)),
)


class Trace:
    """Whether a planted fault changed any result at all; one that never does is not applicable to the operator."""

    def __init__(self) -> None:
        self.changed = False


def watched(honest: Launcher, faulty: Launcher, trace: Trace) -> Launcher:
    """The faulty launcher; the trace is told when its results differ from the honest one's."""

    def launcher(problem: Any, config: Any, *tensors: Any) -> Any:
        wrong = faulty(problem, config, *tensors)
        if not trace.changed:
            right = _tuple(honest(problem, config, *tensors))
            pairs = [(a, b) for a, b in zip(_tuple(wrong), right, strict=True) if a is not None and b is not None]
            trace.changed = any(not torch.equal(a, b) for a, b in pairs)
        return wrong

    return launcher


@contextmanager
def planted(operator: Operator, implementation: str, fault: Fault) -> Iterator[Trace]:
    """While inside, the implementation of the operator has the fault; the trace tells whether it ever mattered."""
    target = next(i for i in operator.implementations() if i.name == implementation)
    honest = target.launcher(fault.phase)
    trace = Trace()
    target.replaced[fault.phase] = watched(honest, fault.wrap(honest), trace)
    operator.forget()
    try:
        yield trace
    finally:
        del target.replaced[fault.phase]
        operator.forget()
