"""Proof of operators: oracle, error budget, planted faults, conformance. Public, so that users can hold their own operators to it."""

from ops_math.spec import Call, Case
from ops_math.testing.budget import Budget, statistics
from ops_math.testing.faults import FAULTS, Fault, planted
from ops_math.testing.inputs import Draw, Result, run
from ops_math.testing.measure import Judge, judge_for
from ops_math.testing.planting import planted_in
from ops_math.testing.report import Finding, Margin, Report
from ops_math.testing.subject import as_call
from ops_math.testing.verify import verify

__all__ = [
    "FAULTS",
    "Budget",
    "Call",
    "Case",
    "Draw",
    "Fault",
    "Finding",
    "Judge",
    "Margin",
    "Report",
    "Result",
    "as_call",
    "judge_for",
    "planted",
    "planted_in",
    "run",
    "statistics",
    "verify",
]
