"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from ops_math.schedule.levels import A_ROW, Cut, Levels, by_place

LEVELS = Levels(
    by_place,
    "2: the backward runs token block by token block; on a CPU a call a row",
    {"fwd": Cut("mm.", "mmv"), "bwd": Cut("mmmwv", "m+", ("weight",))},
    A_ROW,
    orders={("triton_gpu", "fwd"): ("block_m", "block_n", "num_warps", "ends")},
)
