"""The likely cause of a difference, in words, from what is known of the module and of the two tensors.

Each rule looks for the trace that one kind of fault leaves, the surest first. The last one says where to look when none has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops_nn.debug.compare import Comparison, Culprit
from ops_nn.debug.figures import Figures, sketched_alike, step_of
from ops_nn.debug.trace import (
    ENDED,
    FORWARD,
    GRADIENTS,
    INPUT,
    LIGHT,
    OUTPUT_GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    Key,
    Record,
    Trace,
)
from ops_nn.debug.verdict import distance

CLOSE = 0.02  # what is left of a difference that a rule explains
_CAST = 2.0  # units that an input cast to another dtype may be off by; more is another input
SURE = 1e-6  # a formula that reproduces a run's values to this is the run's
_EPS_NAMES = ("eps", "variance_epsilon", "layer_norm_eps", "rms_norm_eps", "epsilon")
_ROTARY_NAMES = ("rope", "rotary", "inv_freq", "theta", "base")
_SCALE_NAMES = ("scale", "scaling")


class Cause(NamedTuple):
    """A likely cause. `kind` is one word or two for a table, `words` a sentence."""

    kind: str
    words: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words}"


class _Case(NamedTuple):
    """What the rules see. `a` and `b` are the records of the tensor, None where a run has it not."""

    culprit: Culprit
    a: Record | None
    b: Record | None
    traces: tuple[Trace, Trace]
    comparison: Comparison

    @property
    def module(self) -> str:
        return self.culprit.key.module

    def facts(self) -> Iterator[tuple[str, Any, Any]]:
        """Facts of the module that differ, and of those inside it that a fused run does not call: name, in A, in B."""
        called = [{call.module for call in t.calls} for t in self.traces]
        for path in self.traces[0].modules:
            inside = path.startswith(f"{self.module}." if self.module else "") and path not in called[0] & called[1]
            if path != self.module and not inside:
                continue
            if path not in self.traces[1].modules:
                continue
            own, other = (t.modules[path]["facts"] for t in self.traces)
            prefix = "" if path == self.module else f"{path.removeprefix(self.module).strip('.')}."
            alike = own.get("class") == other.get("class")  # what another class does not have is no setting of it
            for name in dict.fromkeys((*own, *other)):
                x, y = own.get(name, "absent"), other.get(name, "absent")
                if x != y and (alike or "absent" not in (x, y)):
                    yield prefix + name, x, y

    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """Both tensors, where they were kept."""
        if self.a is None or self.b is None or self.a.tensor is None or self.b.tensor is None or self.a.shape != self.b.shape:
            return None
        return self.a.tensor, self.b.tensor

    def near(self, trace: Trace, direction: str) -> list[Record]:
        """Records of the same call."""
        key = self.culprit.key
        return [r for k, r in trace.records.items() if k[:3] == (key.module, key.call, direction)]


def likely_cause(comparison: Comparison, culprit: Culprit) -> Cause:
    """What most likely made this difference."""
    traces = (comparison.a, comparison.b)
    a, b = (t.records.get(culprit.key) for t in traces)
    case = _Case(culprit, a, b, traces, comparison)
    for rule in _RULES:
        found = rule(case)
        if found is not None:
            return found
    words = "nothing that is known of the module differs; replay it, and look at what its forward calls between its parts"
    return Cause("unknown", words + _in_part(case))


def _in_part(case: _Case) -> str:
    """What is not known of the module's weights, where a trace has read them in part."""
    own = [k for k in case.traces[0].records if k.direction == PARAMETER and k.module == case.module]
    large = any(step_of(case.traces[0].records[key].shape) > 1 for key in own)
    if not large or LIGHT not in (case.traces[0].mode, case.traces[1].mode):
        return ""
    return "; an element of every row of its weights was compared, mode='full' compares all"


def _behind(case: _Case) -> Cause | None:
    """The code between modules sent a module another gradient."""
    if case.culprit.key.direction != OUTPUT_GRADIENT:
        return None
    name = case.module or "the model"
    words = f"the gradient that comes back to {name} is another{_times(case)}, and what the code behind it was given agrees"
    return Cause("code between modules", words + ": a backward or a hook of its own, a scale, or a detach")


def _times(case: _Case) -> str:
    """By which number B is A, where it is one."""
    if case.a is None or case.b is None or not case.b.figures.l2:
        return ""
    k, left = _ratio(case.a, case.b)
    return f", {k:.4g} times A's" if left < CLOSE * abs(k - 1) or (left < 0.1 and not case.culprit.difference.exact) else ""


