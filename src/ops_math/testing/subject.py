"""What `verify` works on: a function, its reference, and inputs of it in any size and temper; and the judge of one such call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops_math import checks
from ops_math.spec import DTYPE_OF, Call, Case, compute_dtype, dtype_name
from ops_math.testing.budget import UNIT, Broken, Budget
from ops_math.testing.inputs import Draw, Result, is_floating, run
from ops_math.testing.measure import SEEDS, nudged, widened

HOSTILE_SIZES = (0, 1, 2, 31, 129, 1003)
MANY = 600  # rows of the case that averages rounding out of columns
Maker = Callable[..., Any]


class Family(NamedTuple):
    """Inputs that differ in sizes alone: `make(draw, **sizes)` gives the arguments, `sizes` those it has unless asked otherwise."""

    name: str
    make: Maker
    sizes: tuple[tuple[str, int], ...]
    frozen: tuple[int | str, ...] = ()
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    looser: tuple[tuple[str, float], ...] = ()

    def case(self, sizes: Mapping[str, int], temper: str = "plain", label: str = "") -> Posed:
        """The case of these sizes and temper."""
        chosen = {**dict(self.sizes), **sizes}
        text = ", ".join(f"{k}={v}" for k, v in chosen.items())
        name = ", ".join(part for part in (self.name, text, "" if temper == "plain" else temper, label) if part)
        case = Case(
            name, "", lambda d: TEMPERS[temper](as_call(self.make(d, **chosen))), temper, self.frozen, self.dtypes, True, self.looser
        )
        return Posed(case, self, tuple(chosen.items()), temper, label)


class Posed(NamedTuple):
    """A case with what it was made of, so that it can be made smaller."""

    case: Case
    family: Family
    sizes: tuple[tuple[str, int], ...]
    temper: str
    label: str = ""

    @property
    def is_usual(self) -> bool:
        """Whether its sizes are the author's, or those with a name: all odd, many rows."""
        return bool(self.label) or self.sizes == self.family.sizes

    def sized(self, sizes: Mapping[str, int]) -> Posed:
        """The same in other sizes."""
        return self.family.case({**dict(self.sizes), **sizes}, self.temper)

    @property
    def is_plain(self) -> bool:
        """Whether it is the family as its author wrote it: that must run."""
        return self.temper == "plain" and self.sizes == self.family.sizes


def as_call(made: Any) -> Call:
    """A `Call` of what inputs return: a `Call`, a tensor, or a tuple of arguments that may end with a dictionary of keywords."""
    if isinstance(made, Call):
        return made
    args = tuple(made) if isinstance(made, tuple | list) else (made,)
    return Call(args[:-1], dict(args[-1])) if args and isinstance(args[-1], dict) else Call(args, {})


