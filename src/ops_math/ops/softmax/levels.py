"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from ops_math.schedule.levels import A_ROW, Cut, Levels, by_place

LEVELS = Levels(
    by_place,
    "2: none on a GPU; on a CPU a call a row",
    {"fwd": Cut("m", "m"), "bwd": Cut("mm", "m")},
    A_ROW,
)
