"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from typing import Any

from ops_math.ops.glu.levels import SHARD
from ops_math.ops.glu.problem_gelu import GeluProblem
from ops_math.schedule.levels import A_ROW, VENDOR, Cut, Levels
from ops_math.spec import Offer

BIAS = "the sum for the bias is split among programs by the number of columns, which a shard has fewer of"


def offers(p: GeluProblem, implementation: str, config: Any, phase: str) -> Offer:
    """Elementwise, but for the bias's gradient."""
    if implementation != "triton_gpu":
        return Offer(2, SHARD) if implementation == "eager" else Offer(1, VENDOR)
    return Offer(2, BIAS) if phase == "bwd" and p.bias and p.need_dbias else Offer(3)


LEVELS = Levels(
    offers,
    "2: with a bias the backward runs token block by token block; on a CPU a call a row",
    {"fwd": Cut("m.", "m"), "bwd": Cut("mmw", "m+m", ("bias",))},
    A_ROW,
    orders={("triton_gpu", "fwd"): ()},
)
