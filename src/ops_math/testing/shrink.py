"""The smallest input that still fails, and a few lines of Python that show it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from ops_math.spec import DTYPE_OF
from ops_math.testing.inputs import Draw
from ops_math.testing.probes import Probe, Wrong
from ops_math.testing.subject import CRASHES, REFUSALS, CallJudge, Posed, Subject, as_call, unanswered

LADDER = (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 129, 256, 257, 512, 1024)


class Sought(NamedTuple):
    """What must still be found: the same output wrong by the same check in the same way, for NaN is another fault than a wrong number."""

    check: str
    output: str
    not_finite: bool

    @classmethod
    def of(cls, wrong: Wrong) -> Sought:
        """What was found once."""
        return cls(wrong.check, wrong.output, "not finite" in wrong.words)


class Shrunk(NamedTuple):
    """A case that fails, and how many were tried on the way to it."""

    posed: Posed
    tried: int


def shrink(subject: Subject, posed: Posed, dtype: str, device: str, sought: Sought, probe: Probe, most: int = 60) -> Shrunk:
    """The case with its sizes made as small as they get while the same check still finds the same output wrong.

    Each size in turn takes the least value of a ladder at which the check fails, until none gets smaller; at most `most` cases are tried.
    """
    tried = 0
    posed = _plainer(subject, posed, dtype, device, sought, probe)
    smaller = True
    while smaller and tried < most:
        smaller = False
        for name, size in posed.sizes:
            for candidate in [n for n in LADDER if n < size]:
                tried += 1
                attempt = posed.sized({name: candidate})
                if fails(subject, attempt, dtype, device, sought, probe):
                    posed, smaller = attempt, True
                    break
                if tried >= most:
                    return Shrunk(posed, tried)
    return Shrunk(posed, tried)


def _plainer(subject: Subject, posed: Posed, dtype: str, device: str, sought: Sought, probe: Probe) -> Posed:
    """Without its temper, where the plain numbers fail too."""
    plain = posed.family.case(dict(posed.sizes))
    return plain if posed.temper != "plain" and fails(subject, plain, dtype, device, sought, probe) else posed


def fails(subject: Subject, posed: Posed, dtype: str, device: str, sought: Sought, probe: Probe) -> bool:
    """Whether the check still finds the output wrong; a call that is refused is another matter."""
    if unanswered(subject, posed.case, dtype, device):
        return False
    try:
        return any(Sought.of(w) == sought for w in probe(CallJudge(subject, posed.case, dtype, device)))
    except (*CRASHES, *REFUSALS):
        return False


def text_of(posed: Posed, dtype: str, device: str) -> str:
    """Shapes, dtypes and values' temper of a case, with the arguments that are no tensors."""
    call = as_call(posed.case.make(Draw(1, dtype, device)))
    parts = [_value(v) for v in call.args] + [f"{k}={_value(v)}" for k, v in call.kwargs.items()]
    return f"({', '.join(parts)})" + ("" if posed.temper == "plain" else f", {posed.temper}") + f", inputs {posed.case.name or 'as given'}"


def _value(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def importable(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Module and name by which another process finds the function, or None."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return None
    found = inspect.getmodule(function)
    return (module, name) if found is not None and getattr(found, name, None) is function else None


def snippet(subject: Subject, posed: Posed, dtype: str, device: str, output: str) -> str:
    """Python that runs the case both ways and prints how far each output and gradient is off."""
    names, lines = {}, ["import torch", "from ops_math.testing import Draw, as_call, run"]
    for role, function in (("op", subject.op), ("reference", subject.reference), ("inputs", posed.family.make)):
        place = importable(function)
        names[role] = role
        lines.append(f"from {place[0]} import {place[1]} as {role}" if place else f"# {role}: the function that was given to verify()")
    sizes = "".join(f", {k}={v}" for k, v in posed.sizes)
    drawn = f"inputs(Draw(1, {dtype!r}{'' if device == 'cpu' else f', {device!r}'}){sizes})"
    if posed.temper != "plain":
        lines.append("from ops_math.testing.subject import TEMPERS")
        drawn = f"TEMPERS[{posed.temper!r}](as_call({drawn}))"
    frozen = f"frozen={posed.family.frozen!r}, " if posed.family.frozen else ""
    options = f"{frozen}seed=1, rounded={DTYPE_OF[dtype]}"
    lines += [
        f"call = as_call({drawn})",
        f"seen = run(op, call, {options})",
        f"want = run(reference, call, {options}, change=torch.Tensor.double)",
        "for name, y, r in zip(seen.names, seen.values, want.values):",
        f"    print(name, (y.double() - r).abs().max().item(), 'of', r.abs().max().item(){_marked(output)})",
    ]
    return "\n".join(lines)


def _marked(output: str) -> str:
    return f", '<- wrong' if name == {output!r} else ''" if output else ""
