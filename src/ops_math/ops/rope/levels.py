"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from typing import Any

from ops_math.ops.rope.problem import RopeProblem
from ops_math.schedule.levels import COMPILED, Levels
from ops_math.spec import Offer

CONTRACTED = "PyTorch may multiply and add in one rounding or in two, by the place of the element"


def offers(p: RopeProblem, implementation: str, config: Any, phase: str) -> Offer:
    """Elementwise: apart, multiplication and addition are exact to the bit wherever they run."""
    if implementation == "inductor":
        return Offer(1, COMPILED)
    return Offer(3) if implementation != "eager" or config == "apart" else Offer(1, CONTRACTED)


LEVELS = Levels(
    offers,
    "2: none on a GPU; on a CPU two more passes",
    whole={"batch": 1, "seq": None},
    orders={("triton_gpu", phase): () for phase in ("fwd", "bwd", "inplace")},
)
