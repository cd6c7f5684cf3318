"""The tensors of an optimizer's groups as `om.adamw` wants them, without looking up again what did not change since the last step.

A look into `optimizer.state` hashes a tensor in Python, which for 400 parameters costs more than the step's launches. What was found is
therefore kept, and compared by identity, object by object in C: the parameters, which of them have gradients, every entry of the state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

import ops_math as om

PLAIN = (torch.Tensor, Parameter)
_KNOWN = {*PLAIN, type(None)}
_layout = operator.attrgetter("layout")

Row = tuple[Any, ...]  # number, parameter, gradient, step, exp_avg, exp_avg_sq, and what else a group has


def require(holds: bool, argument: str, needs: str, got: str, do: str) -> None:
    """Raise an ArgumentError unless it holds."""
    if not holds:
        raise om.ArgumentError(f"AdamW: {argument} must be {needs}; got {got}. {do}")


class _Kept(NamedTuple):
    """What the last full look found: `places` are positions in `params` of each group of `groups`, which holds no gradients."""

    params: list[torch.Tensor]
    absent: list[bool]
    entries: list[Any]
    flags: list[Any]
    places: list[tuple[int, list[int]]]
    groups: list[om.AdamWGroup]


class Gatherer:
    """Gathers for one optimizer. `look(p, group)` gives (entries of the parameter's state, whether it has a master copy), made when new."""

    def __init__(self, look: Callable[[torch.Tensor, dict[str, Any]], tuple[list[torch.Tensor], bool]]) -> None:
        self._look = look
        self._kept: _Kept | None = None

    def groups(self, param_groups: list[dict[str, Any]], state: dict[Any, Any]) -> list[om.AdamWGroup]:
        """One or two lists a parameter group (those with a master copy apart), of the parameters that have gradients."""
        params = list(chain.from_iterable(group["params"] for group in param_groups))
        grads = [p.grad for p in params]
        absent = [g is None for g in grads]
        flags = [group["amsgrad"] for group in param_groups]
        kept = self._kept
        if (
            kept is not None and absent == kept.absent and flags == kept.flags and _same(params, kept.params)
            and _same(_entries(state), kept.entries) and set(map(type, grads)) <= _KNOWN and _all_strided(grads)
        ):  # fmt: skip
            pairs = zip(kept.groups, kept.places, strict=True)
            return [_with(found, param_groups[g], [grads[i] for i in positions]) for found, (g, positions) in pairs]
        return self._anew(param_groups, state, params, grads, absent, flags)

    def _anew(
        self,
        param_groups: list[dict[str, Any]],
        state: dict[Any, Any],
        params: list[torch.Tensor],
        grads: list[Any],
        absent: list[bool],
        flags: list[Any],
    ) -> list[om.AdamWGroup]:
        self._kept = None
        plain = True
        rows: dict[tuple[int, bool], list[Row]] = {}
        number = -1
        for at, group in enumerate(param_groups):
            for p in group["params"]:
                number += 1
                g = grads[number]
                if g is None:
                    continue
                entries, with_master = self._look(p, group)
                row = (p, g, *entries)
                if type(p) not in PLAIN or type(g) not in PLAIN or g.layout is not torch.strided:
                    row, plain = _local(row), False
                rows.setdefault((at, with_master), []).append((number, *row))
        groups = [_group(param_groups[at], found, with_master) for (at, with_master), found in rows.items()]
        if plain and all(type(entries) is dict for entries in state.values()):
            places = [(at, [row[0] for row in found]) for (at, _), found in rows.items()]
            without = [group._replace(grads=()) for group in groups]
            self._kept = _Kept(params, absent, _entries(state), flags, places, without)
        return groups


def _entries(state: dict[Any, Any]) -> list[Any]:
    """Every entry of every parameter's state, in order."""
    if set(map(type, state.values())) - {dict}:
        return []
    return list(chain.from_iterable(map(dict.values, state.values())))


def _same(one: list[Any], other: list[Any]) -> bool:
    """The very same objects in the same order."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _all_strided(grads: list[Any]) -> bool:
    return set(map(_layout, filter(_there, grads))) <= {torch.strided}


def _there(g: Any) -> bool:
    return g is not None


def _with(found: om.AdamWGroup, group: dict[str, Any], grads: list[torch.Tensor]) -> om.AdamWGroup:
    """A kept group with today's gradients and hyper-parameters."""
    beta1, beta2 = group["betas"]
    return found._replace(
        grads=grads, lr=group["lr"], beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
        maximize=group["maximize"],
    )  # fmt: skip


def _group(group: dict[str, Any], rows: Iterable[Row], with_master: bool) -> om.AdamWGroup:
    numbers, params, grads, steps, exp_avgs, exp_avg_sqs, *rest = map(list, zip(*rows, strict=True))
    largest, masters = rest[0] if group["amsgrad"] else (), rest[-1] if with_master else ()
    found = om.AdamWGroup(
        params, (), exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs=largest, masters=masters, numbers=numbers
    )  # fmt: skip
    return _with(found, group, grads)


def _local(row: Row) -> Row:
    """The tensors of one parameter as this process holds them: the shards of DTensors. The update is elementwise, so shards are enough."""
    p, g = row[:2]
    require(g.layout is torch.strided, "gradients", "dense", str(g.layout), "Use torch.optim.SparseAdam for sparse ones.")
    others = sorted({type(t).__name__ for t in row if type(t) not in PLAIN and not hasattr(t, "to_local")})
    require(not others, "params", "torch.Tensor or DTensor", " and ".join(others), "Use torch.optim.AdamW for other kinds.")
    if hasattr(p, "to_local"):
        g = g.redistribute(placements=p.placements)
    return tuple(t.to_local() if hasattr(t, "to_local") else t for t in (p, g, *row[2:]))
