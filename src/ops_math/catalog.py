"""The list of operators, spelled out: adding one is a folder and a line here."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING

from ops_math import checks

if TYPE_CHECKING:
    from ops_math.dispatch import Operator

CATALOG: tuple[tuple[str, str], ...] = (
    ("cross_entropy", "ops_math.ops.cross_entropy.op"),
    ("linear_cross_entropy", "ops_math.ops.cross_entropy.op_linear"),
    ("rms_norm", "ops_math.ops.rms_norm.op"),
    ("layer_norm", "ops_math.ops.layer_norm.op"),
    ("softmax", "ops_math.ops.softmax.op"),
    ("dropout", "ops_math.ops.dropout.op"),
    ("attention", "ops_math.ops.attention.op"),
    ("rope", "ops_math.ops.rope.op"),
    ("glu", "ops_math.ops.glu.op"),
    ("gelu", "ops_math.ops.glu.op_gelu"),
    ("linear", "ops_math.ops.linear.op"),
)


@lru_cache(maxsize=1)
def operators() -> dict[str, Operator]:
    """Every operator by name; those of `om.register` join this dictionary."""
    return {name: importlib.import_module(module).OP for name, module in CATALOG}


@lru_cache(maxsize=1)
def public_functions() -> dict[str, Operator]:
    """The operator behind every public function."""
    return {fn: op for op in operators().values() for fn in op.public}


def stands_for(operator: str) -> tuple[str, ...]:
    """PyTorch's functions that an operator takes the place of, e.g. `("F.rms_norm", "torch.add")`; `F` is `torch.nn.functional`.

    Args:
        operator: its name in the catalogue, as `ops_math.stats()` shows it.

    Raises:
        ArgumentError: for a name that is none.
    """
    checks.one_of("stands_for", "operator", operator, tuple(operators()))
    named: tuple[str, ...] = operators()[operator].file("plain").STANDS_FOR
    return named
