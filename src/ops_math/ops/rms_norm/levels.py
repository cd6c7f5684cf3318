"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from typing import Any

from ops_math.schedule.levels import A_ROW, COMPILED, VENDOR, Cut, Levels
from ops_math.spec import Offer

PLACE = "where a row starts between two 16-byte boundaries decides the order of its sums"


def offers(p: Any, implementation: str, config: Any, phase: str) -> Offer:
    """Rows that are cut at the 16-byte grid are summed by their place among eight, which follows how a batch is cut."""
    if implementation == "vendor":
        return Offer(1, VENDOR)
    if implementation == "inductor":
        return Offer(1, COMPILED)
    return Offer(1, PLACE) if implementation == "triton_gpu" and config.ends else Offer(3)


LEVELS = Levels(
    offers,
    "2: the backward runs token block by token block; on a CPU a call a row",
    {"fwd": Cut("mm.", "mmv"), "bwd": Cut("mmmwv", "m+", ("weight",))},
    A_ROW,
    orders={("triton_gpu", "fwd"): ("block_m", "block_n", "num_warps", "ends")},
)
