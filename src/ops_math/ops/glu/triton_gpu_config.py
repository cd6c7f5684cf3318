"""What can be set of gated units."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Values a tile, warps, and whether halves of an odd width are handled by fours (`triton_gpu_halves`)."""

    block: int
    num_warps: int
    by_fours: bool = False