def _lost(case: _Case) -> Cause | None:
    if case.a is not None and case.b is not None:
        return None
    who = "A" if case.a is None else "B"
    trace = case.traces[case.a is not None]
    if not any(key.direction in GRADIENTS for key in trace.records):
        end = next((f": {note}" for note in trace.notes if note.startswith(ENDED)), "; was loss.backward() called inside the trace?")
        return Cause("no backward", f"{who} saw no backward at all{end}")
    return Cause("cut gradient", f"{who} has no such gradient: detached, frozen, or under no_grad there")


def _tie(case: _Case) -> Cause | None:
    if case.culprit.key.direction != PARAMETER_GRADIENT:
        return None
    full = f"{case.module}.{case.culprit.key.name}".strip(".")
    partners = [{t.ties.get(full, "")} | {name for name, first in t.ties.items() if first == full} for t in case.traces]
    if partners[0] == partners[1]:
        return None
    only = "A" if partners[0] - {""} else "B"
    other = "B" if only == "A" else "A"
    names = ", ".join(sorted((partners[0] | partners[1]) - {""}))
    return Cause("tied weights", f"{full} is one with {names} in {only} and of its own in {other}: the tied gradient is a sum over both")


def _dropped(case: _Case) -> Cause | None:
    for name, x, y in case.facts():
        if (name.endswith(" is") and "none" in (x, y)) or (name == "bias" and False in (x, y)):
            have, lack = ("A", "B") if y in ("none", "absent", False) else ("B", "A")
            what = name.removesuffix(" is")
            return Cause(f"dropped {what}", f"{what} is there in {have} and not in {lack}")
    return None


def _dtype(case: _Case) -> Cause | None:
    for name, x, y in case.facts():
        if name.endswith(" is") and "absent" not in (x, y) and str(x).split()[0] != str(y).split()[0]:
            return Cause("dtype", f"{name.removesuffix(' is')} is {str(x).split()[0]} in A and {str(y).split()[0]} in B")
    for below in sorted(case.traces[0].modules):
        if below.startswith(f"{case.module}.") and below in case.traces[1].modules:
            own, other = (t.modules[below]["facts"] for t in case.traces)
            for name in own:
                x, y = str(own[name]), str(other.get(name, "absent"))
                if name.endswith(" is") and x != y and x.split()[0] != y.split()[0] and "absent" not in (x, y) and "none" not in (x, y):
                    return Cause("dtype", f"{below}.{name.removesuffix(' is')} is {x.split()[0]} in A and {y.split()[0]} in B")
    if case.a is not None and case.b is not None and case.a.dtype != case.b.dtype:
        return Cause("dtype", f"{case.a.dtype} in A and {case.b.dtype} in B")
    return None


def _attribute(case: _Case) -> Cause | None:
    for name, x, y in case.facts():
        last = name.rpartition(".")[2]
        words = f"{name} is {x} in A and {y} in B"
        if last in _EPS_NAMES:
            return Cause("eps", words)
        if last.endswith(_SCALE_NAMES) and "rope" not in last:
            return Cause("scale", words)
        if any(part in last for part in _ROTARY_NAMES):
            return Cause("rotary", words)
        if name == "approximate" or "act" in last.split("_"):
            return Cause("approximation", words)
        if last not in ("class", "forward") and not name.endswith(" is"):
            return Cause("setting", words)
    return None


def _buffer(case: _Case) -> Cause | None:
    """A buffer or parameter that held other values before the step."""
    for key, found in case.comparison.differences.items():
        if key.module != case.module or key.direction != PARAMETER or found.bitwise:
            continue
        if any(part in key.name for part in _ROTARY_NAMES):
            return Cause("rotary", f"{key.name} holds other values, {found.l2:.2g} apart: another base or scaling of positions")
        return Cause("other weights", f"{key.name} held other values before the step, {found.l2:.2g} apart: not the same start")
    return None


def _bf16_values(case: _Case) -> Cause | None:
    """Values that are all numbers of a narrower dtype were rounded to it."""
    if case.a is None or case.b is None or case.a.dtype != case.b.dtype or case.a.dtype not in ("float32", "float64"):
        return None
    for dtype in (torch.bfloat16, torch.float16):
        narrow = [_all_in(record, dtype) for record in (case.a, case.b)]
        if narrow[0] != narrow[1]:
            who, name = ("A" if narrow[0] else "B"), str(dtype).removeprefix("torch.")
            if case.culprit.key.direction == PARAMETER_GRADIENT:
                return Cause(
                    "bf16 accumulation" if dtype is torch.bfloat16 else "fp16 accumulation",
                    f"every element in {who} is a {name} number: summed or stored in {name}",
                )
            return Cause("dtype", f"every element in {who} is a {name} number: computed in {name} there")
    return None


