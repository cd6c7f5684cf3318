"""Attention whose dropout mask PyTorch draws: what `attention` may do where no `rng` is given and a vendor kernel takes the call.

Such a mask depends on the generator's state and on the kernel, not on a key and coordinates; a call with an `rng` never comes here. It is
PyTorch's own `scaled_dot_product_attention`, autograd included, which keeps seed and offset by itself. On a GPU `DRAWS_ITSELF` says
which forms are left to it; `force(attention="vendor")` leaves it every form that it can run, `force(attention="triton_gpu")` none.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ops_math import backends, settings
from ops_math.dispatch import apply, needs_grad
from ops_math.layout import copied, dense
from ops_math.ops.attention import vendor
from ops_math.ops.attention.problem import AttentionProblem, cost
from ops_math.spec import Device
from ops_math.spec import dtype_name as name_of
from ops_math.stats import counter as counter_for

REASON = "PyTorch draws the mask: no rng was given"
# Whether PyTorch's kernel is left to draw on a GPU, by (heads wider than 64, causal): where it is faster, forward and backward together,
# the gradients joined as a packed projection needs them. tools/gpu/attention_dropout.py on an H200, 2026-11-29: 642 us against our 616 at
# 32 x 512 x 16 x 64; 2,286 and 2,306 at 8 x 2048 x 32 x 64, causal; 5,185 and 6,359 at 4 x 4096 x 16 x 128.
DRAWS_ITSELF = {(False, False): False, (False, True): True, (True, False): True, (True, True): True}


class Form(NamedTuple):
    """Shape and dtype of a self-attention: q [batch, length, heads, width], k and v with `kv_heads`."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype


def default_scale(width: int, scale: float | None) -> float:
    """The scale of q k^T: as given, or 1 / sqrt(width)."""
    return 1.0 / math.sqrt(max(width, 1)) if scale is None else float(scale)


@lru_cache(maxsize=256)
def _problem(form: Form, k_length: int, causal: bool, scale: float, dropout_p: float) -> AttentionProblem:
    rule = (scale, False, -1, 0 if causal else -1, 0.0, "", False, -1, 0, 0, dropout_p)
    return AttentionProblem(form.batch, form.length, k_length, form.heads, form.kv_heads, form.width, name_of(form.dtype), "", *rule)


@lru_cache(maxsize=256)
def _can(problem: AttentionProblem, device: Device) -> int:
    """The least traffic [B] of the call where a fused vendor kernel takes it, else -1."""
    without = problem._replace(dropout_p=0.0)
    fused = any(all(vendor.against(name, without, device, phase) is None for phase in ("fwd", "bwd")) for name in ("cudnn", "flash"))
    return cost(problem, "fwd").bytes if fused else -1


def can_draw(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> bool:
    """Whether PyTorch draws the mask of this call, when nothing else is asked for: on a CPU below determinism level 2, where a keyed mask
    costs more than the rest of the call; on GPUs with a fused kernel for it, at determinism level 0, where it is faster or asked for by
    name. Not while tracing, where a recomputation could draw another."""
    return can_draw_form(_form(q, k), q.device, causal, scale, dropout_p, k.shape[1])


def can_draw_form(form: Form, device: torch.device, causal: bool, scale: float, dropout_p: float, k_length: int | None = None) -> bool:
    """`can_draw` before the tensors are there."""
    forced = dict(settings.policy().forced).get("attention")
    if torch.compiler.is_compiling() or forced not in (None, "vendor"):
        return False
    if device.type != "cuda":
        return device.type == "cpu" and settings.determinism_level() < 2 and not settings.triton_interpret()
    problem = _problem(form, form.length if k_length is None else k_length, causal, scale, dropout_p)
    wanted = forced == "vendor" or DRAWS_ITSELF[form.width > 64, causal]
    return wanted and not settings.determinism_level() and _can(problem, backends.device_of(device)) >= 0


def _form(q: torch.Tensor, k: torch.Tensor) -> Form:
    batch, length, heads, width = q.shape
    return Form(batch, length, heads, k.shape[2], width, q.dtype)


class _Parts(torch.autograd.Function):
    """q, k, v [..., heads, D] of a projection [..., (H + 2 K) D], whose three gradients are joined by a copy that is counted."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        return qkv.unflatten(-1, (sum(sizes), qkv.shape[-1] // sum(sizes))).split(sizes, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return copied(torch.cat(grads, -2).flatten(-2), "gradients of q, k and v", "PyTorch's attention writes them apart"), None


def attend_packed(qkv: torch.Tensor, num_heads: int, kv_heads: int, causal: bool, scale: float, dropout_p: float) -> torch.Tensor:
    """`attend` of one projection [B, S, (H + 2 K) D]."""
    sizes = (num_heads, kv_heads, kv_heads)
    q, k, v = apply(_Parts, qkv, sizes) if needs_grad(qkv) else qkv.unflatten(-1, (sum(sizes), -1)).split(sizes, -2)
    return attend(q, k, v, causal, scale, dropout_p)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> torch.Tensor:
    """out [B, Sq, H, D] of [B, S, H, D] tensors of one 16-bit dtype."""
    out = attend_heads(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, scale, dropout_p)
    return dense(out.transpose(1, 2), "attention's output", "PyTorch's kernel wrote it heads first")


def attend_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> torch.Tensor:
    """out [B, H, Sq, D] of [B, H, S, D] views of one 16-bit dtype."""
    batch, heads, length, width = q.shape
    problem = _problem(Form(batch, length, heads, k.shape[1], width, q.dtype), k.shape[2], causal, scale, dropout_p)
    counter = counter_for("attention", "fwd", "vendor:sdpa", REASON)
    counter.calls += 1
    counter.bytes += cost(problem, "fwd").bytes if q.device.type == "cpu" else _can(problem, backends.device_of(q.device))
    return F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=scale, enable_gqa=heads != k.shape[1])
