"""`verify`: proof of any differentiable function against a reference, or what is wrong with it in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ops_math import checks
from ops_math.spec import Case
from ops_math.testing.faults import FAULTS, Fault, Trace
from ops_math.testing.inputs import Draw
from ops_math.testing.planting import number_faults, planted_in
from ops_math.testing.probes import OF_EVERY_CASE, OF_PLAIN_CASES, Probe, Wrong, compiled, far_strides
from ops_math.testing.report import Finding, Margin, Report, in_order, worst
from ops_math.testing.shrink import Sought, shrink, snippet, text_of
from ops_math.testing.subject import (
    CRASHES,
    REFUSALS,
    TEMPERS,
    CallJudge,
    Family,
    Posed,
    Subject,
    as_call,
    families,
    in_one_line,
    posed,
    unanswered,
    unheld_outputs,
)

DTYPES = ("fp32", "bf16", "fp16")
TOUGH = tuple(temper for temper in TEMPERS if temper != "plain")
# An exception that says this is a fault, whatever its kind.
CRASH_WORDS = ("CUDA error", "illegal memory access", "an illegal instruction", "misaligned address", "Segmentation")


class _Seen(NamedTuple):
    """Something wrong, where it was seen and by which probe."""

    wrong: Wrong
    posed: Posed
    dtype: str
    probe: Probe


class _Session:
    """One verification: collects what was tried, found, refused and skipped."""

    def __init__(self, subject: Subject, device: str) -> None:
        self.subject, self.device = subject, device
        self.tried: dict[str, int] = {}
        self.margins: dict[str, Margin] = {}
        self.seen: list[_Seen] = []
        self.refused: dict[str, None] = {}
        self.skipped: dict[str, None] = {}
        self.judges: dict[str, list[tuple[Posed, CallJudge]]] = {}
        self.numbers = False  # whether any result had elements: without one nothing was shown

    def judge(self, one: Posed, dtype: str) -> CallJudge | None:
        """The judge of a case, or None where there is nothing to judge: then what the function or its reference said is noted."""
        label = f"{one.case.name or 'as given'} in {dtype}"
        why = unanswered(self.subject, one.case, dtype, self.device)
        if why:
            self.skipped[f"{label}: {why}"] = None
            return None
        try:
            judge = CallJudge(self.subject, one.case, dtype, self.device)
            unheld = unheld_outputs(judge) if one.is_plain else ()
        except (*CRASHES, *REFUSALS) as error:
            self.answered(error, one, dtype, label)
            return None
        for output in unheld:
            self.skipped[f"{output}: only floating results are held to the reference; compare this one yourself"] = None
        if not judge.oracles[1].outputs:
            self.skipped[f"{label}: the reference returns no floating tensor"] = None
            return None
        return judge

    def answered(self, error: BaseException, one: Posed, dtype: str, label: str) -> None:
        """An exception of the function: wrong on its author's own inputs and where it is a crash, else a refusal."""
        words = in_one_line(error)
        if one.is_plain or isinstance(error, CRASHES) or any(w in str(error) for w in CRASH_WORDS):
            raised = Wrong("runs", "", f"stops with {words}")
            self.seen.append(_Seen(raised, one, dtype, raising))
        else:
            self.refused[f"{label}: {words}"] = None

    def ask(self, judge: CallJudge, one: Posed, dtype: str, name: str, probe: Probe) -> None:
        """Run one probe and keep what it finds."""
        label = f"{one.case.name or 'as given'} in {dtype}"
        self.tried[name] = self.tried.get(name, 0) + 1
        try:
            for wrong in probe(judge):
                if wrong.check == "refuses":
                    self.refused[f"{label}: {wrong.words}"] = None
                else:
                    self.seen.append(_Seen(wrong, one, dtype, probe))
        except (*CRASHES, *REFUSALS) as error:
            self.answered(error, one, dtype, f"{label}: {name}")

    def margin(self, judge: CallJudge, one: Posed, dtype: str) -> None:
        """Note how near to their limits the errors are."""
        for error in judge.errors():
            worst(self.margins, [(error.statistic, error.share)], f"{error.output} of {one.case.name or 'as given'} in {dtype}")

    def findings(self, most: int) -> tuple[Finding, ...]:
        """What is wrong, each once, with its smallest input."""
        grouped: dict[tuple[str, str], list[_Seen]] = {}
        for seen in self.seen:
            grouped.setdefault((seen.wrong.check, seen.wrong.output), []).append(seen)
        return tuple(self._finding(group, small=i < most) for i, group in enumerate(grouped.values()))

    def _finding(self, group: list[_Seen], small: bool) -> Finding:
        first = max(group, key=lambda seen: (seen.posed.is_usual, seen.wrong.share))  # the case that shows it best, of a size to look at
        cases = tuple(f"{s.posed.case.name or 'as given'} in {s.dtype}" for s in group)
        check, output, words, _ = first.wrong
        if not small or first.probe is raising:
            return Finding(check, output, words, cases, text_of(first.posed, first.dtype, "cpu"))
        least = shrink(self.subject, first.posed, first.dtype, self.device, Sought.of(first.wrong), first.probe).posed
        code = snippet(self.subject, least, first.dtype, self.device, output)
        return Finding(check, output, words, cases, text_of(least, first.dtype, self.device), code)


