"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from ops_math.schedule.levels import Levels
from ops_math.spec import Offer

# One multiplication and a mask by place: there is no order that could differ.
LEVELS = Levels(
    {"triton_gpu": Offer(3), "eager": Offer(3)},
    "none; with a key, and the first row of a piece in its Rng",
    orders={("triton_gpu", "fwd"): (), ("triton_gpu", "bwd"): ()},
)
