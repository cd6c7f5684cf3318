"""Attention whose dropout mask PyTorch's generator draws inside a vendor kernel: what `attention` calls where no `rng` is given.

Such a mask depends on the generator's state and on the kernel, not on a key and coordinates; a call with an `rng` never comes here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ops_math import backends, settings
from ops_math.dispatch import apply, define, needs_grad
from ops_math.ops.attention.problem import AttentionProblem
from ops_math.spec import Device
from ops_math.spec import dtype_name as name_of


def _problem(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, dropout_p: float, *needs: bool) -> AttentionProblem:
    batch, q_len, heads, width = q.shape
    k_len, kv_heads = k.shape[1:3]
    rule = (scale, False, -1, 0 if causal else -1, 0.0, "", False, -1, 0, 0, dropout_p)
    return AttentionProblem(batch, q_len, k_len, heads, kv_heads, width, name_of(q.dtype), "", *rule, False, *needs)


def _problem_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rule: Any) -> AttentionProblem:
    return _problem(q, k, *rule)


def _problem_bwd(
    dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, lse: Any, drawn: Any, *rule: Any
) -> AttentionProblem:
    return _problem(q, k, *rule)


def _fake_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rule: Any) -> tuple[torch.Tensor, ...]:
    batch, q_len, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, q_len), dtype=torch.float32), q.new_empty((2,), dtype=torch.int64)


def _fake_bwd(dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape if need else (0,)) for x, need in zip((q, k, v), rest[-3:], strict=True))


_RULE = "bool causal, float scale, float dropout_p"
OP = define(
    "attention_drawn",
    __package__,
    fwd=f"(Tensor q, Tensor k, Tensor v, {_RULE}) -> (Tensor, Tensor, Tensor)",
    bwd=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor drawn, {_RULE}, "
    "bool need_dq, bool need_dk, bool need_dv) -> (Tensor, Tensor, Tensor)",
    fake_fwd=_fake_fwd,
    fake_bwd=_fake_bwd,
    problem_fwd=_problem_fwd,
    problem_bwd=_problem_bwd,
    implementations=("vendor",),
    variant="_drawn",
)


class _Drawn(torch.autograd.Function):
    """Saves q, k, v, out, lse and the generator's seed and offset, from which the backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rule: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, drawn = OP.fwd(q, k, v, *rule)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, out, lse, drawn)
        ctx.rule = rule
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, dlse: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[:3]
        grads = OP.bwd(dout, *ctx.saved_tensors, *ctx.rule, *needed)
        return (*(g if need else None for g, need in zip(grads, needed, strict=True)), None, None, None)


@lru_cache(maxsize=256)
def _can(problem: AttentionProblem, device: Device) -> bool:
    implementation = OP.implementations()[0].module
    return device.kind in implementation.KINDS and all(implementation.supports(problem, device, phase) is None for phase in ("fwd", "bwd"))


def can_draw(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> bool:
    """Whether a vendor kernel may draw the mask of this call: on its devices, when nothing else is asked for, at determinism level 0."""
    if not q.is_cuda or torch.compiler.is_compiling() or dict(settings.policy().forced).get("attention", "vendor") != "vendor":
        return False
    return not settings.determinism_level() and _can(_problem(q, k, causal, scale, dropout_p), backends.device_of(q.device))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of [B, S, H, D] tensors of one 16-bit dtype."""
    if needs_grad(q, k, v):
        return apply(_Drawn, q, k, v, causal, scale, dropout_p)
    out, lse, _ = OP.fwd(q, k, v, causal, scale, dropout_p)
    return out, lse
