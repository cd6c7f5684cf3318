"""define(): schema, fake and launchers of an operator, and the way of a call from PyTorch's dispatcher to a launcher.

PyTorch's dispatcher is the only dispatcher, and is left out where it has nothing to do. An operator is two functional, fixed-arity
operators of the namespace `ops_math` (`NAME_fwd` and `NAME_bwd`), called from an `autograd.Function` outside; what runs here is below
autograd.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ops_math import backends, checks, features, schedule, settings
from ops_math.backends import launch as launching
from ops_math.backends import plan as planning
from ops_math.backends import short as shortening
from ops_math.backward import once_differentiable
from ops_math.schedule.levels import NOTHING_STATED, Levels, chosen_for
from ops_math.spec import Implementation, dtype_name
from ops_math.stats import counter as counter_for
from ops_math.usual import apply, needs_grad, refuse_vmap, store_dtype

_LIBRARY = torch.library.Library("ops_math", "DEF")
features.tag_compile_cache("ops_math", Path(__file__).parent)  # compiled code knows operators by name only: a new backward needs a new key
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_PHASES: dict[str, _Phase] = {}
_MEMO_LIMIT = 4096  # choices kept an operator and phase; a run with ever new shapes starts over instead of growing
RECORD_AT = 16  # calls until one is written down, which takes 250 us and saves 10 to 20 a call: lengths that never return cost nothing
_SHORT = 4  # signatures of an operator and phase that are tried one after the other: a model has few at a time
_SHORTEN_EVERY = 64  # calls by the dictionary until one is put in front again: what is made for it costs 200 us
_deterministic = torch.are_deterministic_algorithms_enabled
_products = features.products
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
_LOW = launching.ALIGNMENT - 1


class _Known:
    """What is remembered of a call: its choice and problem, and after `RECORD_AT` such calls a plan of what the launcher does, if it
    has one."""

    __slots__ = ("calls", "config", "counter", "index", "launcher", "num_bytes", "plan", "play", "played", "problem", "why")

    def __init__(self, chosen: Any, problem: Any, device: torch.device) -> None:
        self.launcher, self.config, self.counter, self.num_bytes = chosen
        self.problem = problem
        self.index = device.index if device.type == "cuda" else None
        self.calls, self.played, self.why = 0, 0, ""
        self.plan: Any = None
        self.play: Any = None

    def run(self, tensors: Sequence[Any]) -> Any:
        """Call the launcher; the sixteenth time, write down what it does. A user may write into what is returned."""
        self.calls += 1
        if self.calls != RECORD_AT or tensors[0].device.type not in launching.DIRECT:
            return planning.on_their_own(self.launcher(self.problem, self.config, *tensors))
        if not features.quiet() or not planning.distinct(tensors):
            self.calls -= 1  # another call may be one that nobody watches, or show which is which
            return planning.on_their_own(self.launcher(self.problem, self.config, *tensors))
        out, self.plan, self.why = planning.record(lambda: self.launcher(self.problem, self.config, *tensors), tensors)
        self.play = None if self.plan is None else planning.compiled(self.plan)
        return planning.on_their_own(out)


class _Phase:
    """One of the two dispatcher operators: builds the problem, finds the choice, launches."""

    __slots__ = ("kinds", "memo", "name", "num_tensors", "operator", "overload", "problem_of", "short")

    def __init__(self, operator: Operator, name: str, schema: str, problem_of: Callable[..., Any]) -> None:
        self.operator, self.name, self.problem_of = operator, name, problem_of
        self.num_tensors = count_tensors(schema)
        self.kinds = scalar_kinds(schema)
        self.memo: dict[Any, Any] = {}
        self.short: tuple[Callable[..., Any], ...] = ()  # ways of the latest signatures; replaced, never changed, since threads read it
        self.overload: Any = None

    def __call__(self, *args: Any) -> Any:
        """What PyTorch's dispatcher calls."""
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in args[: self.num_tensors]):
            reason = "this is the operator below autograd, whose results have no gradient"
            do = "Call the function of ops_math; what runs in a graph of torch.jit.trace is called under torch.no_grad()."
            checks.refuse(f"ops_math::{self.operator.name}_{self.name}", reason, do)
        found = self.signature(args)
        if found is not None:
            return self.run(*found, args)
        return self.launch(self.choose_for(args), None, args)

    def signature(self, args: tuple[Any, ...]) -> tuple[Any, list[Any]] | None:
        """All that a call may depend on, and the addresses of its tensors; None where one is not an ordinary tensor."""
        count = self.num_tensors
        addresses: list[Any] = []
        key: list[Any] = [settings.policy(), _deterministic(), _products(), args[count:]]
        record = torch.is_grad_enabled()
        try:
            for t in args[:count]:
                if t is None:
                    key.append(None)
                    addresses.append(None)
                    continue
                address = t.data_ptr()
                if type(t) not in _ORDINARY or t.is_neg() or (record and t.requires_grad) or (not address and t.numel()):
                    return None
                key += (t.shape, t.stride(), t.dtype, t.device, address & _LOW)
                addresses.append(address)
        except RuntimeError:  # a wrapper, a sparse tensor: without memory of its own
            return None
        return tuple(key), addresses

    def run(self, key: Any, addresses: list[Any], args: tuple[Any, ...]) -> Any:
        """Find what is remembered of such a call, or choose; then launch."""
        known = self.memo.get(key)
        if known is None:
            known = self.choose_for(args)
            self.keep(key, known)
        return self.launch(known, addresses, args)

    def launch(self, known: _Known, addresses: list[Any] | None, args: tuple[Any, ...]) -> Any:
        """Count the call and do it on the tensors' device: by the plan where there is one, else by the launcher."""
        if known.index is not None and known.index != features.current_device():
            with torch.cuda.device(known.index):
                return self.launch(known, addresses, args)
        counter = known.counter
        counter.calls += 1
        counter.bytes += known.num_bytes
        if known.play is not None and addresses is not None:
            out = known.play(addresses)
            if out is not None:
                return out
        return known.run(args[: self.num_tensors])

    def choose_for(self, args: tuple[Any, ...]) -> _Known:
        """Choose for a call, unless one of the same problem was chosen for."""
        problem, device = self.problem_of(*args), args[0].device
        key = (problem, device, settings.policy(), _deterministic())
        found = self.memo.get(key)
        if found is None:
            schedule.met(self.operator, self.name, problem, args)
            found = self.choose(key, problem, device)
        return _Known(found, problem, device)

    def choose(self, key: Any, problem: Any, device: torch.device) -> Any:
        """Choose, and keep the answer."""
        operator = self.operator
        choice = operator.choice(problem, self.name, backends.device_of(device))
        cost = operator.cost(problem, self.name)
        counter = counter_for(operator.name, self.name, choice_name(choice), choice.reason, choice.rejected, choice.fallback, str(problem))
        found = operator.launcher(choice, self.name), choice.config, counter, cost.bytes
        self.keep(key, found)
        return found

    def keep(self, key: Any, found: Any) -> None:
        """Remember an answer, within a bound."""
        if len(self.memo) >= _MEMO_LIMIT:
            self.forget()
        self.memo[key] = found

    def shorten(self, known: _Known, addresses: list[Any], args: tuple[Any, ...]) -> None:
        """A signature with a plan came by the dictionary, for the first time or again and again: from here on it is tried first."""
        known.played += 1
        tensors, own = args[: self.num_tensors], addresses[: self.num_tensors]
        if known.played % _SHORTEN_EVERY != 1 or not any(own) or any(a and a & _LOW for a in own):
            return
        made = shortening.straight(known.plan, tensors, args[self.num_tensors :], known)
        if made is not None:
            self.short = (made, *self.short[: _SHORT - 1])

    def forget(self) -> None:
        """Drop all answers and what was made of them."""
        self.memo.clear()
        self.short = ()


