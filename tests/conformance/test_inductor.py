"""What Inductor compiles for the CPU is held to the contract of every implementation.

A case is a compilation or two, of a second each: what runs before each change is one a kind of problem, the rest is for `make full`.
"""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math import backends, catalog
from ops_math.backends import inductor
from ops_math.testing import conformance

CPU = backends.device_of(torch.device("cpu"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(inductor.unavailable(CPU) is not None, reason="missing capability: a C++ compiler"),
]
OPERATORS = [name for name, op in catalog.operators().items() if any(i.name == "inductor" for i in op.implementations())]
SAMPLED = {
    "rms_norm": ("odd width", "Gemma's 1 + w", "add, fp32 residual", "only the weight learns"),
    "glu": ("width 31", "packed halves", "geglu exact", "only up learns"),
    "rope": ("plain", "tables for each sequence", "partial, odd rest", "only k learns"),
}


def cases():
    for name in OPERATORS:
        for case in catalog.operators()[name].file("problem").CASES:
            for dtype in case.dtypes:
                sampled = case.name in SAMPLED[name] and dtype in (case.dtypes[0], "bf16")
                yield pytest.param(name, case, dtype, id=f"{name}-{case.name}-{dtype}", marks=() if sampled else pytest.mark.long)


def able(name, case, dtype):
    operator = catalog.operators()[name]
    why = conformance.able(operator, case, dtype, "inductor", "cpu")
    if why is not None:
        pytest.skip(why)
    return operator


def test_every_sampled_case_exists_and_no_operator_is_left_out():
    for name in OPERATORS:
        assert set(SAMPLED[name]) <= {case.name for case in catalog.operators()[name].file("problem").CASES}
    assert len(OPERATORS) == len(SAMPLED) >= 3


@pytest.mark.parametrize(("name", "case", "dtype"), list(cases()))
def test_compiled_it_is_within_the_error_budget_whatever_the_strides(name, case, dtype):
    operator = able(name, case, dtype)
    assert conformance.check_budget(operator, case, dtype, "inductor") == []
    if dtype == case.dtypes[0]:
        assert conformance.check_layouts(operator, case, dtype, "inductor") == []
        assert conformance.check_poison(operator, case, dtype, "inductor") == []


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_it_repeats_and_gives_single_gradients(name):
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    for check in (conformance.check_autograd, conformance.check_twice, conformance.check_repeats):
        assert check(operator, case, "fp32", "inductor") == []


@pytest.mark.parametrize(("name", "phase"), [(name, phase) for name in OPERATORS for phase in ("fwd", "bwd")])
def test_its_forward_and_backward_pair_with_those_of_eager(name, phase):
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    compiled, eager = (next(i for i in operator.implementations() if i.name == n) for n in ("inductor", "eager"))
    eager.replaced[phase] = compiled.launcher(phase)
    operator.forget()
    try:
        judge = conformance.judge_for(operator, case, "bf16")
        with om.force(**{operator.name: "eager"}):
            assert [str(b) for b in judge.verdict("eager")] == []
    finally:
        eager.replaced.clear()
        operator.forget()
