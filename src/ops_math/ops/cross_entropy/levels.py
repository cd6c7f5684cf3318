"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from typing import Any

from ops_math.ops.cross_entropy.problem import CrossEntropyProblem
from ops_math.schedule.levels import A_ROW, VENDOR, Cut, Levels
from ops_math.spec import Offer

MEAN = "a mean over the batch's own tokens follows the batch: pass num_tokens=, or reduction='sum' or 'none'"


def offers(p: CrossEntropyProblem, implementation: str, config: Any, phase: str) -> Offer:
    """A mean divides by what is in the batch, so it cannot be independent of the batch."""
    if implementation == "vendor":
        return Offer(1, VENDOR)
    return Offer(1, MEAN) if p.reduction == "mean" and not p.counted and phase == "fwd" else Offer(3)


LEVELS = Levels(
    offers,
    "2: a divisor that does not follow the batch; the loss is summed token block by token block; on a CPU a call a row",
    {"fwd": Cut("mv..", "lv1"), "bwd": Cut("lmv.v.", "m")},
    A_ROW,
    orders={("triton_gpu", "bwd"): ()},
)
