"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from typing import Any

from ops_math.ops.adamw.problem import AdamWProblem
from ops_math.schedule.levels import Levels
from ops_math.spec import Offer

SHARD = "a shard of a parameter may end in other instructions"
PLACE = "stochastic rounding draws by an element's place in its shard"


def offers(p: AdamWProblem, implementation: str, config: Any, phase: str) -> Offer:
    """No sums: an element sees only itself, whatever the batch was."""
    if implementation != "triton_gpu":
        return Offer(2, SHARD)
    return Offer(2, PLACE) if p.stochastic else Offer(3)


LEVELS = Levels(offers, "none")
