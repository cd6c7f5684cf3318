"""What is promised of the bits, with the price, and how a call is cut for it."""

from __future__ import annotations

from ops_math.schedule.levels import PRODUCTS, Levels
from ops_math.spec import Offer

LEVELS = Levels({name: Offer(1, PRODUCTS) for name in ("triton_gpu", "eager")}, "1: none", whole={})
