"""What is promised of the bits, with the price."""

from __future__ import annotations

from ops_math.schedule.levels import Levels
from ops_math.spec import Offer

_WHY = "sums of floats follow the order of the device; the fingerprint, a sum of integers, is the same everywhere"
LEVELS = Levels({"eager": Offer(1, _WHY), "triton_gpu": Offer(1, _WHY)}, "none")
