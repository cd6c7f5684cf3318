"""A block's products from determinism level 2 on: one operator each, whose order of sums follows neither the batch nor its neighbours.

Step by step, without the nodes that join operators: those call the vendor's products, which promise level 1.
"""

from __future__ import annotations

import torch

from ops_math import checks, settings
from ops_math.ops.dropout.op import dropout
from ops_math.ops.glu.op import geglu, swiglu
from ops_math.ops.glu.op_gelu import gelu
from ops_math.ops.linear.op import linear
from ops_math.rng import Rng

Affine = tuple[torch.Tensor, torch.Tensor | None]


def pinned() -> bool:
    """Whether products must run so. Level 3 is refused: a block does not know on how many ranks its weights lie."""
    level = settings.determinism_level()
    if level >= 3:
        do = "Call ops_math.linear with parts= and the operators by themselves, or ask for level 2."
        checks.refuse("a block at determinism level 3", "it does not know the tensor-parallel degree, which says how sums are cut", do)
    return level >= 2


def products(x: torch.Tensor, affines: tuple[Affine, ...]) -> tuple[torch.Tensor, ...]:
    """The products of `x` [..., K] with several weights [N_i, K], biases added: [..., N_i] each."""
    return tuple(linear(x, w, b) for w, b in affines)


def gated_mlp(x: torch.Tensor, gate: Affine, up: Affine, down: Affine, activation: str) -> torch.Tensor:
    """`down(act(gate(x)) * up(x))`."""
    g, u = products(x, (gate, up))
    act = swiglu(g, u) if activation == "silu" else geglu(g, u, approximate="tanh" if activation == "gelu_tanh" else "none")
    return linear(act, *down)


def gelu_mlp(x: torch.Tensor, first: Affine, second: Affine, approximate: str, state: torch.Tensor | None, p: float) -> torch.Tensor:
    """`second(dropout(gelu(first(x))))`."""
    act = gelu(linear(x, first[0]), first[1], approximate=approximate)
    return linear(act if state is None else dropout(act, p, rng=Rng.of_state(state)), *second)
