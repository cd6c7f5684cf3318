"""Proof of operators: oracle, error budget, planted faults, conformance. Public, so that users can hold their own operators to it."""

from ops_math.testing.budget import Budget, statistics
from ops_math.testing.faults import FAULTS, Fault, planted
from ops_math.testing.inputs import Draw, Result, run
from ops_math.testing.measure import Judge, judge_for

__all__ = ["FAULTS", "Budget", "Draw", "Fault", "Judge", "Result", "judge_for", "planted", "run", "statistics"]
