"""What is promised of the bits, and the price."""

from __future__ import annotations

from typing import Any

from ops_math.ops.linear.problem import LinearProblem
from ops_math.schedule.levels import PRODUCTS, Levels
from ops_math.spec import Offer

TOGETHER = "rows are multiplied together, and the order of sums may follow their number"


def offers(p: LinearProblem, implementation: str, config: Any, phase: str) -> Offer:
    """Ours has one tile for every size, and adds along it in one order."""
    if implementation == "vendor":
        return Offer(1, PRODUCTS)
    return Offer(1, TOGETHER) if implementation == "eager" and config is None else Offer(3)


# Sizes are fixed for the choice, so that a shard of a weight is multiplied as the whole is.
LEVELS = Levels(
    offers,
    "2: our kernel in the place of the vendor's, and a launch a token block for the weight's gradient; on a CPU a call a row",
    whole={"rows": None, "inputs": 4096, "outputs": 4096},
)
