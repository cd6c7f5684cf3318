"""A step in plain torch, tensor by tensor, with the kernel's roundings: arithmetic in fp32 (fp64 for fp64), one rounding at each store.

Nothing here waits for a device: step counts, scales and the skip are tensors throughout.
"""

from __future__ import annotations

import torch

from ops_math import rng
from ops_math.ops.adamw.problem import AdamWProblem, Group, Scaling
from ops_math.spec import compute_dtype

PASSES, CALLS = 8.0, 20
_HALF = 0xFFFF


def launch_step(p: AdamWProblem, group: Group, scaling: Scaling) -> None:
    """One step of every parameter of a group. `scaling` is on the group's device."""
    changed = None if scaling.found_inf is None else scaling.found_inf.reshape(()) == 0
    factor = multiplier(group, scaling)
    for i in range(len(group.params)):
        _step(group, i, factor, changed, scaling.key if p.stochastic else None)


def multiplier(group: Group, scaling: Scaling) -> torch.Tensor | None:
    """What a gradient is multiplied by, a float64 scalar, or None for 1."""
    if scaling.grad_scale is None and scaling.clip is None:
        return None
    factor = torch.ones((), dtype=torch.float64, device=group.params[0].device)
    if scaling.clip is not None:
        factor = factor * scaling.clip.reshape(()).double()
    return factor if scaling.grad_scale is None else factor / scaling.grad_scale.reshape(()).double()


def _step(group: Group, i: int, factor: torch.Tensor | None, changed: torch.Tensor | None, key: torch.Tensor | None) -> None:
    p, step = group.params[i], group.steps[i]
    source = group.masters[i] if group.masters else p
    compute = compute_dtype(p.dtype)
    step.add_(1 if changed is None else changed)
    t = step.double()
    lr = group.lr.to(step.device).double().reshape(()) if isinstance(group.lr, torch.Tensor) else group.lr

    g = group.grads[i].to(compute)
    g = g if factor is None else g * factor.to(compute)
    g = -g if group.maximize else g
    m, v = group.exp_avgs[i].to(compute), group.exp_avg_sqs[i].to(compute)
    m = m + (1 - group.beta1) * (g - m)
    v = v + (1 - group.beta2) * (g * g - v)
    largest = v
    if group.max_exp_avg_sqs:
        largest = torch.maximum(group.max_exp_avg_sqs[i].to(compute), v)

    denominator = largest.sqrt() * (1 - group.beta2**t).rsqrt().to(compute) + group.eps
    size, decay = (lr / (1 - group.beta1**t)).to(compute), (t.new_ones(()) * lr * group.weight_decay).to(compute)
    before = source.to(compute)
    after = before - (decay * before + size * (m / denominator))

    words = None if key is None else uniform_words(key, group.numbers[i], step, p)
    store(p, after, words, 0, changed)
    store(group.exp_avgs[i], m, None, 0, changed)
    store(group.exp_avg_sqs[i], v, words, 16, changed)
    if group.max_exp_avg_sqs:
        store(group.max_exp_avg_sqs[i], largest, None, 0, changed)
    if group.masters:
        store(source, after, None, 0, changed)


def store(target: torch.Tensor, value: torch.Tensor, words: torch.Tensor | None, shift: int, changed: torch.Tensor | None) -> None:
    """Round into `target` where `changed` (None: everywhere): stochastically by 16 bits of `words` from `shift` on where it is bf16."""
    if words is not None and target.dtype == torch.bfloat16:
        value = stochastically(value, words >> shift)
    value = value.to(target.dtype)
    target.copy_(value if changed is None else torch.where(changed, value, target))


def stochastically(value: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to bf16, up with the probability of the part that is cut off: the mean over words is the value itself.

    The lower 16 bits of each word are uniform, the cut-off part counts in units of 2^-16 of the gap to the neighbour, so the sum
    carries with exactly that probability. NaN stays NaN (the carry could run through its bits).
    """
    bits = value.contiguous().view(torch.int32) + (words & _HALF).to(torch.int32)
    rounded = (bits & ~_HALF).view(torch.float32)
    return torch.where(torch.isfinite(value), rounded, value).to(torch.bfloat16)


def uniform_words(key: torch.Tensor, number: int, step: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A word in [0, 2^32) (int64) for each element of a parameter: word i % 4 of Philox at (i // 4, number, step) for the element that is
    i-th in memory."""
    count = like.numel()
    group = torch.arange((count + 3) // 4, device=like.device)
    row = torch.full((), number, dtype=torch.int64, device=like.device)
    words = torch.stack(torch.broadcast_tensors(*rng.philox(key, row, step.to(torch.int64), group)), -1)
    flat = words.flatten()[:count]
    if like.is_contiguous():
        return flat.view(like.shape)
    found = torch.empty_like(like, dtype=torch.int64)
    return found.as_strided((count,), (1,)).copy_(flat).as_strided(like.shape, like.stride()) if dense(like) else flat.view(like.shape)


def dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their stretch of memory without gaps and without sharing."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