def _entrance(phase: _Phase, writes: bool = False) -> Callable[..., Any]:
    """How our own code calls an operator: through PyTorch's dispatcher wherever that has something to do or somebody looks at it, else
    straight to what it would find."""
    overload, count, kinds, memo = phase.overload, phase.num_tensors, phase.kinds, phase.memo
    is_compiling, quiet, function_modes, profiled = torch.compiler.is_compiling, features.quiet, features.function_modes, features.profiled

    def enter(*args: Any) -> Any:
        if not (is_compiling() or function_modes() or profiled()):
            for short in phase.short:
                out = short(*args)
                if out is not None:
                    if writes:
                        _written(args[0])
                    return out
        if is_compiling() or not quiet() or tuple(map(type, args[count:])) not in kinds:
            return overload(*args)
        found = phase.signature(args)
        if found is None:
            return overload(*args)
        key, addresses = found
        known = memo.get(key)
        if known is None:
            out = phase.run(key, addresses, args)
        else:
            out = phase.launch(known, addresses, args)
            if known.play is not None:
                phase.shorten(known, addresses, args)
        if writes:
            _written(args[0])
        return out

    return enter


def _written(t: torch.Tensor) -> None:
    """Tell autograd that a kernel wrote into a tensor."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def choice_name(choice: schedule.Choice) -> str:
    """`vendor:cudnn` where the configuration is a name, else the implementation's name."""
    return f"{choice.implementation.name}:{choice.config}" if isinstance(choice.config, str) else choice.implementation.name