def _all_in(record: Record, dtype: torch.dtype) -> bool:
    """Whether all values, or all samples, are numbers of the dtype; zeros say nothing."""
    values = torch.tensor(record.figures.samples, dtype=torch.float64) if record.tensor is None else record.tensor.double().flatten()
    values = values[(values != 0) & torch.isfinite(values)]
    return values.numel() >= 4 and torch.equal(values, values.to(dtype).double())


def _factor(case: _Case) -> Cause | None:
    if case.a is None or case.b is None or not case.b.figures.l2:
        return None
    k, left = _ratio(case.a, case.b)
    noise = 2 * case.culprit.given + case.culprit.difference.limit
    if left < max(CLOSE * abs(k - 1), min(noise, 0.2 * abs(k - 1))) and abs(k - 1) > 1e-6:
        what = {FORWARD: "result", INPUT: "input"}.get(case.culprit.key.direction, "gradient")
        kind = "sign" if abs(k + 1) < CLOSE else "factor"
        return Cause(kind, f"the {what} in B is {k:.6g} times that in A: a scale, a mean over another count, or a sum taken twice")
    return None


def _ratio(a: Record, b: Record) -> tuple[float, float]:
    if a.tensor is None or b.tensor is None or a.shape != b.shape:
        return a.figures.ratio(b.figures, sketched_alike(math.prod(a.shape), a.torch_dtype, b.torch_dtype))
    x, y = a.tensor.double().flatten(), b.tensor.double().flatten()
    k = (x @ y / (x @ x).clamp_min(1e-300)).item()
    return k, ((y - k * x).norm() / y.norm().clamp_min(1e-300)).item()


def _layout(case: _Case) -> Cause | None:
    """The same values in other places."""
    if case.a is None or case.b is None:
        return None
    pair = case.tensors()
    if pair is not None:
        same = pair[0].dtype == pair[1].dtype and torch.equal(*(t.flatten().sort().values for t in pair))
    else:
        same = case.a.dtype == case.b.dtype and _alike(case.a.figures, case.b.figures)
    if not same:
        return None
    return Cause("layout", "the same values stand in other places: a transpose, a stride that was not honoured, or another order of rows")


def _alike(a: Figures, b: Figures) -> bool:
    return a.max == b.max and abs(a.l2 - b.l2) <= 1e-12 * a.l2 and a.distance(b) > 1e-3


def _random(case: _Case) -> Cause | None:
    """Zeros of dropout at other places."""
    pair = case.tensors()
    if pair is None or case.culprit.key.direction != FORWARD:
        drops = [t.modules[case.module]["facts"].get("p") for t in case.traces if case.module in t.modules]
        if any(drops) and case.traces[0].modules[case.module]["facts"].get("training"):
            return Cause("random stream", "the module draws random numbers, and the two runs drew others: seed both, or use om.Rng")
        return None
    shares = [(t == 0).double().mean().item() for t in pair]
    if min(shares) > 0.02 and abs(shares[0] - shares[1]) < 0.1 and not torch.equal(pair[0] == 0, pair[1] == 0):
        return Cause("random stream", "zeros stand at other places in each run: two draws of a dropout mask; seed both, or use om.Rng")
    return None


def _gelu(case: _Case) -> Cause | None:
    """One run is reproduced by the exact GELU of a value it was seen to have, the other by its tanh form."""
    pair = case.tensors()
    if pair is None or case.culprit.key.direction != FORWARD:
        return None
    for key, record in case.traces[0].records.items():
        inner = key.module.startswith(f"{case.module}.") and key.direction == FORWARD
        own = key.module == case.module and key.direction == INPUT
        if key.call != case.culprit.key.call or not (inner or own) or record.tensor is None or record.shape != tuple(pair[0].shape):
            continue
        h = record.tensor.double()
        exact, tanh = F.gelu(h), F.gelu(h, approximate="tanh")
        apart = distance(exact, tanh)[0]
        fits = [[distance(form, y.double())[0] < 0.1 * apart for y in pair] for form in (exact, tanh)]
        if fits == [[True, False], [False, True]]:
            return Cause("tanh GELU", "A has the exact GELU of its input, B the tanh approximation")
        if fits == [[False, True], [True, False]]:
            return Cause("tanh GELU", "A has the tanh approximation of GELU, B the exact one")
    return None


