"""om.register: an operator of the user's own joins the catalogue, with its reference as the fallback and the proof of it at the door."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ops_math import backends, catalog, checks, schedule, settings
from ops_math.dispatch import Operator, choice_name
from ops_math.schedule.live import forget_operator
from ops_math.spec import ITEM_SIZE, Cost, Implementation, dtype_name, product
from ops_math.stats import counter as counter_for

if TYPE_CHECKING:
    from ops_math.testing.report import Report

OWN, REFERENCE = "own", "reference"
_MEMO_LIMIT = 4096


class CallProblem(NamedTuple):
    """The problem of a call whose author gave none: shapes and dtypes of its tensors, and its other arguments as text."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    options: str


def _text(value: Any, tensors: list[torch.Tensor]) -> str | None:
    """A value as text, None for a tensor. Tensors go to the list, also from within sequences: their numbers are no part of a problem, and
    reading them waits for the device."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return None
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(v, tensors) or "" for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v, tensors) or ''}" for k, v in value.items()) + "}"
    return repr(value)


def describe(*args: Any, **kwargs: Any) -> CallProblem:
    """The `CallProblem` of a call."""
    items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors: list[torch.Tensor] = []
    texts = [(k, _text(v, tensors)) for k, v in items]
    options = ", ".join(f"{k}={v}" for k, v in texts if v is not None)
    return CallProblem(tuple(tuple(t.shape) for t in tensors), tuple(dtype_name(t.dtype) for t in tensors), options)


def _cost_of_call(problem: Any, phase: str) -> Cost:
    """Each tensor read once; what a call writes and computes its author did not say."""
    if not isinstance(problem, CallProblem):
        return Cost((), (), ())
    sizes = [product(shape) * ITEM_SIZE.get(dtype, 8) for shape, dtype in zip(problem.shapes, problem.dtypes, strict=True)]
    return Cost(tuple((f"tensor {i}", size) for i, size in enumerate(sizes)), (), ())


class RegisteredOperator(Operator):
    """A catalogue entry made by `om.register`; call it as the function that it was made of. `report` is its proof, None without one.

    As a function does, it copies as itself and pickles by its name, so that a model that holds one can be copied and saved whole.
    """

    def __init__(self, name: str, op: Any, reference: Callable[..., Any], problem: Any, cost: Any, cases: Any, report: Any) -> None:
        self.name, self.package, self.variant = name, "", ""
        self.report: Report | None = report
        self._problem_of = problem or describe
        self._cost = cost or _cost_of_call
        self._cases = cases
        own = op if isinstance(op, types.ModuleType | types.SimpleNamespace) else types.SimpleNamespace()
        run = getattr(own, "run", op)
        facts = {k: getattr(own, k) for k in ("supports", "KINDS", "PASSES", "CALLS", "determinism", "predict_us") if hasattr(own, k)}
        if "supports" in facts:
            facts["supports"] = functools.partial(_reason_of, name, facts["supports"])
        self.supports: Callable[..., str | None] | None = facts.get("supports")
        self.own, self.reference = run, reference
        self._implementations = (_made(name, OWN, run, facts), _made(name, REFERENCE, reference, {"PASSES": 4.0, "CALLS": 8}))
        self.memo: dict[Any, Any] = {}
        self.phases, self.fwd, self.bwd = {}, None, None
        self.public = {name: self.__call__}

    def file(self, stem: str) -> Any:
        """As a folder's module: `reference` and `problem`."""
        if stem == "problem":
            return types.SimpleNamespace(storage=_storage, cost=self.cost, CASES=())
        return types.SimpleNamespace(**{self.name: self.reference})

    def cost(self, problem: Any, phase: str) -> Cost:
        """Bytes and operations of a call."""
        found = self._cost(problem, phase)
        if not isinstance(found, Cost):
            do = "Leave it out for each tensor read once."
            checks.fail(
                self.name, "cost", "a function that returns an ops_math.spec.Cost", f"one that returns a {type(found).__name__}", do
            )
        return found

    def forget(self) -> None:
        """Drop remembered choices."""
        self.memo.clear()

    def problem(self, *args: Any, **kwargs: Any) -> Any:
        """The problem of a call."""
        made = self._problem_of(*args, **kwargs)
        try:
            hash(made)
        except TypeError:
            got, do = f"one that returns a {type(made).__name__} that has no hash", "Leave it out for shapes and dtypes."
            checks.fail(self.name, "problem", "a function that returns a NamedTuple of plain numbers", got, do)
        return made

    def explain(self, *args: Any, **kwargs: Any) -> schedule.Explanation:
        """Which candidates a call has and why one runs; nothing is computed."""
        return schedule.explain(self, "fwd", self.problem(*args, **kwargs), backends.device_of(_device(args, kwargs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself: forward, with a backward by whatever autograd its implementation has."""
        if not settings.active():
            return self.reference(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._while_compiling(args, kwargs)
        device = _device(args, kwargs)
        problem = self.problem(*args, **kwargs)
        key = (problem, device, settings.policy(), torch.are_deterministic_algorithms_enabled())
        found = self.memo.get(key)
        if found is None:
            found = self._choose(key, problem, device)
        run, counter, num_bytes = found
        counter.calls += 1
        counter.bytes += num_bytes
        return run(*args, **kwargs)

    def __copy__(self) -> RegisteredOperator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RegisteredOperator:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return entered, (self.name,)

    def _choose(self, key: Any, problem: Any, device: torch.device) -> Any:
        choice = self.choice(problem, "fwd", backends.device_of(device))
        refusal = dict(choice.rejected).get(OWN, "")
        forced = self.name in dict(settings.policy().forced)
        fallback = refusal if choice.implementation.name == REFERENCE and not forced else ""
        counter = counter_for(self.name, "fwd", choice_name(choice), choice.reason, choice.rejected, fallback, str(problem))
        if len(self.memo) >= _MEMO_LIMIT:
            self.memo.clear()
        run = self.own if choice.implementation.name == OWN else self.reference
        found = self.memo[key] = run, counter, self.cost(problem, "fwd").bytes
        return found

    def _while_compiling(self, args: Any, kwargs: Any) -> Any:
        """Traced: no choice by problem is made, since sizes may be symbols, and no call is counted."""
        forced = dict(settings.policy().forced).get(self.name)
        if forced is None and self.supports is not None:
            do = f"Say which to compile: ops_math.force({self.name}='own') or ='reference'."
            checks.refuse(f"{self.name} under torch.compile", "what it supports is asked with sizes, which a compiler does not have", do)
        return self.reference(*args, **kwargs) if forced == REFERENCE else self.own(*args, **kwargs)


def _made(operator: str, name: str, run: Callable[..., Any], facts: dict[str, Any]) -> Implementation:
    made = Implementation(operator, name, "")
    made._module = types.ModuleType(f"{operator}.{name}")
    launcher = lambda problem, config, *tensors: run(*tensors)  # noqa: E731 (a module's attribute, as in an operator's folder)
    made._module.__dict__.update(launch_fwd=launcher, **facts)
    return made


def _reason_of(name: str, supports: Callable[..., Any], problem: Any, device: Any, phase: str) -> str | None:
    """What a user's `supports` says. True and False would be taken the wrong way round: a reason is why it cannot."""
    why = supports(problem, device, phase)
    if why is None or isinstance(why, str):
        return why
    needs = "a function that returns None where it can run the problem, else why not, in words"
    checks.fail(name, "supports", needs, f"one that returns {why!r}", "Write e.g. `return None if fits else 'it is too wide'`.")


def _storage(problem: Any) -> str:
    """The dtype a problem is stored in: its own word, or that of its first floating tensor."""
    named = getattr(problem, "x", None) or getattr(problem, "dtype", None)
    return str(named or next((d for d in getattr(problem, "dtypes", ()) if d in ITEM_SIZE), "fp32"))


def _device(args: Any, kwargs: Any) -> torch.device:
    for v in (*args, *kwargs.values()):
        if isinstance(v, torch.Tensor):
            return v.device
    nested: list[torch.Tensor] = []
    _text((args, kwargs), nested)
    return nested[0].device if nested else torch.device("cpu")


def register(
    name: str,
    op: Any,
    *,
    reference: Callable[..., Any],
    cases: Any = None,
    problem: Callable[..., Any] | None = None,
    cost: Callable[[Any, str], Cost] | None = None,
    verify: bool = True,
    device: str = "cpu",
    dtypes: Sequence[str] = ("fp32", "bf16"),
    frozen: Sequence[int | str] = (),
    **options: Any,
) -> RegisteredOperator:
    """Enter an operator of your own in the catalogue, once it is proved right.

    What is returned is called as the function is. It runs the function where it supports the problem, and the reference elsewhere, which
    `om.stats()` shows as a fallback with its reason; `ops_math.force(NAME="reference")` and `ops_math.enabled(False)` hold for it, and
    `.explain(...)` says what would run and why. Its backward is its own autograd's. Under `torch.compile` the function is traced as it is,
    and calls are not counted.

    Args:
        name: a Python name that the catalogue does not have.
        op: the function, or a module with `run(...)` and what implementations may say of themselves: `supports(problem, device, phase)`
            returns why it cannot run a problem, or None; KINDS; PASSES; CALLS; `determinism`; `predict_us`.
        reference: the definition with the same arguments, in differentiable torch that runs in float64.
        cases: inputs, as `ops_math.testing.verify` takes them.
        problem: makes of a call's arguments a NamedTuple of plain numbers, from which everything is decided; by default shapes and dtypes.
        cost: bytes and operations of a problem (see `ops_math.spec.Cost`); by default each tensor is read once.
        verify: False enters it unproved.
        device: where it is proved: cpu or cuda.
        dtypes: those it is proved in.
        frozen: positions and keywords that get no gradient.
        options: what else `verify` takes: yardstick, tempers, faults, skip, far, compile, progress.

    Returns: the operator; `.report` is its proof.

    Raises: VerificationError with the report where the proof fails; ArgumentError for a name that is taken or no name, and for what cannot
    be called.
    """
    if not isinstance(name, str) or not name.isidentifier():
        checks.fail("register", "name", "a Python name", repr(name), "Write it like my_norm.")
    if name in catalog.operators() or name in catalog.public_functions():
        checks.fail("register", "name", "one that the catalogue does not have", repr(name), "Take another, or unregister it first.")
    if isinstance(op, torch.nn.Module):
        do = "Pass a function of tensors, so that parameters are arguments whose gradients can be proved."
        checks.fail("register", "op", "a function, or a module with run()", f"the layer {type(op).__name__}", do)
    run: Any = getattr(op, "run", op) if isinstance(op, types.ModuleType | types.SimpleNamespace) else op
    for argument, value in (("op", run), ("reference", reference)):
        if not callable(value):
            checks.fail("register", argument, "a function, or a module with run()", type(value).__name__, "Pass what computes it.")
    for argument, value in (("problem", problem), ("cost", cost)):
        if value is not None and not callable(value):
            checks.fail("register", argument, "a function, or None", type(value).__name__, "Leave it out for shapes and dtypes.")
    report = None
    if verify:
        if cases is None:
            checks.fail("register", "cases", "inputs to prove it on", "None", "Pass a function of a draw, or verify=False.")
        from ops_math.testing.verify import verify as proof

        report = proof(run, reference=reference, inputs=cases, device=device, dtypes=dtypes, frozen=frozen, name=name, **options)
        report.require()
    entry = RegisteredOperator(name, op, reference, problem, cost, cases, report)
    settings.IMPLEMENTATIONS[name] = (OWN, REFERENCE)
    schedule.register(entry)
    catalog.operators()[name] = entry
    return entry


def entered(name: str) -> RegisteredOperator:
    """What is registered under a name: how a pickle finds it again, in this process or in one that registered it too.

    Raises: UnsupportedError where nothing is.
    """
    found = catalog.operators().get(name)
    if not isinstance(found, RegisteredOperator):
        checks.refuse(f"loading {name}", "no operator of this name is registered here", f"Call ops_math.register({name!r}, ...) first.")
    return found


def unregister(name: str) -> None:
    """Take an operator that `register` entered out of the catalogue; what was returned then keeps working as the function did.

    Raises: ArgumentError for a name that was not registered.
    """
    if not isinstance(name, str) or not isinstance(catalog.operators().get(name), RegisteredOperator):
        entered = tuple(n for n, entry in catalog.operators().items() if isinstance(entry, RegisteredOperator))
        checks.fail("unregister", "name", "one that was registered", repr(name), f"Registered are: {', '.join(entered) or 'none'}.")
    del catalog.operators()[name]
    del settings.IMPLEMENTATIONS[name]
    forget_operator(name)
