"""What `verify` asks of a function. Each probe takes the judge of one case and yields what is wrong, by output or gradient.

A probe that the function answers with an exception yields nothing: `attempt` in `verify` decides whether that is a refusal or a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ops_math.spec import Call
from ops_math.testing.budget import FEW, UNIT
from ops_math.testing.conformance import LAYOUTS, expanded, poisoned
from ops_math.testing.diagnosis import in_words, one_gradient_for_all
from ops_math.testing.inputs import Result, as_leaves, is_floating, output_gradients
from ops_math.testing.measure import SEEDS, widened
from ops_math.testing.subject import REFUSALS, CallJudge, floating_outputs, in_one_line

SIGMAS = 6.0  # a fair coin is this far off once in half a billion throws of all its coins
# Two roundings, one after the other, lean by up to 3 % of the elements (measured on silu(g) * u in bf16); truncation by 25 to 50 %.
LEANING = 0.05
FAR_OUT = 10.0  # limits: an error that small may be within them by luck when output gradients are others


class Wrong(NamedTuple):
    """Something wrong with one output or gradient (`output` is empty where it is the call as a whole); `share` is its error in limits."""

    check: str
    output: str
    words: str
    share: float = 0.0


Probe = Callable[[CallJudge], Iterator[Wrong]]


def values(judge: CallJudge) -> Iterator[Wrong]:
    """Outputs and gradients are within the budget against float64, on several draws, with an output gradient of its own in every row."""
    oracle = judge.oracles[SEEDS[0]]
    if len(judge.first.outputs) != len(oracle.outputs):
        yield Wrong("values", "", f"returns {len(judge.first.outputs)} floating tensors, the reference {len(oracle.outputs)}")
        return
    for i in oracle.differentiable:
        if i not in judge.first.differentiable:
            yield Wrong("values", f"out{i}", "has no graph: every gradient through it would be lost without an error")
    seen: dict[str, tuple[float, Wrong]] = {}
    for seed, result in judge.runs.items():
        for broken in judge.budget.broken(result.values, judge.oracles[seed].values):
            i = result.names.index(broken.output)
            share = broken.share if broken.share == broken.share else math.inf
            if broken.output not in seen or share > seen[broken.output][0]:
                y, r = result.values[i], judge.oracles[seed].values[i]
                words = f"{in_words(y, r)} ({broken.statistic} error {broken.value:.3g}, limit {broken.limit:.3g})"
                if broken.output.startswith("d") and share > FAR_OUT and one_gradient_for_all(judge, broken.output):
                    words = f"uses one row's output gradient for every row: right where all are equal. Here it {words}"
                seen[broken.output] = share, Wrong("values", broken.output, words, share)
    yield from (wrong for _, wrong in seen.values())


def bias(judge: CallJudge) -> Iterator[Wrong]:
    """Rounding errors of 16-bit results are as often up as down, and as often away from zero as towards it."""
    if UNIT[judge.rounded] <= UNIT[torch.float32]:
        return
    runs = [(judge.runs[s], judge.yardsticks[s], judge.oracles[s]) for s in SEEDS]
    wrong = {broken.output for broken in judge.verdict()}  # whose errors are not rounding
    for i, name in enumerate(runs[0][0].names):
        if name in wrong:
            continue
        dtype, elements = runs[0][0].values[i].dtype, runs[0][0].values[i].numel()
        if elements < FEW or UNIT[dtype] <= UNIT[torch.float32]:
            continue
        ours, usual = (_leaning([(run[k].values[i], run[2].values[i]) for run in runs]) for k in (0, 1))
        for way, towards, against in (("up", "up", "down"), ("size", "away from zero", "towards zero")):
            sigmas, share = ours[way]
            if abs(sigmas) > SIGMAS + 2 * abs(usual[way][0]) and abs(share - 0.5) > LEANING + 2 * abs(usual[way][1] - 0.5):
                words = f"rounds {towards if sigmas > 0 else against} in {max(share, 1 - share):.0%} of {elements} elements a draw"
                yield Wrong("rounding bias", name, f"{words}: {abs(sigmas):.0f} standard deviations from a fair coin")


def _leaning(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, tuple[float, float]]:
    """Standard deviations from a fair coin and share of errors upwards, and away from zero."""
    e = torch.cat([(y.double() - r).reshape(-1) for y, r in pairs])
    sign = torch.cat([r.sign().reshape(-1) for _, r in pairs])
    found = {}
    for way, v in (("up", e), ("size", e * sign)):
        heads, count = int((v > 0).sum()), int((v != 0).sum())
        found[way] = ((2 * heads - count) / math.sqrt(count), heads / count) if count else (0.0, 0.5)
    return found


def layouts(judge: CallJudge) -> Iterator[Wrong]:
    """Other strides of inputs and of output gradients change nothing beyond the order of sums."""
    oracle = judge.oracles[SEEDS[0]].values
    wrong = {broken.output for broken in judge.verdict()}  # whatever their strides
    for what, change in LAYOUTS.items():
        for option, whose in (("change", "inputs"), ("change_gradient", "output gradients")):
            try:
                result = judge.run(SEEDS[0], **{option: change})
            except REFUSALS as error:
                yield Wrong("refuses", "", f"{whose} {what}: {in_one_line(error)}")
                continue
            for broken in [b for b in judge.budget.broken(result.values, oracle) if b.output not in wrong]:
                at = result.names.index(broken.output)
                words = in_words(result.values[at], oracle[at])
                yield Wrong(f"{whose} {what}", broken.output, f"{words} where they are {what} (as views of the same numbers)")
                break
    for option, whose, change in (("change_gradient", "output gradients", expanded), ("change", "inputs", first_row_expanded)):
        try:
            stretched, copied = judge.run(SEEDS[0], **{option: change}), judge.run(SEEDS[0], **{option: _copied(change)})
        except REFUSALS as error:
            yield Wrong("refuses", "", f"{whose} expanded: {in_one_line(error)}")
            continue
        yield from _differing(
            f"{whose} expanded", copied, stretched, 4 * UNIT[judge.rounded], "with stride 0, as `.sum().backward()` gives"
        )


def first_row_expanded(t: torch.Tensor) -> torch.Tensor:
    """The first row for all rows, with stride zero."""
    return t[:1].expand(t.shape) if t.dim() > 1 and t.shape[0] else t


def _copied(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: change(t).clone(memory_format=torch.contiguous_format)


def far_apart(t: torch.Tensor) -> torch.Tensor:
    """The same values with rows so far apart that the last one's offset passes 2^31 elements; the memory between is not touched."""
    if t.dim() < 2 or t.shape[0] < 2 or not t.numel():
        return t
    stride = -(-(2**31) // (t.shape[0] - 1))
    wide = torch.empty((t.shape[0] - 1) * stride + t[0].numel(), dtype=t.dtype, device=t.device)
    view = wide.as_strided(t.shape, (stride, *t[0].contiguous().stride()))
    return view.copy_(t)


def far_strides(judge: CallJudge) -> Iterator[Wrong]:
    """Offsets past 2^31 elements."""
    oracle = judge.oracles[SEEDS[0]].values
    for option, whose in (("change", "inputs"), ("change_gradient", "output gradients")):
        try:
            result = judge.run(SEEDS[0], **{option: far_apart})
        except REFUSALS as error:
            yield Wrong("refuses", "", f"{whose} with offsets past 2^31: {in_one_line(error)}")
            continue
        for broken in judge.budget.broken(result.values, oracle)[:1]:
            yield Wrong(f"{whose} far apart", broken.output, "is wrong where a row lies 2^31 elements behind the first")


def _differing(check: str, first: Result, second: Result, units: float, why: str) -> Iterator[Wrong]:
    """Results that differ by more than `units` of the largest value of their own."""
    for name, a, b in zip(first.names, first.values, second.values, strict=True):
        if a.shape != b.shape:
            yield Wrong(check, name, f"has another shape {why}")
        elif a.numel():
            gap = torch.where(_same(a, b), torch.zeros_like(a), a - b).abs().max().item()
            if not gap <= units * max(x.abs().max().item() for x in first.values if x.numel()):
                yield Wrong(check, name, f"differs by {gap:.3g} {why}")


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _other_bits(check: str, first: Result, second: Result, why: str) -> Iterator[Wrong]:
    for name, a, b in zip(first.names, first.values, second.values, strict=True):
        if a.shape != b.shape or not bool(_same(a, b).all()):
            count = int((~_same(a, b)).sum()) if a.shape == b.shape else a.numel()
            yield Wrong(check, name, f"{count} of {a.numel()} elements {why}")


def repeats(judge: CallJudge) -> Iterator[Wrong]:
    """The same call gives the same bits."""
    for _ in range(3):
        yield from _other_bits("repeats", judge.first, judge.run(SEEDS[0]), "differ between two runs of one call")


def poison(judge: CallJudge) -> Iterator[Wrong]:
    """Every element of every result is written: fresh buffers full of NaN change nothing."""
    with poisoned():
        seen = judge.run(SEEDS[0])
    yield from _other_bits("unwritten memory", judge.first, seen, "are read from memory that was never written (fresh buffers held NaN)")


def graph(judge: CallJudge) -> Iterator[Wrong]:
    """Inputs and output gradients stay as they were, a second backward gives the same bits, and `no_grad` gives the same values."""
    call, leaves = as_leaves(judge.call(SEEDS[0]), judge.case.frozen, lambda t: t)
    tensors = {k: v for k, v in [*enumerate(call.args), *call.kwargs.items()] if isinstance(v, torch.Tensor)}
    before = {k: v.detach().clone() for k, v in tensors.items()}
    op = judge.subject.op
    outs = floating_outputs(op(*call.args, **call.kwargs))
    learning = [o for o in outs if o.requires_grad]
    if learning and leaves:
        fed = output_gradients(outs, [i for i, o in enumerate(outs) if o.requires_grad], SEEDS[0], judge.rounded)
        kept = [g.clone() for g in fed]
        first = _kept(torch.autograd.grad(learning, list(leaves.values()), fed, retain_graph=True, allow_unused=True))
        yield from (
            Wrong("output gradients kept", "", "the backward overwrites the incoming gradient, which another layer may have saved")
            for a, b in zip(kept, fed, strict=True)
            if not bool(_same(a, b).all())
        )
        second = torch.autograd.grad(learning, list(leaves.values()), [g.clone() for g in kept], allow_unused=True)
        for name, a, b in zip(leaves, first, second, strict=True):
            if a is not None and not bool(_same(a, b).all()):
                yield Wrong("second backward", name, "differs in a second backward over the same graph")
    for key, old in before.items():
        if not bool(_same(old, tensors[key].detach()).all() if old.is_floating_point() else torch.equal(old, tensors[key])):
            yield Wrong("inputs kept", f"{key}", "this input was written to")
    with torch.no_grad():
        silent = floating_outputs(op(*judge.call(SEEDS[0]).args, **judge.call(SEEDS[0]).kwargs))
    for i, (a, b) in enumerate(zip(silent, judge.first.outputs, strict=True)):
        if not bool(_same(a, b).all()) and not (a - b).abs().max() <= 4 * UNIT[a.dtype] * b.abs().max():
            yield Wrong("no_grad", f"out{i}", "has other values under no_grad")


def _kept(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if g is None else g.clone() for g in gradients]


def alone(judge: CallJudge) -> Iterator[Wrong]:
    """An input that alone needs a gradient gets the one that it gets beside the others."""
    call = judge.call(SEEDS[0])
    items: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    learning = [k for k, v in items if is_floating(v) and k not in judge.case.frozen]
    for key in learning if len(learning) > 1 else []:
        case = judge.case._replace(frozen=(*judge.case.frozen, *(k for k in learning if k != key)))
        only = CallJudge.run(_Frozen(judge, case), SEEDS[0])  # type: ignore[arg-type]
        if only.differentiable != judge.first.differentiable:
            continue  # an output that does not depend on this input gets no gradient, which changes the sum
        want, got = judge.first.values[judge.first.names.index(f"d{key}")], only.values[-1]
        if got.shape != want.shape or (want.numel() and not (want - got).abs().max() <= 4 * UNIT[want.dtype] * want.abs().max()):
            yield Wrong("one gradient alone", f"d{key}", "is another one when no other input needs a gradient")


class _Frozen(NamedTuple):
    """A judge's call with other inputs frozen."""

    judge: CallJudge
    case: Any

    @property
    def subject(self) -> Any:
        """The judge's."""
        return self.judge.subject

    @property
    def rounded(self) -> torch.dtype:
        """The judge's."""
        return self.judge.rounded

    def call(self, seed: int) -> Call:
        """The judge's."""
        return self.judge.call(seed)


def compiled(backend: str) -> Probe:
    """A probe: `torch.compile` with a backend stays within the budget."""

    def probe(judge: CallJudge) -> Iterator[Wrong]:
        torch._dynamo.reset()
        result = judge.run(SEEDS[0], torch.compile(judge.subject.op, backend=backend))
        for broken in judge.budget.broken(result.values, judge.oracles[SEEDS[0]].values):
            yield Wrong(f"compiled by {backend}", broken.output, f"{broken.statistic} error {broken.value:.3g}, limit {broken.limit:.3g}")

    return probe


def form(judge: CallJudge) -> Iterator[Wrong]:
    """The function returns what the reference returns: one value or as many, and none in a narrower dtype than the reference and the inputs
    have, since the budget is that of the dtype that a result is stored in."""
    call = judge.call(SEEDS[0])
    with torch.no_grad():
        own = judge.subject.op(*call.args, **call.kwargs)
        try:
            other = judge.subject.reference(*call.args, **call.kwargs)
        except REFUSALS:  # a definition that takes no mixed dtypes
            wide, _ = as_leaves(call, judge.case.frozen, widened)
            other = judge.subject.reference(*wide.args, **wide.kwargs)
    if _shape_of(own) != _shape_of(other):
        yield Wrong("form", "", f"returns {_shape_of(own)}, the reference {_shape_of(other)}")
        return
    units = [torch.finfo(v.dtype).eps for v in (*call.args, *call.kwargs.values()) if is_floating(v)]
    for i, (a, b) in enumerate(zip(floating_outputs(own), floating_outputs(other), strict=False)):
        if torch.finfo(a.dtype).eps > max(torch.finfo(b.dtype).eps, *units, 0.0):
            yield Wrong("form", f"out{i}", f"is stored in {a.dtype}, which holds less than the inputs and the reference's {b.dtype}")


def _shape_of(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        return f"{len(returned)} values in a {'list' if isinstance(returned, list) else 'tuple'}"
    return "one tensor" if isinstance(returned, torch.Tensor) else f"one {type(returned).__name__}"


OF_EVERY_CASE: dict[str, Probe] = {"values": values, "rounding bias": bias}
OF_PLAIN_CASES: dict[str, Probe] = {
    "form": form,
    "strides": layouts,
    "repeats": repeats,
    "unwritten memory": poison,
    "graph": graph,
    "one gradient alone": alone,
}