class Operator:
    """A catalogue entry: its definition, problem, implementations, and the two dispatcher operators `fwd` and `bwd`."""

    def __init__(self, name: str, package: str, implementations: tuple[str, ...], variant: str) -> None:
        self.name = name
        self.package = package
        self.variant = variant
        self._implementations = tuple(
            Implementation(name, i, f"{package}.{i}{variant}", f"{package}.levels{variant}") for i in implementations
        )
        self.phases: dict[str, _Phase] = {}
        self.fwd: Any = None
        self.bwd: Any = None
        self.public: dict[str, Callable[..., Any]] = {}

    def implementations(self) -> tuple[Implementation, ...]:
        """All implementations, preferred first."""
        return self._implementations

    def file(self, stem: str) -> ModuleType:
        """A module of the operator's folder: `reference`, `problem`, `plain`."""
        return importlib.import_module(f"{self.package}.{stem}{self.variant}")

    def cost(self, problem: Any, phase: str) -> Any:
        """Bytes and operations of a phase, term by term."""
        return self.file("problem").cost(problem, phase)

    def choice(self, problem: Any, phase: str, device: Any) -> schedule.Choice:
        """What the scheduler answers for a problem under the policy in force."""
        policy, posed = settings.policy()._replace(determinism=settings.determinism_level()), problem
        problem = chosen_for(self.levels(), problem, policy.determinism, policy.token_block)
        dtype = self.file("problem").storage(problem)
        record = schedule.record_for(device)
        return schedule.choose(self._implementations, problem, self.cost(problem, phase), dtype, phase, device, policy, record, posed)

    def levels(self) -> Levels:
        """What it promises of its bits; nothing beyond level 1 where it has no `levels` module."""
        found: Levels | None = self._implementations[0].levels
        return NOTHING_STATED if found is None else found

    def launcher(self, choice: schedule.Choice, phase: str) -> Callable[..., Any]:
        """What runs a choice: from level 2 on, piece by piece where the promise needs it."""
        launcher = choice.implementation.launcher(phase)
        if settings.determinism_level() < 2:
            return launcher
        return self.levels().launcher(choice.implementation.name, phase, launcher, settings.policy().token_block)

    def forget(self) -> None:
        """Drop remembered choices (after an implementation was replaced)."""
        for phase in self.phases.values():
            phase.forget()


def _traced(fake: Callable[..., Any], *args: Any) -> Any:
    """The fake, after the formulas that a tracer may ask for next."""
    register_flop_formulas()
    return fake(*args)


@functools.cache
def register_flop_formulas() -> None:
    """Tell PyTorch's FLOP counter what our matrix products cost, without which they look free to recompute.

    Tracing does this by itself. Call it before making a `torch.utils.flop_counter.FlopCounterMode` of your own: that module imports
    Triton, so importing this package does not load it.
    """
    from torch.utils.flop_counter import register_flop_formula

    for name, phase in _PHASES.items():
        register_flop_formula(getattr(torch.ops.ops_math, name), get_raw=True)(functools.partial(_product_flops, phase))


def _product_flops(phase: _Phase, *args: Any, out_val: Any = None, **_: Any) -> int:
    """Operations in matrix products, as PyTorch's counter counts them."""
    cost = phase.operator.cost(phase.problem_of(*args), phase.name)
    return sum(count for term, count in cost.flops if "product" in term)


