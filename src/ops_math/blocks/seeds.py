"""Where a block without an rng of its own finds one: in the pool of seeds that its module is attached to."""

from __future__ import annotations

from typing import Any

from ops_math.blocks.streams import Input
from ops_math.rng import Rng

SOURCE = "ops_math_rng"  # what `ops_nn.SeedPool.attach` sets on a module: a function of device and block


def rng_of(module: Any, x: Input, site: str) -> Rng | None:
    """The stream of the module for this call of the block `site`, while it trains; None where no pool is attached."""
    source = getattr(module, "__dict__", {}).get(SOURCE)
    if source is None or not module.training:
        return None
    found: Rng = source((x[0] if isinstance(x, tuple) else x).device, site)
    return found
