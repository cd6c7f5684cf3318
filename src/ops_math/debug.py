"""om.debug: run fused calls both ways, forward and backward, and hold the fused way to the error budget, call site by call site.

Three runs of a sampled call: ours; plain PyTorch in the same dtype and with the same random numbers; and plain PyTorch in float64,
which says how wrong each of the first two is. The call's place in the graph is taken by one autograd node, whose backward runs the three
backwards, so gradients are compared when the real ones arrive. What training sees is what ours computed.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from ops_math import checks, keywords, settings
from ops_math.catalog import public_functions
from ops_math.live_budget import judge, nudged
from ops_math.rng import Rng, state_for

F = TypeVar("F", bound=Callable[..., Any])
_OWN_PACKAGES = ("ops_math.", "ops_nn.", "torch.")
_CHANCES = ("dropout_p", "p")

Tensors = dict[str, torch.Tensor]


class Site(NamedTuple):
    """Where a call stands: function, file and line of the caller outside these packages, and the module it belongs to."""

    call: str
    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.call} at {self.file}:{self.line}" + (f" in {self.module}" if self.module else "")


class Row(NamedTuple):
    """The worst that was seen of one output or gradient at one call site.

    `share` is the error over its limit: above 1 it is outside its budget. `statistic` says which of the budget's statistics that was
    (max, l2, gain, rows, size); `error` and `limit` are its values, `plain` that of plain PyTorch in the same dtype.
    """

    site: Site
    output: str
    calls: int
    share: float
    statistic: str
    error: float
    plain: float
    limit: float

    @property
    def outside(self) -> bool:
        """Whether the error passed its limit."""
        return not self.share <= 1.0

    def __str__(self) -> str:
        return (
            f"{self.site}: {self.output}: {self.statistic} error {self.error:.3g}, plain PyTorch's {self.plain:.3g}, limit {self.limit:.3g}"
        )


class Report(NamedTuple):
    """What a debugger saw, the worst first; `skipped` are calls that could not be compared, with the reason."""

    rows: tuple[Row, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def outside(self) -> tuple[Row, ...]:
        """The rows outside their budget."""
        return tuple(row for row in self.rows if row.outside)

    def __str__(self) -> str:
        if not self.rows:
            return "no fused call was compared"
        sites = len({row.site for row in self.rows})
        head = f"{len(self.rows)} outputs and gradients compared at {sites} call sites, {len(self.outside)} outside their budget"
        worst = [f"{'OUTSIDE' if row.outside else 'ok':8}{row.share:8.2f} of its limit  {row}" for row in self.rows[:20]]
        left = [f"... and {len(self.rows) - 20} more within their budget"] if len(self.rows) > 20 else []
        return "\n".join([head, *worst, *left, *(f"skipped  {call}: {why}" for call, why in self.skipped)])


class Comparable(NamedTuple):
    """A fused call that can be run three ways: each way takes the inputs by name and returns the results.

    `inputs` are floating tensors that may need gradients; `held` are parameters, which the ways read from their modules; `exact` gets
    both in float64.
    """

    site: Site
    ours: Callable[[Tensors], Any]
    plain: Callable[[Tensors], Any]
    exact: Callable[[Tensors, Tensors], Any]
    inputs: Tensors
    held: Tensors


class _Run(NamedTuple):
    """One way's results, and what its gradients are asked for."""

    results: tuple[torch.Tensor, ...]
    sources: tuple[torch.Tensor, ...]

    def gradients(self, dys: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """The gradient of each source that has one."""
        pairs = [(y, dy.to(y.dtype)) for y, dy in zip(self.results, dys, strict=True) if y.requires_grad]
        wanted = [t for t in self.sources if t.requires_grad]
        if not pairs or not wanted:
            return (None,) * len(self.sources)
        ys, weights = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(ys, wanted, weights, retain_graph=True, allow_unused=True))
        return tuple(next(found) if t.requires_grad else None for t in self.sources)


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, tuple) else (results,)


def _output_names(results: Sequence[torch.Tensor]) -> list[str]:
    return ["output"] if len(results) == 1 else [f"output {i}" for i in range(len(results))]


