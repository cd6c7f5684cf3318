"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from ops_math.schedule.levels import Levels
from ops_math.spec import Offer

# No sums: an element sees only itself, whatever the batch was.
LEVELS = Levels(
    {name: Offer(2, "a shard of a parameter may end in other instructions") for name in ("vendor", "eager")} | {"triton_gpu": Offer(3)},
    "none",
)
