"""AdamW as PyTorch has it: what runs when the library is switched off.

`torch.optim.adamw.adamw` wants parameters and averages of one dtype. Where they differ (averages or a master copy in fp32 beside bf16
parameters, stochastic rounding) the step is made on wide copies and its results are put back.
"""

from __future__ import annotations

from typing import Any

from torch.optim.adamw import adamw as torch_adamw

from ops_math.ops.adamw.eager import store, uniform_words
from ops_math.ops.adamw.problem import Group, Scaling


def adamw(group: Group, scaling: Scaling, options: dict[str, Any]) -> None:
    """One step of PyTorch's functional AdamW; `options` are its `foreach`, `fused` and `capturable`.

    Its unfused forms cannot scale or skip, so with `grad_scale` or `found_inf` the fused one runs (which writes unscaled gradients back).
    """
    if not group.params:
        return
    scaled = scaling.grad_scale is not None or scaling.found_inf is not None
    chosen = {**options, "fused": True, "foreach": False} if scaled else options
    grads = list(group.grads)
    if scaling.clip is not None:
        grads = [g * scaling.on(g.device).clip.to(g.dtype) for g in grads]
    same = not group.masters and scaling.key is None and all(p.dtype == m.dtype for p, m in zip(group.params, group.exp_avgs, strict=True))
    if same:
        _step(group._replace(grads=grads), scaling, chosen)
        return
    wide = group._replace(
        params=list(group.masters) or [p.float() for p in group.params],
        grads=[g.float() for g in grads],
        exp_avgs=[m.float() for m in group.exp_avgs],
        exp_avg_sqs=[v.float() for v in group.exp_avg_sqs],
        max_exp_avg_sqs=[v.float() for v in group.max_exp_avg_sqs],
    )
    _step(wide, scaling, chosen)
    _put_back(group, wide, scaling)


def _step(group: Group, scaling: Scaling, options: dict[str, Any]) -> None:
    torch_adamw(
        list(group.params), list(group.grads), list(group.exp_avgs), list(group.exp_avg_sqs), list(group.max_exp_avg_sqs),
        list(group.steps), **options, grad_scale=scaling.grad_scale, found_inf=scaling.found_inf, amsgrad=bool(group.max_exp_avg_sqs),
        beta1=group.beta1, beta2=group.beta2, lr=group.lr, weight_decay=group.weight_decay, eps=group.eps, maximize=group.maximize,
    )  # fmt: skip


def _put_back(group: Group, wide: Group, scaling: Scaling) -> None:
    """Round what was computed on wide copies into the tensors themselves."""
    on = scaling.on(group.params[0].device)
    for i, p in enumerate(group.params):
        words = None if on.key is None else uniform_words(on.key, group.numbers[i], group.steps[i], p)
        changed = None if on.found_inf is None else on.found_inf == 0
        store(p, wide.params[i], words, 0, changed)
        store(group.exp_avgs[i], wide.exp_avgs[i], None, 0, changed)
        store(group.exp_avg_sqs[i], wide.exp_avg_sqs[i], words, 16, changed)
        if group.max_exp_avg_sqs:
            store(group.max_exp_avg_sqs[i], wide.max_exp_avg_sqs[i], None, 0, changed)