def _positions(case: _Case) -> Cause | None:
    """Errors at some positions of the sequence only."""
    pair = case.tensors()
    if pair is None or pair[0].dim() < 2 or case.culprit.key.direction == PARAMETER_GRADIENT:
        return None
    a, b = (t.double() for t in pair)
    at = 1 if a.dim() > 2 else 0
    others = [d for d in range(a.dim()) if d != at]
    share = (a - b).square().sum(others).sqrt() / a.square().sum(others).sqrt().clamp_min(1e-300)
    limit = max(case.culprit.difference.limit, 1e-12)
    wrong = (share > limit).nonzero().flatten().tolist()
    count = share.numel()
    if not wrong or len(wrong) == count:
        return None
    where = f"position {wrong[0]}" if len(wrong) == 1 else f"{len(wrong)} positions, {wrong[0]} to {wrong[-1]}"
    if len(wrong) <= max(count // 4, 1):
        last = " (the last)" if wrong == [count - 1] else ""
        return Cause("mask", f"only {where}{last} of {count} differ: a mask that is off by one, a length, or a tile that was left out")
    if wrong[0] > 0 and wrong[-1] == count - 1:
        return Cause(
            "scale of attention",
            f"{where} of {count} differ and those before, which see one key, agree: the scale of the scores, rotary angles, or the mask",
        )
    return None


def _rows_scaled(case: _Case) -> Cause | None:
    """Each row is a multiple of the other run's."""
    pair = case.tensors()
    if pair is None or pair[0].dim() < 2 or pair[0].shape[-1] < 8:
        return None
    a, b = (t.double().reshape(-1, t.shape[-1]) for t in pair)
    k = (a * b).sum(1, keepdim=True) / a.square().sum(1, keepdim=True).clamp_min(1e-300)
    left = (b - k * a).norm() / (b - a).norm().clamp_min(1e-300)
    if left < CLOSE:
        return Cause("eps", f"each row is scaled, by {k.min():.6g} to {k.max():.6g}: an eps or a statistic of the norm")
    return None


def _built(case: _Case) -> Cause | None:
    """The two modules are not built alike: another class, or a part that only one has."""
    known = [t.modules for t in case.traces]
    inside = f"{case.module}." if case.module else ""
    for path in dict.fromkeys((*known[0], *known[1])):
        if path != case.module and not (path.startswith(inside) and path):
            continue
        own, other = (m[path]["facts"]["class"] if path in m else "" for m in known)
        if own and other and own != other:
            return Cause("another module", f"{path or 'the model'} is {own} in A and {other} in B")
        if own != other:
            return Cause("another module", f"{path} ({own or other}) is in {'A' if own else 'B'} only")
    return None


def _order(case: _Case) -> Cause | None:
    found = case.culprit.difference
    if found.l2 <= 30 * found.limit:
        return Cause(
            "reduction order",
            "small and without pattern: sums in another order or of another precision; lockstep with float64 says which is nearer"
            + _in_part(case),
        )
    return None


_RULES: tuple[Callable[[_Case], Cause | None], ...] = (
    _behind,
    _lost, _tie, _dropped, _dtype, _attribute, _buffer, _bf16_values, _random, _gelu, _factor, _layout, _positions, _rows_scaled, _order,
    _built,
)  # fmt: skip


def first_given(comparison: Comparison) -> Cause | None:
    """A difference in what the runs were given, which explains what follows: the batch, or the loss behind the model."""
    calls = comparison.a.calls
    if not calls:
        return None
    for key, found in comparison.differences.items():
        if key[:3] == (calls[0].module, calls[0].number, INPUT) and not found.bitwise:
            pair = [trace.records[key].torch_dtype for trace in (comparison.a, comparison.b)]
            rounded = max((_CAST * torch.finfo(dtype).eps for dtype in pair if dtype.is_floating_point), default=0.0)
            if found.l2 > max(found.limit, rounded if pair[0] != pair[1] else 0.0):
                what = f"input {key.name}" if key.name.isdigit() else key.name or "input"
                return Cause("data", f"{key.module or 'the model'} was given another {what}: another batch, or another order of the data")
    behind = comparison.another_loss()
    if behind is None:
        return None
    a, b = (t.records[behind] for t in (comparison.a, comparison.b))
    times = _times(_Case(Culprit(behind, comparison.differences[behind], 0.0), a, b, (comparison.a, comparison.b), comparison))
    what = f"the gradient that came back to {behind.module or 'the model'} is another{times}, and what it returned agrees"
    return Cause("loss", f"{what}: other labels, another loss, or another scale of it")


__all__ = ["Cause", "Key", "first_given", "likely_cause"]
