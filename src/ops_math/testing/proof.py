"""Proof of an operator of the catalogue: conformance of each implementation on a device, with margins, and planted faults by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ops_math.dispatch import Operator
from ops_math.spec import Case
from ops_math.testing import conformance
from ops_math.testing.faults import FAULTS
from ops_math.testing.measure import SEEDS, judge_for
from ops_math.testing.report import Finding, Margin, Report, in_order, worst

Say = Callable[[str], None]
Check = Callable[[Operator, Case, str, str, str], list[str]]
BEHAVIOUR: dict[str, Check] = {
    "strides": conformance.check_layouts,
    "unwritten memory": conformance.check_poison,
    "graph": conformance.check_autograd,
    "second backward": conformance.check_twice,
    "repeats": lambda op, case, dtype, name, device: conformance.check_repeats(op, case, dtype, name, device, times=2),
}


class _Tally:
    """What was tried on one implementation, and what came of it."""

    def __init__(self) -> None:
        self.tried: dict[str, int] = {}
        self.margins: dict[str, Margin] = {}
        self.found: dict[tuple[str, str], tuple[str, list[str]]] = {}
        self.skipped: dict[str, list[str]] = {}
        self.reached = False  # the implementation, by any case

    def count(self, check: str) -> None:
        self.tried[check] = self.tried.get(check, 0) + 1

    def wrong(self, check: str, output: str, words: str, where: str) -> None:
        self.found.setdefault((check, output), (words, []))[1].append(where)


def prove(
    operator: Operator,
    implementation: str,
    device: str = "cpu",
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
    *,
    faults: bool = True,
    behaviour: bool = True,
    say: Say = lambda words: None,
) -> Report:
    """Hold one implementation to the operator's contract on every case of `problem.py` that it can run on the device.

    Args:
        operator: the catalogue entry.
        implementation: its name: triton_gpu, vendor, eager.
        device: cpu or cuda.
        dtypes: those to try.
        faults: plant faults in it too.
        behaviour: look at strides, unwritten memory, second backwards and repeated runs too, in the case's first dtype.
        say: called with what is being done.
    """
    tally = _Tally()
    able: dict[str, list[Case]] = {dtype: [] for dtype in dtypes}
    if implementation == "eager":
        _formulas(operator, tally)
    for case in operator.file("problem").CASES:
        for dtype in [d for d in case.dtypes if d in dtypes]:
            why = conformance.able(operator, case, dtype, implementation, device)
            if why:
                tally.skipped.setdefault(_own_reason(why, implementation), []).append(f"{case.name} in {dtype}")
                continue
            say(f"{operator.name}.{implementation}: {case.name} in {dtype}")
            able[dtype].append(case)
            tally.reached = tally.reached or conformance.reaches(operator, case, dtype, implementation, device)
            _budget(operator, implementation, device, case, dtype, tally)
            for name, check in BEHAVIOUR.items() if behaviour and dtype == next(d for d in case.dtypes if d in dtypes) else ():
                tally.count(name)
                for sentence in check(operator, case, dtype, implementation, device):
                    tally.wrong(name, "", sentence, f"{case.name} in {dtype}")
    if not tally.reached and not tally.found:  # what was judged is what needs no implementation
        idle = [f"{case.name} in {dtype}" for dtype, cases in able.items() for case in cases]
        tally.tried, tally.margins = {}, {}
        tally.skipped |= {"calls no implementation": idle} if idle else {}
    caught, alive = _faults(operator, implementation, device, able, say) if faults and tally.reached and not tally.found else ({}, [])
    findings = tuple(Finding(c, o, words, tuple(where)) for (c, o), (words, where) in tally.found.items())
    tried, margins = tuple(tally.tried.items()), in_order(tally.margins)
    skipped = tuple(f"{len(where)} cases, the first {where[0]}: {why}" for why, where in tally.skipped.items())
    return Report(
        operator.name, implementation, device, tuple(dtypes), tried, margins, findings, tuple(caught.items()), tuple(alive), (), skipped
    )


def _own_reason(sentence: str, implementation: str) -> str:
    """Of why nothing can run a problem, the part that is about this implementation."""
    found = re.search(rf"(?:^|[;:] ){implementation}: (.*?)(?:; [a-z_]+: |\. The problem was|$)", sentence)
    return found.group(1) if found else sentence


def _formulas(operator: Operator, tally: _Tally) -> None:
    """The first two links of trust, which are about float64 and hold on every device."""
    for case in operator.file("problem").CASES:
        for name, check in (("formula in float64", conformance.check_formula), ("plain PyTorch in float64", conformance.check_plain)):
            tally.count(name)
            for sentence in check(operator, case):
                tally.wrong(name, "", sentence, case.name)


def _budget(operator: Operator, implementation: str, device: str, case: Case, dtype: str, tally: _Tally) -> None:
    judge = judge_for(operator, case, dtype, device)
    tally.count("values")
    for seed in SEEDS:
        for error in judge.budget_of(implementation).errors(judge.run(seed, implementation).values, judge.oracles[seed].values):
            where = f"{case.name} in {dtype}"
            worst(tally.margins, [(error.statistic, error.share)], f"{error.output} of {where}")
            if not error.value <= error.limit:
                tally.wrong("values", error.output, f"{error.statistic} error {error.value:.3g}, limit {error.limit:.3g}", where)


def _faults(
    operator: Operator, implementation: str, device: str, able: dict[str, list[Case]], say: Say
) -> tuple[dict[str, str], list[str]]:
    caught: dict[str, str] = {}
    alive: list[str] = []
    for dtype, cases in able.items():
        if cases:
            say(f"{operator.name}.{implementation}: planting {len(FAULTS)} faults in {dtype}")
            living, hit = conformance.surviving_faults(operator, dtype, FAULTS, implementation, device, cases)
            alive += [f"{name} ({dtype})" for name in living]
            for text in hit:
                name, _, case = text.partition(": caught by ")
                caught[f"{name} ({dtype})"] = case
    return caught, alive


__all__ = ["BEHAVIOUR", "prove"]