def count_tensors(schema: str) -> int:
    """How many leading parameters are tensors; the rest must be plain values, since launchers get tensors only."""
    inside = schema[schema.index("(") + 1 : schema.index(")")]
    kinds = [part.split()[0].startswith("Tensor") for part in inside.split(",")]
    count = kinds.index(False) if False in kinds else len(kinds)
    if any(kinds[count:]):
        raise AssertionError(f"tensors come first in a schema: {schema}")
    return count


_KINDS: dict[str, tuple[type, ...]] = {
    "float": (float,), "int": (int,), "SymInt": (int,), "bool": (bool,), "str": (str,), "ScalarType": (torch.dtype,),
    "ScalarType?": (torch.dtype, type(None)),
}  # fmt: skip


def scalar_kinds(schema: str) -> frozenset[tuple[type, ...]]:
    """The Python types that the values after the tensors may have where nothing is left for PyTorch to convert."""
    inside = schema[schema.index("(") + 1 : schema.index(")")]
    types = [part.split()[0] for part in inside.split(",")]
    return frozenset(itertools.product(*(_KINDS[kind] for kind in types if not kind.startswith("Tensor"))))


def define(
    name: str,
    package: str,
    *,
    fwd: str,
    bwd: str,
    fake_fwd: Callable[..., Any],
    fake_bwd: Callable[..., Any],
    problem_fwd: Callable[..., Any],
    problem_bwd: Callable[..., Any],
    implementations: tuple[str, ...],
    variant: str = "",
) -> Operator:
    """Register an operator.

    Args:
        name: its name; `ops_math::NAME_fwd` and `ops_math::NAME_bwd` are registered.
        package: the folder's package, for finding `eager`, `triton_gpu`, ... when they are first needed.
        fwd, bwd: schemas without the name, tensors first: `"(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)"`.
        fake_fwd, fake_bwd: shapes and dtypes of the results, from the same arguments.
        problem_fwd, problem_bwd: the `Problem` of a call, from the same arguments: of tensors their shapes and dtypes only, by which it is
            remembered.
        implementations: module names in the folder, preferred first.
        variant: suffix of the files where two operators share a folder, e.g. `_linear`.
    """
    operator = Operator(name, package, implementations, variant)
    settings.IMPLEMENTATIONS[name] = implementations
    schedule.register(operator)
    for phase_name, schema, fake, problem_of in (("fwd", fwd, fake_fwd, problem_fwd), ("bwd", bwd, fake_bwd, problem_bwd)):
        full = f"{name}_{phase_name}"
        _LIBRARY.define(full + schema, tags=_TAGS)
        phase = _Phase(operator, phase_name, schema, problem_of)
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(full, phase.__call__, key)
        torch.library.register_fake(f"ops_math::{full}", functools.partial(_traced, fake))
        _PHASES[full] = phase
        torch.library.register_vmap(f"ops_math::{full}", functools.partial(refuse_vmap, full))
        phase.overload = getattr(torch.ops.ops_math, full).default
        operator.phases[phase_name] = phase
    operator.fwd, operator.bwd = (_entrance(phase) for phase in (operator.phases["fwd"], operator.phases["bwd"]))
    return operator


def define_in_place(operator: Operator, schema: str, problem_of: Callable[..., Any]) -> Any:
    """Register `ops_math::NAME_inplace`, which writes into its first tensor and returns nothing; launchers are `launch_inplace`.

    It stays private: only who made the tensor, and let nobody else hold it, may call it. The tensor's version is raised, so that
    autograd notices where somebody had saved it after all.
    """
    full = f"{operator.name}_inplace"
    _LIBRARY.define(full + schema, tags=_TAGS)
    phase = _Phase(operator, "inplace", schema.replace("(a!)", ""), problem_of)

    def write(*args: Any) -> None:
        phase(*args)
        _written(args[0])

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(full, write, key)
    torch.library.register_fake(f"ops_math::{full}", lambda *args: None)
    operator.phases["inplace"] = phase
    phase.overload = getattr(torch.ops.ops_math, full).default
    return _entrance(phase, writes=True)


def absent(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The empty tensor that stands for a result that was not asked for (arity is fixed)."""
    return x.new_empty((0,), dtype=dtype or x.dtype)


__all__ = [
    "Operator", "absent", "apply", "choice_name", "define", "define_in_place", "dtype_name", "needs_grad", "once_differentiable",
    "store_dtype",
]  # fmt: skip
