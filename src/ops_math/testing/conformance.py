"""The operator contract, as checks that hold for every catalogue entry. Each returns sentences about what is wrong; none is good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ops_math import settings
from ops_math.dispatch import Operator
from ops_math.spec import DTYPE_OF, Call, Case
from ops_math.testing.budget import UNIT
from ops_math.testing.capture import watch
from ops_math.testing.faults import FAULTS, Fault, planted
from ops_math.testing.inputs import Draw, Result, is_floating, run
from ops_math.testing.measure import judge_for

# The hand-written backward in float64 against autograd of the reference: of the call's largest output or gradient.
FORMULA_TOLERANCE = 1e-12
# PyTorch's own function in float64 against the reference; some of its kernels sum in another order or keep a float32 constant.
PLAIN_TOLERANCE = 1e-10

Change = Callable[[torch.Tensor], torch.Tensor]


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values, with the last dimension strided."""
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else torch.stack([t, t], -1)[..., 0]


def view_of_cat(t: torch.Tensor) -> torch.Tensor:
    """The same values, as a view of a wider tensor full of NaN."""
    if t.dim() == 0:
        return t
    wide = torch.full((*t.shape[:-1], t.shape[-1] * 2 + 3), float("nan"), dtype=t.dtype, device=t.device)
    view = wide[..., 1 : 1 + t.shape[-1]]
    view.copy_(t)
    return view


def moved_base(t: torch.Tensor) -> torch.Tensor:
    """The same values, at a base address that is not a multiple of 16 bytes."""
    return torch.cat([t.new_full((1,), float("nan")), t.reshape(-1)])[1:].view(t.shape)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """A gradient as `.sum().backward()` gives it: one number, stride zero."""
    return t.reshape(-1)[:1].expand(t.numel()).as_strided(t.shape, [0] * t.dim()) if t.numel() else t


LAYOUTS: dict[str, Change] = {"transposed": transposed, "view of a cat": view_of_cat, "unaligned": moved_base}


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _largest(result: Result) -> float:
    finite = [t.double().nan_to_num(0, 0, 0).abs().max().item() for t in result.values if t.numel()]
    return max([*finite, 1e-30])


def _worst(a: Result, b: Result) -> tuple[float, str]:
    """The largest difference over all outputs and gradients, and whose it is; equal infinities are equal."""
    worst = (0.0, "")
    for name, x, y in zip(a.names, a.values, b.values, strict=True):
        if x.shape != y.shape:
            return float("inf"), name
        if x.numel():
            x, y = x.double(), y.double()
            gap = torch.where(x == y, torch.zeros_like(x), (x - y).abs()).max().item()
            if not gap <= worst[0]:
                worst = (gap, name)
    return worst


def check_formula(operator: Operator, case: Case) -> list[str]:
    """Eager in float64 reproduces the reference and its autograd gradients."""
    call = case.make(Draw(1, "fp64"))
    with settings.force(**{operator.name: "eager"}):
        ours = run(operator.public[case.fn], call, case.frozen, rounded=torch.float64, change=torch.Tensor.double)
    oracle = run(
        getattr(operator.file("reference"), case.fn),
        call,
        case.frozen,
        rounded=torch.float64,
        change=torch.Tensor.double,
        differentiable=ours.differentiable,
    )
    gap, name = _worst(ours, oracle)
    limit = FORMULA_TOLERANCE * _largest(oracle)
    return [] if gap <= limit else [f"{case.name}: {name} differs by {gap:.3g} from the reference in float64, more than {limit:.3g}"]


def check_plain(operator: Operator, case: Case) -> list[str]:
    """PyTorch's own function agrees with the reference in float64."""
    call = case.make(Draw(1, "fp64"))
    with settings.enabled(False):
        plain = run(operator.public[case.fn], call, case.frozen, rounded=torch.float64, change=torch.Tensor.double)
    oracle = run(
        getattr(operator.file("reference"), case.fn),
        call,
        case.frozen,
        rounded=torch.float64,
        change=torch.Tensor.double,
        differentiable=plain.differentiable,
    )
    gap, name = _worst(plain, oracle)
    limit = PLAIN_TOLERANCE * _largest(oracle)
    return [] if gap <= limit else [f"{case.name}: plain PyTorch's {name} differs by {gap:.3g} from the reference, more than {limit:.3g}"]


