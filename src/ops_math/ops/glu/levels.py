"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from ops_math.schedule.levels import A_ROW, COMPILED, VENDOR, Cut, Levels
from ops_math.spec import Offer

SHARD = "PyTorch works on the last columns of a row with other instructions, so a shard of the columns may differ"
LEVELS = Levels(
    {"triton_gpu": Offer(3), "eager": Offer(2, SHARD), "vendor": Offer(1, VENDOR), "inductor": Offer(1, COMPILED)},
    "2: none on a GPU; on a CPU a call a row",
    {"fwd": Cut("mm", "mm"), "bwd": Cut("mmmm", "mmm")},
    A_ROW,
    orders={("triton_gpu", "fwd"): (), ("triton_gpu", "bwd"): ()},
)
