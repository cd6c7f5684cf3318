"""Every case of every catalogue entry, as pytest parameters."""

from __future__ import annotations

from typing import Any

import pytest

from ops_math import catalog
from ops_math.spec import Case

CPU_IMPLEMENTATIONS = ("eager", "vendor")


def every_case() -> list[Any]:
    """(operator name, case), one a case."""
    return [
        pytest.param(name, case, id=f"{name}-{case.name}") for name, op in catalog.operators().items() for case in op.file("problem").CASES
    ]


def every_case_and_dtype() -> list[Any]:
    """(operator name, case, dtype)."""
    return [
        pytest.param(name, case, dtype, id=f"{name}-{case.name}-{dtype}")
        for name, op in catalog.operators().items()
        for case in op.file("problem").CASES
        for dtype in case.dtypes
    ]


def sampled(cases: list[Any]) -> list[Any]:
    """Every second case of each operator; the others are for `make full`: for checks of the way into an operator, which cases share."""
    number: dict[str, int] = {}
    found = []
    for one in cases:
        name = one.values[0]
        number[name] = number.get(name, -1) + 1
        found.append(pytest.param(*one.values, id=one.id, marks=pytest.mark.long if number[name] % 2 else ()))
    return found


def first_dtype(case: Case) -> str:
    """The dtype in which dtype-independent checks run."""
    return case.dtypes[0]