def able(operator: Operator, case: Case, dtype: str, implementation: str, device: str) -> str | None:
    """Why the implementation cannot run the case here, or None."""
    judge_call = case.make(Draw(1, dtype, device))
    try:
        with settings.force(**{operator.name: implementation}):
            run(operator.public[case.fn], judge_call, case.frozen, rounded=DTYPE_OF[dtype])
    except RuntimeError as error:
        if "no implementation can run it" in str(error):
            return str(error)
        raise
    return None


def reaches(operator: Operator, case: Case, dtype: str, implementation: str, device: str) -> bool:
    """Whether the case calls the operator at all: a dropout that drops nothing returns its input."""
    call = case.make(Draw(1, dtype, device))
    with settings.force(**{operator.name: implementation}):
        seen = watch(lambda: run(operator.public[case.fn], call, case.frozen, rounded=DTYPE_OF[dtype]))
    return any(one.operator == operator.name for one in seen.calls)


def check_budget(operator: Operator, case: Case, dtype: str, implementation: str, device: str = "cpu") -> list[str]:
    """The implementation is as right as eager in the same dtype, output by output and gradient by gradient."""
    broken = judge_for(operator, case, dtype, device).verdict(implementation)
    return [f"{case.name} in {dtype}: {b}" for b in broken]


def _same(first: Result, second: Result, what: str) -> list[str]:
    differing = [
        n for n, a, b in zip(first.names, first.values, second.values, strict=True) if not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    ]
    return [f"{what}: {', '.join(differing)} differ bit for bit"] if differing else []


def check_layouts(operator: Operator, case: Case, dtype: str, implementation: str, device: str = "cpu") -> list[str]:
    """Other strides of inputs and of output gradients stay within the budget (the order of sums may change, the numbers may not)."""
    judge = judge_for(operator, case, dtype, device)
    oracle, budget = judge.oracles[1].values, judge.budget_of(implementation)
    found = []
    for name, change in LAYOUTS.items():
        found += [f"{case.name}: inputs {name}: {b}" for b in budget.broken(judge.run(1, implementation, change=change).values, oracle)]
        found += [
            f"{case.name}: output gradients {name}: {b}"
            for b in budget.broken(judge.run(1, implementation, change_gradient=change).values, oracle)
        ]
    stretched = judge.run(1, implementation, change_gradient=expanded)
    copied = judge.run(1, implementation, change_gradient=lambda t: expanded(t).clone())
    gap, name = _worst(copied, stretched)
    limit = 4 * UNIT[DTYPE_OF[dtype]] * _largest(copied)
    return found + ([] if gap <= limit else [f"{case.name}: output gradients expanded: {name} differs by {gap:.3g}, more than {limit:.3g}"])


