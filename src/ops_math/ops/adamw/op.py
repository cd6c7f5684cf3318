"""The contract: signature, checks, and the way of a step.

Not made by `dispatch.define`, and not in the catalogue: it takes lists of tensors, writes in place and has no backward, so neither the
dispatcher's fixed arity nor the conformance suite fits. Its own tests hold it to the same standard.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from ops_math import checks, keywords, settings
from ops_math.ops.adamw import plain
from ops_math.ops.adamw.op_tables import AdamWTables, Table, laid_like
from ops_math.ops.adamw.problem import Group as AdamWGroup
from ops_math.ops.adamw.problem import Scaling
from ops_math.rng import Rng

SETTINGS = ("lr", "beta1", "beta2", "eps", "weight_decay")


@keywords.explained
@torch.no_grad()
def adamw(
    groups: Sequence[AdamWGroup],
    *,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    rng: Rng | None = None,
    tables: AdamWTables | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """One step of AdamW over all parameters of a model, in place and without synchronising.

    t = step + 1; g = grad clip / grad_scale (negated to maximize); m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;
    p = p - lr wd p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    On a GPU two kernels, or one more for each further mixture of dtypes: each parameter, gradient and average is read once and written
    once where it changes. Gradients are left as they are. Raw memory is read and written; CUDA graphs may capture a step once one was taken
    outside. amsgrad, fp64 and tensors with gaps go to PyTorch's fused AdamW or to plain torch, which `om.stats()` shows.

    Args:
        groups: the tensors, with the hyper-parameters of each group; see `AdamWGroup`. Leave parameters without a gradient out.
        grad_scale: what a loss scaler multiplied the loss by, one fp32 element.
        found_inf: 0, or not 0 to leave everything as it is, the step count too; one fp32 element.
        clip: what gradients are multiplied by, e.g. from clipping by norm; one element.
        rng: rounds stored bf16 parameters and bf16 `exp_avg_sqs` stochastically by this key; None rounds to nearest.
        tables: what to keep from one step to the next. None builds it at each call, which costs about a millisecond.
        options: `foreach`, `fused` and `capturable` of PyTorch's functional AdamW, which runs where the library is switched off.

    Precision: arithmetic in fp32 (fp64 for fp64), bias corrections in fp64, one rounding at each store.
    Determinism: no sums; level 3 on a GPU, 2 on a CPU and with stochastic rounding, a function of key, parameter number, step and place in
        the tensor that is given, which may be a shard.
    Raises: ArgumentError for lists that do not belong together; UnsupportedError for a capture without an earlier step, and
        for a determinism level that is not offered.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; Kingma and Ba, Adam, 2015.
    """
    groups = _numbered(groups)
    if rng is not None and not isinstance(rng, Rng):
        checks.fail("adamw", "rng", "an ops_math.Rng or None", type(rng).__name__, "Make one with ops_math.Rng(seed, device).")
    scaling = Scaling(grad_scale, found_inf, clip, None if rng is None else rng.state)
    if not settings.active() or torch.compiler.is_compiling():
        for group in groups:
            plain.adamw(group, scaling, options or {})
        return
    tables = tables if tables is not None else AdamWTables()
    plan = tables.plan(groups, scaling)
    laid = [table.gradients_of(groups) for table in plan.tables]
    found = [table.addresses_of(grads) for table, grads in zip(plan.tables, laid, strict=True)]
    if any(addresses is None for addresses in found):  # a gradient left the grid of 16 bytes: another kernel reads it
        plan = tables.plan(groups, scaling, anew=True)
        laid = [table.gradients_of(groups) for table in plan.tables]
        found = [table.addresses_of(grads) for table, grads in zip(plan.tables, laid, strict=True)]
    for table, addresses in zip(plan.tables, found, strict=True):
        _run(table, addresses, groups, scaling.on(table.device))
    for part in plan.others:
        part.seen()
        for number, positions in part.places:
            group = groups[number].some(positions)
            if part.implementation.name != "eager":  # which goes by coordinates; others go through memory
                group = group._replace(grads=laid_like(list(group.grads), list(group.params)))
            part.implementation.launcher("step")(part.problem, group, scaling.on(group.params[0].device))
            torch.autograd.graph.increment_version(group.params)


def _check_settings(group: AdamWGroup) -> None:
    """Hyper-parameters are numbers. Looked at before the step is counted: a step that fails leaves everything as it was."""
    for name in SETTINGS:
        value = getattr(group, name)
        if type(value) is not float and not isinstance(value, Real) and not (name == "lr" and isinstance(value, torch.Tensor)):
            needs = "a number or a tensor of one element" if name == "lr" else "a number"
            checks.fail("adamw", f"{name} of a group", needs, repr(value), "Look at what sets it, e.g. a scheduler.")


def _numbered(groups: Sequence[AdamWGroup]) -> list[AdamWGroup]:
    """The groups, checked, each parameter with a number."""
    found, count = [], 0
    for group in [groups] if isinstance(groups, AdamWGroup) else groups:
        if group is groups or not isinstance(group, AdamWGroup):
            got, do = type(group).__name__, "ops_nn.optim.AdamW takes parameters." if group is not groups else "Put it into a list."
            checks.fail("adamw", "groups", "a list of ops_math.AdamWGroup", got if group is groups else f"one of {got}", do)
        _check_settings(group)
        found.append(group if group.numbers else group._replace(numbers=range(count, count + len(group.params))))
        count += len(group.params)
    return found


def _run(table: Table, addresses: list[int], groups: Sequence[AdamWGroup], scaling: Scaling) -> None:
    """The two kernels of a device."""
    if table.device.type == "cuda":
        with torch.cuda.device(table.device):
            _launch(table, addresses, groups, scaling)
    else:
        _launch(table, addresses, groups, scaling)
    torch.autograd.graph.increment_version(table.tensors("params", groups))


def _launch(table: Table, addresses: list[int], groups: Sequence[AdamWGroup], scaling: Scaling) -> None:
    gradients, hyper = table.current(addresses, groups)
    grad_scale, clip = (table.one if t is None else t for t in (scaling.grad_scale, scaling.clip))
    found_inf, key = table.zero if scaling.found_inf is None else scaling.found_inf, table.no_key if scaling.key is None else scaling.key
    table.launchers.launch_prepare(table.addresses, hyper, grad_scale, clip, found_inf, table.scalars)
    for part, chunks in zip(table.parts, table.chunks, strict=True):
        part.seen()
        part.implementation.launcher("step")(part.problem, part.config, chunks, table.addresses, gradients, table.scalars, key)