def changed(call: Call, change: Callable[[int | str, torch.Tensor], torch.Tensor]) -> Call:
    """The call with each floating tensor changed; keys are positions and keywords."""

    def one(key: int | str, value: Any) -> Any:
        return change(key, value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return Call(tuple(one(i, v) for i, v in enumerate(call.args)), {k: one(k, v) for k, v in call.kwargs.items()})


def _scaled(factor: float, least_dims: int, most_dims: int, offset: float = 0.0) -> Callable[[Call], Call]:
    def temper(call: Call) -> Call:
        def change(key: int | str, t: torch.Tensor) -> torch.Tensor:
            return (t.double() * factor + offset).to(t.dtype) if least_dims <= t.dim() <= most_dims else t

        return changed(call, change)

    return temper


def _offset_first(call: Call) -> Call:
    return changed(call, lambda key, t: (t.double() + 30).to(t.dtype) if key == 0 else t)


def _wide_vectors(call: Call) -> Call:
    """Vectors in fp32 with numbers that 16 bits cannot hold, beside the rest as it is."""
    generator = torch.Generator().manual_seed(11)

    def change(key: int | str, t: torch.Tensor) -> torch.Tensor:
        if t.dim() != 1 or t.dtype.itemsize > 2:
            return t
        return t.float() * (1 + 0.3 * torch.rand(t.shape, generator=generator)).to(t.device)

    return changed(call, change)


# What is done to the numbers of a call, since some faults hide on plain ones.
TEMPERS: dict[str, Callable[[Call], Call]] = {
    "plain": lambda call: call,
    "confident": _scaled(16.0, 2, 9),
    "near zero": _scaled(1e-3, 2, 9),
    "common offset": _offset_first,
    "large vectors": _scaled(8.0, 1, 1),
    "fp32 vectors": _wide_vectors,
}

MANY_ROWS = ("plain", "large vectors", "fp32 vectors")  # tempers that are worth trying with many rows too


def families(inputs: Any, frozen: Sequence[int | str] = ()) -> tuple[Family, ...]:
    """Families of whatever a user passes as inputs: a function of a draw, several in a mapping or a sequence, or `Case`s.

    Keyword parameters of a function whose default is a whole number are its sizes.
    """
    if callable(inputs) and not isinstance(inputs, type) and not inspect.signature(inputs).parameters:
        inputs = inputs()
    if callable(inputs):
        inputs = (inputs,)
    if not isinstance(inputs, Iterable) or isinstance(inputs, str):
        _not_inputs(inputs)
    items: Iterable[tuple[str, Any]]
    items = inputs.items() if isinstance(inputs, Mapping) else (("", one) for one in inputs)
    return tuple(_family(name, one, tuple(frozen)) for name, one in items)


def _not_inputs(made: Any) -> NoReturn:
    needs = "functions of a draw, e.g. `lambda d, rows=64: (d.normal(rows, 256),)`, or Cases"
    checks.fail("verify", "inputs", needs, type(made).__name__, "See ops_math.testing.Draw for what a draw makes.")


def _family(name: str, made: Any, frozen: tuple[int | str, ...]) -> Family:
    if isinstance(made, Case):
        return Family(name or made.name, made.make, (), frozen + made.frozen, made.dtypes, made.looser)
    if not callable(made):
        _not_inputs(made)
    found = [(n, p.default) for n, p in inspect.signature(made).parameters.items()]
    sizes = tuple((n, d) for n, d in found if isinstance(d, int) and not isinstance(d, bool))
    own = getattr(made, "__name__", "")
    return Family(name or ("" if own == "<lambda>" else own), made, sizes, frozen)


def posed(family: Family, tempers: Sequence[str]) -> list[Posed]:
    """Every case of a family that `verify` tries: as it is, in each temper, in hostile sizes one at a time, and with many rows."""
    found = [family.case({}, temper) for temper in ("plain", *tempers)]
    for name, usual in family.sizes:
        found += [family.case({name: n}) for n in HOSTILE_SIZES if n != usual]
    if family.sizes:
        found.insert(1, family.case({n: 2 * usual // 3 | 1 for n, usual in family.sizes}, label="all odd"))
        first, usual = family.sizes[0]
        found += [family.case({first: max(MANY, usual)}, temper, "many rows") for temper in ("plain", *tempers) if temper in MANY_ROWS]
    return found


_ATEN = torch.ops.aten
PRODUCTS = {_ATEN.mm.default: 0, _ATEN.bmm.default: 0, _ATEN.addmm.default: 1, _ATEN.baddbmm.default: 1}  # where their two matrices begin


class NarrowProducts(TorchDispatchMode):
    """Rounds the operands of matrix products to a storage dtype, as tensor cores take them, in forward and backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = PRODUCTS.get(func)
        if first is not None:
            args = (*args[:first], *(t.to(self.dtype).to(t.dtype) for t in args[first : first + 2]), *args[first + 2 :])
        return func(*args, **(kwargs or {}))


def floating_outputs(returned: Any) -> tuple[torch.Tensor, ...]:
    """The floating tensors that a function returned."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    return tuple(v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


class Subject(NamedTuple):
    """The function under test, its reference, and the yardstick: an implementation that rounds where it may."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    yardstick: Callable[..., Any] | None = None
    name: str = ""


class CallJudge:
    """Knows how wrong a function may be on one case in one dtype; a `measure.Judge` for functions that are in no catalogue.

    Args:
        subject: the function with its reference.
        case: the case.
        dtype: fp32, bf16 or fp16.
        device: where everything runs.
    """

    def __init__(self, subject: Subject, case: Case, dtype: str, device: str = "cpu") -> None:
        self.subject, self.case, self.dtype, self.device = subject, case, dtype, device
        self.rounded = DTYPE_OF[dtype]
        self.oracles = {seed: self.oracle(seed, differentiable=None) for seed in SEEDS}
        self.differentiable = self.oracles[SEEDS[0]].differentiable
        self.runs = {seed: self.run(seed) for seed in SEEDS}
        self.first = self.runs[SEEDS[0]]
        self.dtypes = [o.dtype for o in self.first.outputs]
        self.yardsticks = {seed: self._yardstick(seed) for seed in SEEDS}
        moved = [self.oracle(seed, nudged, self.differentiable) for seed in SEEDS]
        oracles = [self.oracles[s].values for s in SEEDS]
        yardsticks = [self.yardsticks[s].values for s in SEEDS]
        self.budget = Budget(oracles, yardsticks, [m.values for m in moved], self.oracles[SEEDS[0]].names, dict(case.looser))

    def call(self, seed: int) -> Call:
        """The arguments for a seed."""
        return as_call(self.case.make(Draw(seed, self.dtype, self.device)))

    def run(self, seed: int, op: Callable[..., Any] | None = None, **options: Any) -> Result:
        """One forward and backward of the function, or of another in its place."""
        chosen = op or self.subject.op
        return run(
            lambda *a, **k: floating_outputs(chosen(*a, **k)), self.call(seed), self.case.frozen, seed=seed, rounded=self.rounded, **options
        )

    def oracle(
        self, seed: int, change: Callable[[torch.Tensor], torch.Tensor] = widened, differentiable: Sequence[int] | None = None
    ) -> Result:
        """The reference in float64 with autograd's gradients."""
        return self.run(seed, self.subject.reference, change=change, differentiable=differentiable)

    def _yardstick(self, seed: int) -> Result:
        if self.subject.yardstick is not None:
            own = self.subject.yardstick
            return self.run(seed, lambda *a, **k: self._stored(floating_outputs(own(*a, **k))))
        compute = compute_dtype(self.rounded)

        def rounding(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            wide = changed(Call(args, kwargs), lambda key, t: t.to(compute))
            return self._stored(floating_outputs(self.subject.reference(*wide.args, **wide.kwargs)))

        if UNIT[self.rounded] <= UNIT[torch.float32]:
            return self.run(seed, rounding)
        with NarrowProducts(self.rounded):
            return self.run(seed, rounding)

    def _stored(self, outs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """In the dtypes in which the function stores its outputs; what it does not return stays as it is."""
        kept = outs[len(self.dtypes) :]
        return (*(o.to(dtype) for o, dtype in zip(outs, self.dtypes, strict=False)), *kept)

    def errors(self, seeds: Sequence[int] = SEEDS, op: Callable[..., Any] | None = None) -> list[Broken]:
        """Every statistic on these seeds, with its limit."""
        runs = self.runs if op is None else {s: self.run(s, op) for s in seeds}
        return [e for s in seeds for e in self.budget.errors(runs[s].values, self.oracles[s].values)]

    def verdict(self, seeds: Sequence[int] = SEEDS, op: Callable[..., Any] | None = None) -> list[Broken]:
        """Every limit that is passed on these seeds."""
        return [e for e in self.errors(seeds, op) if not e.value <= e.limit]


def unheld_outputs(judge: CallJudge) -> tuple[str, ...]:
    """The results that are no floating tensors, in words: a place and what is there."""
    call = judge.call(SEEDS[0])
    with torch.no_grad():
        returned = judge.subject.op(*call.args, **call.kwargs)
    values = returned if isinstance(returned, tuple | list) else (returned,)
    kinds = (
        (i, dtype_name(v.dtype) if isinstance(v, torch.Tensor) else type(v).__name__) for i, v in enumerate(values) if not is_floating(v)
    )
    return tuple(f"result {i} ({kind})" for i, kind in kinds)


# An answer of these kinds is no refusal: it is a fault that happened to stop the call.
CRASHES = (ZeroDivisionError, IndexError, KeyError, AttributeError, UnboundLocalError)
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError)


def in_one_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its words."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def unanswered(subject: Subject, case: Case, dtype: str, device: str) -> str:
    """Why there is nothing to hold a function to on a case: the inputs cannot be made, or the reference has no answer; else empty."""
    try:
        call = as_call(case.make(Draw(1, dtype, device)))
    except (*CRASHES, *REFUSALS) as error:
        return f"these inputs cannot be made ({in_one_line(error)})"
    try:
        found = run(lambda *a, **k: floating_outputs(subject.reference(*a, **k)), call, case.frozen, change=widened)
    except (*CRASHES, *REFUSALS) as error:
        return f"the reference does not take it ({in_one_line(error)})"
    return "the reference gives NaN" if any(bool(torch.isnan(v).any()) for v in found.values) else ""