def raising(judge: CallJudge) -> Iterator[Wrong]:
    """Stands for the call itself where it stops with an exception: there is nothing left to look at."""
    return iter(())


def verify(
    op: Callable[..., Any],
    *,
    reference: Callable[..., Any],
    inputs: Any,
    device: str = "cpu",
    dtypes: Sequence[str] = ("fp32", "bf16"),
    frozen: Sequence[int | str] = (),
    yardstick: Callable[..., Any] | None = None,
    faults: Sequence[Fault] | None = None,
    tempers: Sequence[str] = TOUGH,
    skip: Sequence[str] = (),
    compile: str = "",
    far: bool = False,
    name: str = "",
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Prove a differentiable function right, or say in words what is wrong with it.

    Forward and backward are held to the reference in float64 with autograd's gradients, in each dtype, on plain and on difficult numbers,
    in sizes 0, 1, 31, odd and no power of two. Errors may be those of the reference computed in fp32 and rounded at the store (and at the
    operands of matrix products), times a factor: see `ops_math.testing.budget`. Every row has an output gradient of its own. Strides,
    repeated runs, unwritten memory, second backwards, inputs that alone need a gradient and what is written to are looked at too. Then
    generic faults are planted in the function, and each must be caught, or the inputs could not have shown it.

    Args:
        op: takes tensors and plain values, returns a tensor or a tuple of tensors.
        reference: the definition, with the same arguments, in differentiable torch that runs in float64.
        inputs: a function of an `ops_math.testing.Draw` that returns the arguments (a last dictionary holds keywords), a mapping or a
            sequence of such functions, or `Case`s. Keyword parameters with a whole number as default are sizes, which are varied and made
            smaller: `lambda d, rows=64, cols=256: (d.normal(rows, cols), d.normal(cols))`.
        device: cpu or cuda.
        dtypes: of fp32, bf16, fp16, those that the inputs are drawn in.
        frozen: positions and keywords of floating arguments that get no gradient.
        yardstick: an implementation in the dtype under test that rounds where it may, in place of the reference in fp32.
        faults: planted faults; by default all of `FAULTS` and one for each number and option of the calls. An empty sequence plants none.
        tempers: what is done to the numbers besides leaving them plain; by default all of `TOUGH`. fp32 vectors stand beside 16-bit
            numbers: leave that out for a function that promises nothing for mixed dtypes.
        skip: names of checks to leave out: form, rounding bias, strides, repeats, unwritten memory, graph, one gradient alone.
        compile: a backend of `torch.compile` to hold to the same budget.
        far: try offsets past 2^31 elements, which take 4 to 8 GiB of address space (on a GPU: of memory).
        name: how the report calls it.
        progress: called with what is being done.

    Returns: a `Report`; `report.ok` says whether all is well, `report.require()` raises where it is not.

    Raises: ArgumentError for dtypes, checks or backends that there are not, for a frozen argument that no inputs have, for inputs of
    another kind, and for a class in place of a module.
    """
    _check_choices(dtypes, tempers, skip, compile)
    if isinstance(op, type) and issubclass(op, torch.nn.Module):
        do = f"Make one: {op.__name__}(...)."
        checks.fail("verify", "op", "a function, or a module that is made", f"the class {op.__name__}", do)
    for argument, value in (("op", op), ("reference", reference), ("yardstick", yardstick or op)):
        if not callable(value):
            checks.fail("verify", argument, "a function of the inputs", type(value).__name__, "Pass what computes it.")
    made = families(inputs, frozen)
    _check_frozen(frozen, made, device)
    _check_repeats(made, device)
    session = _Session(Subject(op, reference, yardstick, name or _name_of(op)), device)
    own = ", ".join(n for n, p in op.named_parameters() if p.requires_grad) if isinstance(op, torch.nn.Module) else ""
    if own:
        do = "make them arguments by torch.func.functional_call"
        session.skipped[f"parameters of the module ({own}): no gradient of theirs is looked at; {do}"] = None
    say = progress or (lambda words: None)
    extra = {**({f"compiled by {compile}": compiled(compile)} if compile else {}), **({"far strides": far_strides} if far else {})}
    plain = {n: p for n, p in {**OF_PLAIN_CASES, **extra}.items() if n not in skip}
    every = {n: p for n, p in OF_EVERY_CASE.items() if n not in skip}
    for dtype in dtypes:
        for family in made:
            if dtype in family.dtypes:
                say(f"{session.subject.name} in {dtype}: {family.name or 'inputs'}")
                _one_family(session, posed(family, tempers), dtype, every, plain)
    caught, alive = _plant(session, dtypes, faults, say) if not session.seen else ({}, [])
    findings = session.findings(8)
    tried, margins = tuple(session.tried.items()) if session.numbers else (), in_order(session.margins)
    refused, skipped = tuple(session.refused), tuple(session.skipped)
    return Report(
        session.subject.name, "", device, tuple(dtypes), tried, margins, findings, tuple(caught.items()), tuple(alive), refused, skipped
    )  # fmt: skip


def _check_choices(dtypes: Sequence[str], tempers: Sequence[str], skip: Sequence[str], backend: str) -> None:
    for dtype in dtypes:
        checks.one_of("verify", "dtypes", dtype, DTYPES)
    for temper in tempers:
        checks.one_of("verify", "tempers", temper, TOUGH)
    for check in skip:
        checks.one_of("verify", "skip", check, ("values", *OF_EVERY_CASE, *OF_PLAIN_CASES)[1:])
    if backend:
        checks.one_of("verify", "compile", backend, tuple(torch.compiler.list_backends(exclude_tags=())))


def _check_frozen(frozen: Sequence[int | str], made: Sequence[Family], device: str) -> None:
    """An argument that is to get no gradient must be there; inputs that cannot be made are no one's answer, and are told later."""
    if not frozen:
        return
    there: dict[int | str, None] = {}
    for family in made:
        try:
            call = as_call(family.case({}).case.make(Draw(1, family.dtypes[0], device)))
        except (*CRASHES, *REFUSALS):
            return
        there.update(dict.fromkeys([*range(len(call.args)), *call.kwargs]))
    for key in frozen:
        if key not in there:
            has = "The inputs have " + ", ".join(map(repr, there)) + "."
            checks.fail("verify", "frozen", "positions and keywords of arguments", repr(key), has)


def _check_repeats(made: Sequence[Family], device: str) -> None:
    """One draw must give the same inputs each time: a function and its reference are called on inputs that are made anew."""
    for family in made:
        try:
            first, second = (as_call(family.case({}).case.make(Draw(1, family.dtypes[0], device))) for _ in range(2))
        except (*CRASHES, *REFUSALS):  # told later
            continue
        items: list[tuple[Any, Any]] = [*enumerate(first.args), *first.kwargs.items()]
        for key, value in items:
            again = second.args[key] if isinstance(key, int) else second.kwargs[key]
            if isinstance(value, torch.Tensor) and not (value.shape == again.shape and bool(((value == again) | (value != value)).all())):
                do = "Make them of the draw: d.normal(rows, cols), d.ints(...), or a generator with a seed."
                checks.fail("verify", "inputs", "the same each time for one draw", f"other numbers in argument {key!r}", do)


def _name_of(op: Callable[..., Any]) -> str:
    name = getattr(op, "__name__", type(op).__name__)
    return "the function" if name == "<lambda>" else name


def _one_family(session: _Session, cases: list[Posed], dtype: str, every: dict[str, Probe], plain: dict[str, Probe]) -> None:
    for one in cases:
        judge = session.judge(one, dtype)
        if judge is None:
            continue
        session.numbers |= any(t.numel() for t in judge.oracles[1].outputs)
        if len(judge.first.outputs) != len(judge.oracles[1].outputs):  # there is nothing to hold one to the other
            session.ask(judge, one, dtype, "form", OF_PLAIN_CASES["form"])
            session.ask(judge, one, dtype, "values", OF_EVERY_CASE["values"])
            continue
        session.judges.setdefault(dtype, []).append((one, judge))
        session.margin(judge, one, dtype)
        for name, probe in every.items():
            session.ask(judge, one, dtype, name, probe)
        if one.temper == "plain" and one.is_usual and one.label != "many rows":
            for name, probe in plain.items():
                session.ask(judge, one, dtype, name, probe)


def _plant(
    session: _Session, dtypes: Sequence[str], faults: Sequence[Fault] | None, say: Callable[[str], None]
) -> tuple[dict[str, str], list[str]]:
    """Faults that were caught, with the case, and those that lived; what changes no result anywhere counts as neither."""
    caught: dict[str, str] = {}
    alive: list[str] = []
    for dtype in dtypes:
        judged = session.judges.get(dtype, [])
        usual = [pair for pair in judged if pair[0].is_usual]
        others = [pair for pair in judged if not pair[0].is_usual]  # hostile sizes: tried where a fault changed something and lives
        chosen = (*FAULTS, *number_faults([judge.call(1) for _, judge in judged[:1]])) if faults is None else faults
        for fault in chosen:
            if dtype not in fault.shows_in:
                continue
            say(f"{session.subject.name} in {dtype}: planting {fault.name!r}")
            trace = Trace()
            faulty = planted_in(session.subject.op, fault, trace)
            hit = next((one.case for one, judge in usual if _shows(judge, faulty)), None)
            if hit is None and trace.changed:
                hit = next((one.case for one, judge in others if _shows(judge, faulty)), None)
            if hit is not None:
                caught[f"{fault.name} ({dtype})"] = hit.name or "as given"
            elif trace.changed:
                alive.append(f"{fault.name} ({dtype})")
    return caught, alive


def _shows(judge: CallJudge, faulty: Callable[..., Any]) -> bool:
    try:
        return bool(judge.verdict((1, 2), faulty))
    except (*CRASHES, *REFUSALS):
        return True  # a fault that makes the call fail cannot go unnoticed


__all__ = ["Case", "Report", "verify"]