def _copies(tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> Tensors:
    """Detached and changed, and requiring gradients as the originals do."""
    return {name: change(t.detach()).requires_grad_(t.requires_grad) for name, t in tensors.items()}


def _exactly(call: Comparable, change: Callable[[torch.Tensor], torch.Tensor]) -> _Run:
    own, held = _copies(call.inputs, change), _copies(call.held, change)
    return _Run(_tuple(call.exact(own, held)), (*own.values(), *held.values()))


class _Observed(torch.autograd.Function):
    """A call that is run three ways, in the graph as one node."""

    @staticmethod
    def forward(ctx: Any, debugger: Debugger, call: Comparable, shape_of: list[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            own = _copies(call.inputs)
            results = call.ours(own)
            shape_of.append(results)
            ours = _Run(_tuple(results), (*own.values(), *call.held.values()))
            ctx.others = debugger.replay(call)
        ctx.debugger, ctx.call, ctx.ours = debugger, call, ours
        if ctx.others is not None:
            debugger.compare(call, _output_names(ours.results), ours.results, *(run.results for run in ctx.others))
        ctx.mark_non_differentiable(*(y for y in ours.results if not y.requires_grad))
        return tuple(y.detach() for y in ours.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
        grads = ctx.ours.gradients(dys)
        if ctx.others is not None:
            columns = [grads, *(run.gradients(dys) for run in ctx.others)]
            names = [f"gradient of {n}" for n in (*ctx.call.inputs, *ctx.call.held)]
            rows = [row for row in zip(names, ctx.ours.sources, *columns, strict=True) if any(g is not None for g in row[2:])]
            if rows:  # a gradient that only one of them lacks is a zero that should not be one
                found = [[torch.zeros_like(row[1]) if g is None else g for g in row[2:]] for row in rows]
                ctx.debugger.compare(ctx.call, [row[0] for row in rows], *zip(*found, strict=True))
        return (None, None, None, *grads)


class Debugger:
    """What `om.debug(...)` returns: a switch (on at once, a context manager too) with a `report()`."""

    def __init__(self, tolerance: float, every: int, on_error: str, skip: tuple[str, ...]) -> None:
        self.tolerance, self.every, self.on_error, self.skip = tolerance, every, on_error, skip
        self._before = settings.STATE.debug
        self.busy = False
        self._counts: dict[Site, int] = {}
        self._rows: dict[tuple[Site, str], Row] = {}
        self._skipped: dict[str, str] = {}

    def __enter__(self) -> Debugger:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.off()

    def off(self) -> None:
        """Stop observing; the report stays."""
        settings.STATE.debug = self._before

    def report(self) -> Report:
        """What was seen so far, the worst first."""
        return Report(
            tuple(sorted(self._rows.values(), key=lambda r: (r.share != r.share, r.share), reverse=True)), tuple(self._skipped.items())
        )

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a public operator, observed where its turn has come."""
        name = function.__name__
        if self.busy or name in self.skip or not settings.active() or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        site = site_of(name)
        if not self._due(site):
            return function(*args, **kwargs)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.arguments = _with_rng(name, bound.arguments)
        inputs = {n: v for n, v in bound.arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}

        def way(run: Any) -> Any:
            def call(own: Tensors, held: Tensors | None = None) -> Any:
                given = inspect.BoundArguments(bound.signature, {**bound.arguments, **own})
                return run(*given.args, **given.kwargs)

            return call

        folder = public_functions()[name]
        plain, exact = getattr(folder.file("plain"), name), getattr(folder.file("reference"), name)
        return self.run(Comparable(site, way(function), way(plain), way(exact), inputs, {}))

    def block(self, name: str, module: Any, ways: Callable[[], tuple[Any, Any, Any, Tensors, Tensors] | None]) -> Any:
        """Run a block, observed where its turn has come and it has `ways`, the fields of a `Comparable`; else None."""
        if self.busy or name in self.skip or not settings.active() or torch.compiler.is_compiling():
            return None
        site = site_of(name, module)
        found = ways() if self._due(site) else None
        return None if found is None else self.run(Comparable(site, *found))

    def _due(self, site: Site) -> bool:
        count = self._counts[site] = self._counts.get(site, 0) + 1
        return (count - 1) % self.every == 0

    def run(self, call: Comparable) -> Any:
        """Run a call three ways; what comes back is ours."""
        before, self.busy = self.busy, True
        try:
            tensors = (*call.inputs.values(), *call.held.values())
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                shape_of: list[Any] = []
                found = _Observed.apply(self, call, shape_of, *tensors)
                return _like(shape_of[0], found)
            results = call.ours(call.inputs)
            others = self.replay(call)
            if others is not None:
                ours = _tuple(results)
                self.compare(call, _output_names(ours), ours, *(run.results for run in others))
            return results
        finally:
            self.busy = before

    def replay(self, call: Comparable) -> tuple[_Run, _Run, _Run] | None:
        """The plain run, the float64 run and one on nudged inputs; None, and noted, where PyTorch refuses or memory does not suffice."""
        try:
            with settings.enabled(False):
                own = _copies(call.inputs)
                try:
                    plain = _Run(_tuple(call.plain(own)), (*own.values(), *call.held.values()))
                except (RuntimeError, ValueError) as error:
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
                    self._skipped[str(call.site)] = f"plain PyTorch refuses it: {str(error).splitlines()[0]}"
                    return None
                device = next(iter({**call.inputs, **call.held}.values())).device.type
                with torch.autocast(device, enabled=False):
                    exact, moved = _exactly(call, torch.Tensor.double), _exactly(call, nudged)
        except torch.OutOfMemoryError as error:
            self._skipped[str(call.site)] = f"no memory for the replay: {str(error).splitlines()[0]}"
            return None
        return plain, exact, moved

    def compare(self, call: Comparable, names: list[str], ours: Any, plain: Any, exact: Any, moved: Any) -> None:
        """Hold results to their budget; keep the worst of each; warn or raise."""
        site, outside = call.site, []
        narrow = any(t.dtype in (torch.bfloat16, torch.float16) for t in (*call.inputs.values(), *call.held.values()))
        for name, worst in zip(names, judge(ours, plain, exact, moved, self.tolerance, narrow), strict=True):
            old = self._rows.get((site, name))
            row = Row(site, name, 1 if old is None else old.calls + 1, *worst)
            share = row.share
            keep = row if old is None or not share <= old.share else old._replace(calls=row.calls)
            self._rows[site, name] = keep
            if row.outside:
                outside.append(row)
        if not outside or self.on_error == "record":
            return
        if self.on_error == "raise":
            checks.outside_budget("\n".join(str(row) for row in outside))
        for row in outside:
            warnings.warn(f"outside its error budget: {row}", stacklevel=2)


def _like(shape: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """The tensors in the form in which the call returned them."""
    if not isinstance(shape, tuple):
        return tensors[0]
    return type(shape)(*tensors) if hasattr(shape, "_fields") else tuple(tensors)


def _with_rng(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """With random numbers named, so that all ways draw the same; the key comes from PyTorch's generator as it would have."""
    if any(arguments.get(chance) for chance in _CHANCES) and arguments.get("rng") is None:
        device = next(v.device for v in arguments.values() if isinstance(v, torch.Tensor))
        return {**arguments, "rng": Rng.of_state(state_for(name, None, device))}
    return arguments


def site_of(call: str, module: Any = None) -> Site:
    """The first frame outside these packages, and the path of `module`, or of the module whose forward calls, in the outermost one."""
    frame: Any = sys._getframe(2)
    caller, inner, outer = None, module, None
    while frame is not None:
        if caller is None and not str(frame.f_globals.get("__name__", "")).startswith(_OWN_PACKAGES):
            caller = frame
        owner = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames[:1] else None
        if isinstance(owner, nn.Module):
            inner, outer = owner if inner is None else inner, owner
        frame = frame.f_back
    file, line = (caller.f_code.co_filename, caller.f_lineno) if caller is not None else ("?", 0)
    return Site(call, file, line, _path(inner, outer))


def _path(inner: Any, outer: Any) -> str:
    if inner is None or inner is outer:
        return type(inner).__name__ if inner is not None else ""
    if outer is not None:
        for path, module in outer.named_modules():
            if module is inner:
                return path
    return type(inner).__name__


def observed(function: F) -> F:
    """The public face of an operator: itself, seen by `om.debug` where that is on, and saying in words what is wrong with how it
    was called."""
    takes = keywords.taken(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if is_dynamo_compiling():  # it binds arguments itself, in its own words
                keywords.traced(function, takes, args, kwargs)
            if settings.STATE.debug is None:
                return function(*args, **kwargs)
            return settings.STATE.debug.operator(function, args, kwargs)
        except checks.ArgumentError:
            raise
        except keywords.FAILURES:
            keywords.explain(function, args, kwargs)
            raise

    return call  # type: ignore[return-value]


def debug(*, tolerance: float = 2.0, every: int = 1, on_error: str = "warn", skip: tuple[str, ...] = ()) -> Debugger:
    """Run fused calls both ways, forward and backward, and compare; on from now, or within a `with`.

    Args:
        tolerance: a multiple of the error budget that the operators' own tests hold them to: a few times the error of plain PyTorch in
            the same dtype, both measured against float64, plus the rounding of the result.
        every: compare the first of so many calls at each call site.
        on_error: what to do outside the budget: `warn`, `raise` (a `BudgetError`), or `record` for the report alone.
        skip: names of functions that are not compared, e.g. `("linear_cross_entropy",)` where whole float64 logits would not fit.

    Returns:
        a `Debugger`: `.report()` for the worst error of each output and gradient at each call site, `.off()` to stop.

    Raises: ArgumentError for a tolerance or `every` that is not positive, or an unknown `on_error`.
    """
    checks.positive("debug", "tolerance", tolerance)
    checks.positive("debug", "every", every)
    checks.one_of("debug", "on_error", on_error, ("warn", "raise", "record"))
    settings.policy()
    made = Debugger(tolerance, every, on_error, skip)
    settings.STATE.debug = made
    return made
