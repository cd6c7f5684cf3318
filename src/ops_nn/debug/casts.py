"""Models of two dtypes: whether two are, and what a model's module is when it is cast as another model's.

A module in fp32 says little of one in bf16. The same module, cast, does: it differs from the first by the dtype alone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ops_math.testing.budget import UNIT
from ops_nn.debug import names
from ops_nn.debug.trace import PARAMETER, Trace

Pair = tuple[torch.dtype, torch.dtype]
Cast = dict[torch.dtype, torch.dtype]


def _commonest(pairs: Iterable[Pair]) -> Pair | None:
    """The commonest pair of two dtypes where more than half of the pairs are of two: a few that are so are a fault to be named."""
    counts = Counter(pair for pair in pairs if all(dtype in UNIT for dtype in pair))
    other = Counter({pair: count for pair, count in counts.items() if pair[0] != pair[1]})
    return other.most_common(1)[0][0] if 2 * other.total() > counts.total() else None


def shown(pair: Pair) -> tuple[str, str]:
    """The names of both."""
    own, other = (str(dtype).removeprefix("torch.") for dtype in pair)
    return own, other


def of_traces(a: Trace, b: Trace) -> tuple[str, str] | None:
    """The names of both dtypes, of weights or of autocast, where the two runs computed in different ones."""
    shared = [key for key in a.records if key.direction == PARAMETER and key in b.records]
    found = _commonest((a.records[key].torch_dtype, b.records[key].torch_dtype) for key in shared)
    if found is not None:
        return shown(found)
    if a.autocast != b.autocast:
        own, other = (f"autocast to {t.autocast}" if t.autocast else "no autocast" for t in (a, b))
        return own, other
    return None


def _pairs(own: nn.Module, other: nn.Module) -> list[Pair]:
    """Dtypes of the weights that both have."""
    theirs = names.tensors_of(names.layout(other))
    return [(value.dtype, theirs[key].dtype) for key, value in names.tensors_of(names.layout(own)).items() if key in theirs]


def apart(own: nn.Module, other: nn.Module) -> Pair | None:
    """The dtypes of two models of two dtypes, None where they are of one."""
    return _commonest(_pairs(own, other))


def wide_is_b(pair: Pair) -> bool:
    """Whether B's dtype rounds less: the wider model is the one to be cast."""
    return UNIT[pair[1]] < UNIT[pair[0]]


def between(own: nn.Module, other: nn.Module) -> Cast:
    """Which dtypes of a module's weights are another one in the same module of the other model; the commonest where there are several."""
    counts = Counter(pair for pair in _pairs(own, other) if all(dtype in UNIT for dtype in pair))
    return {pair[0]: pair[1] for pair, _ in reversed(counts.most_common())}


def cast(t: Tensor, how: Cast) -> Tensor:
    """A copy in the dtype that it has there. What is finite stays so: masks hold the lowest number of their dtype."""
    to, value = how.get(t.dtype, t.dtype), t.detach().clone()
    if to != t.dtype:
        most = min(torch.finfo(to).max, torch.finfo(t.dtype).max)
        value = torch.where(value.isinf(), value, value.clamp(-most, most)).to(to)
    return value.requires_grad_(t.requires_grad)


def as_other(own: nn.Module, other: nn.Module) -> nn.Module:
    """A copy of a module with each weight and buffer in the dtype that it has in the other model."""
    made = copy.deepcopy(names.unwrapped(own))
    theirs = names.tensors_of(names.layout(other))
    with torch.no_grad():
        for key, value in names.tensors_of(names.layout(made)).items():
            if key in theirs and value.is_floating_point():
                value.data = value.data.to(theirs[key].dtype)
    return made
