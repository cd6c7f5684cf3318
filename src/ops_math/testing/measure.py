"""A judge for one case: the oracle, the budget, and the verdict on an implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ops_math import settings
from ops_math.dispatch import Operator
from ops_math.spec import DTYPE_OF, Case
from ops_math.testing.budget import Broken, Budget
from ops_math.testing.inputs import Draw, Result, run

SEEDS = (1, 2, 3)
NUDGE = 2.0**-24


def widened(t: torch.Tensor) -> torch.Tensor:
    """Float64."""
    return t.to(torch.float64)


def nudged(t: torch.Tensor) -> torch.Tensor:
    """Float64, moved by one unit of fp32 up or down, element by element."""
    generator = torch.Generator().manual_seed(7)
    sign = torch.randint(0, 2, t.shape, generator=generator).to(torch.float64).to(t.device) * 2 - 1
    return t.to(torch.float64) * (1 + NUDGE * sign)


class Judge:
    """Knows how wrong an implementation of one case may be in one dtype.

    Args:
        operator: the catalogue entry.
        case: the case.
        dtype: name of the dtype under test.
        device: where the implementation runs; the oracle runs there in float64.
    """

    def __init__(self, operator: Operator, case: Case, dtype: str, device: str = "cpu") -> None:
        self.operator, self.case, self.dtype, self.device = operator, case, dtype, device
        self.public = operator.public[case.fn]
        self.reference: Callable[..., Any] = getattr(operator.file("reference"), case.fn)
        eagers = [self.run(seed, "eager") for seed in SEEDS]
        self.differentiable = eagers[0].differentiable
        self.oracles = {seed: self.oracle(seed) for seed in SEEDS}
        moved = [self.oracle(seed, nudged) for seed in SEEDS]
        oracles = [self.oracles[s].values for s in SEEDS]
        learned = oracles, [e.values for e in eagers], [m.values for m in moved], eagers[0].names
        self.budget = Budget(*learned, {} if case.looser_for else dict(case.looser))
        self.looser = {name: Budget(*learned, dict(case.looser)) for name in case.looser_for}

    def call(self, seed: int) -> Any:
        """The arguments for a seed."""
        return self.case.make(Draw(seed, self.dtype, self.device))

    def run(self, seed: int, implementation: str, **options: Any) -> Result:
        """One forward and backward with a named implementation."""
        with settings.force(**{self.operator.name: implementation}):
            return run(self.public, self.call(seed), self.case.frozen, seed=seed, rounded=DTYPE_OF[self.dtype], **options)

    def oracle(self, seed: int, change: Callable[[torch.Tensor], torch.Tensor] = widened) -> Result:
        """The reference in float64 with autograd's gradients."""
        return run(
            self.reference,
            self.call(seed),
            self.case.frozen,
            seed=seed,
            rounded=DTYPE_OF[self.dtype],
            change=change,
            differentiable=self.differentiable,
        )

    def budget_of(self, implementation: str) -> Budget:
        """The limits that an implementation is held to."""
        return self.looser.get(implementation, self.budget)

    def verdict(self, implementation: str, seeds: Sequence[int] = SEEDS) -> list[Broken]:
        """Every limit that the implementation passes on these seeds."""
        found: list[Broken] = []
        for seed in seeds:
            found += self.budget_of(implementation).broken(self.run(seed, implementation).values, self.oracles[seed].values)
        return found


@lru_cache(maxsize=512)
def judge_for(operator: Operator, case: Case, dtype: str, device: str = "cpu") -> Judge:
    """The judge for an operator's case, kept."""
    return Judge(operator, case, dtype, device)