def check_repeats(operator: Operator, case: Case, dtype: str, implementation: str, device: str = "cpu", times: int = 5) -> list[str]:
    """The same bits on every run."""
    judge = judge_for(operator, case, dtype, device)
    first = judge.run(1, implementation)
    return [s for i in range(times) for s in _same(first, judge.run(1, implementation), f"{case.name}: run {i + 2}")]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh buffers are full of NaN instead of what memory held."""
    names = ("empty", "empty_like", "empty_strided")
    kept = {name: getattr(torch, name) for name in names}
    kept_new = torch.Tensor.new_empty

    def fill(t: torch.Tensor) -> torch.Tensor:
        return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(torch.iinfo(t.dtype).max if t.dtype != torch.bool else True)

    for name in names:
        setattr(torch, name, lambda *a, _f=kept[name], **k: fill(_f(*a, **k)))
    torch.Tensor.new_empty = lambda self, *a, **k: fill(kept_new(self, *a, **k))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in names:
            setattr(torch, name, kept[name])
        torch.Tensor.new_empty = kept_new  # type: ignore[method-assign]


def check_poison(operator: Operator, case: Case, dtype: str, implementation: str, device: str = "cpu") -> list[str]:
    """Every element of every result is written."""
    judge = judge_for(operator, case, dtype, device)
    usual = judge.run(1, implementation)
    with poisoned():
        seen = judge.run(1, implementation)
    return _same(usual, seen, f"{case.name}: fresh buffers full of NaN")


def check_autograd(operator: Operator, case: Case, dtype: str, implementation: str, device: str = "cpu") -> list[str]:
    """no_grad gives the same values and no graph; a second backward the same bits; one input alone the same gradient."""
    judge = judge_for(operator, case, dtype, device)
    usual = judge.run(1, implementation)
    found = []
    with settings.force(**{operator.name: implementation}):
        with torch.no_grad():
            call = judge.call(1)
            silent = operator.public[case.fn](*call.args, **call.kwargs)
        for i, (a, b) in enumerate(zip(_tuple(silent), usual.outputs, strict=True)):
            if a.requires_grad or a.grad_fn is not None:
                found.append(f"{case.name}: out{i} has a graph under no_grad")
            if not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)):
                found.append(f"{case.name}: out{i} differs under no_grad")
    learning = [k for k in _floating_keys(judge.call(1)) if k not in case.frozen]
    if len(learning) > 1:
        for key in learning:
            frozen = tuple(k for k in learning if k != key) + tuple(case.frozen)
            with settings.force(**{operator.name: implementation}):
                alone = run(operator.public[case.fn], judge.call(1), frozen, seed=1, rounded=DTYPE_OF[dtype])
            if alone.differentiable != usual.differentiable:
                continue  # an output that does not depend on this input gets no gradient, which changes the sum
            want, got = usual.values[usual.names.index(f"d{key}")], alone.values[-1]
            limit = judge.budget.limits[usual.names.index(f"d{key}")]
            if limit and not torch.equal(want, got) and (want - got).abs().max() > 4 * UNIT[want.dtype] * want.abs().max():
                found.append(f"{case.name}: the gradient of {key} alone differs from the one beside the others")
    return found


def _floating_keys(call: Call) -> list[int | str]:
    return [i for i, v in enumerate(call.args) if is_floating(v)] + [k for k, v in call.kwargs.items() if is_floating(v)]


def check_twice(operator: Operator, case: Case, dtype: str, implementation: str, device: str = "cpu") -> list[str]:
    """Two backwards over one graph give the same bits, and leave what was saved as it was."""
    judge = judge_for(operator, case, dtype, device)
    call = judge.call(1)
    learning = [v.requires_grad_() for i, v in [*enumerate(call.args), *call.kwargs.items()] if is_floating(v) and i not in case.frozen]
    with settings.force(**{operator.name: implementation}):
        out = operator.public[case.fn](*call.args, **call.kwargs)
        outs = [o for o in _tuple(out) if o.requires_grad]
        if not outs or not learning:
            return []
        fed = [torch.full_like(o, 0.5) for o in outs]
        kept = [g.clone() for g in fed]
        first = [None if g is None else g.clone() for g in torch.autograd.grad(outs, learning, fed, retain_graph=True, allow_unused=True)]
        second = torch.autograd.grad(outs, learning, fed, allow_unused=True)
    found = [
        f"{case.name}: gradient {i} of the second backward differs"
        for i, (a, b) in enumerate(zip(first, second, strict=True))
        if a is not None and not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    ]
    return found + [
        f"{case.name}: the backward changed the incoming gradient" for a, b in zip(kept, fed, strict=True) if not torch.equal(a, b)
    ]


def check_opcheck(operator: Operator, case: Case, dtype: str, device: str = "cpu") -> list[str]:
    """`torch.library.opcheck` on every dispatcher call of the case, with detached inputs."""
    call = case.make(Draw(1, dtype, device))
    with settings.force(**{operator.name: "eager"}):
        seen = watch(lambda: run(operator.public[case.fn], call, case.frozen, rounded=DTYPE_OF[dtype]))
        found = []
        for c in seen.calls:
            args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in c.args)
            result = torch.library.opcheck(c.overload, args, raise_exception=False)
            found += [f"{case.name}: {c.operator}_{c.phase}: {test}: {text}" for test, text in result.items() if text != "SUCCESS"]
    return found


def check_compiled(operator: Operator, case: Case, dtype: str, device: str = "cpu", backend: str = "aot_eager") -> list[str]:
    """`torch.compile(fullgraph=True)` gives the same bits as eager mode, forward and backward."""
    torch._dynamo.reset()
    call = case.make(Draw(1, dtype, device))
    usual = run(operator.public[case.fn], call, case.frozen, rounded=DTYPE_OF[dtype])
    compiled = torch.compile(operator.public[case.fn], fullgraph=True, backend=backend)
    return _same(usual, run(compiled, call, case.frozen, rounded=DTYPE_OF[dtype]), f"{case.name}: compiled by {backend}")


def check_shared(operator: Operator, case: Case, dtype: str, device: str = "cpu") -> list[str]:
    """One tensor passed as several inputs gets the sum of their gradients, in eager mode and compiled."""
    call = case.make(Draw(1, dtype, device))
    same = [
        i
        for i, v in enumerate(call.args)
        if is_floating(v) and i not in case.frozen and v.shape == call.args[0].shape and v.dtype == call.args[0].dtype
    ]
    if len(same) < 2 or 0 in case.frozen:
        return []

    def shared(x: torch.Tensor, *rest: Any) -> Any:
        return operator.public[case.fn](*[x if i in same else rest[i - 1] for i in range(len(call.args))], **call.kwargs)

    once = run(shared, Call(call.args, {}), tuple(range(1, len(call.args))), rounded=DTYPE_OF[dtype])
    apart = run(
        operator.public[case.fn],
        Call(tuple(call.args[0] if i in same else a for i, a in enumerate(call.args)), call.kwargs),
        tuple(k for k in case.frozen if isinstance(k, str)) + tuple(i for i in range(len(call.args)) if i not in same),
        rounded=DTYPE_OF[dtype],
    )
    total = torch.stack([g.double() for g in apart.values[apart.num_outputs :]]).sum(0)
    gap = (once.values[-1].double() - total).abs().max().item() if total.numel() else 0.0
    limit = 8 * UNIT[DTYPE_OF[dtype]] * _largest(apart)
    found = [] if gap <= limit else [f"{case.name}: one tensor for all of {same}: its gradient differs from the sum by {gap:.3g}"]
    torch._dynamo.reset()
    compiled = run(
        torch.compile(shared, fullgraph=True, backend="aot_eager"),
        Call(call.args, {}),
        tuple(range(1, len(call.args))),
        rounded=DTYPE_OF[dtype],
    )
    gap, name = _worst(once, compiled)  # autograd may add three gradients in another order
    return found + ([] if gap <= limit else [f"{case.name}: one tensor for all of {same}, compiled: {name} differs by {gap:.3g}"])


def surviving_faults(
    operator: Operator,
    dtype: str,
    faults: tuple[Fault, ...] = FAULTS,
    implementation: str = "eager",
    device: str = "cpu",
    cases: Sequence[Case] | None = None,
) -> tuple[list[str], list[str]]:
    """(faults that no case caught, faults that were caught). A fault that changes no result anywhere counts as neither.

    `cases` are those that the implementation can run; by default all of the dtype.
    """
    cases = [c for c in (operator.file("problem").CASES if cases is None else cases) if dtype in c.dtypes]
    for case in cases:  # the yardstick must be measured before anything is planted in it
        judge_for(operator, case, dtype, device)
    alive, caught = [], []
    for fault in faults + tuple(getattr(operator.file("problem"), "FAULTS", ())):
        if dtype not in fault.shows_in:
            continue
        with planted(operator, implementation, fault) as trace:
            hit = next((c.name for c in cases if _fails(operator, c, dtype, implementation, device)), None)
        if hit is not None:
            caught.append(f"{fault.name}: caught by {hit}")
        elif trace.changed:
            alive.append(fault.name)
    return alive, caught


def _fails(operator: Operator, case: Case, dtype: str, implementation: str, device: str) -> bool:
    judge = judge_for(operator, case, dtype, device)
    try:
        return bool(judge.verdict(implementation, seeds=(1, 2)))
    except (RuntimeError, IndexError, ValueError):
        return True  # a fault that makes the call fail cannot go unnoticed
