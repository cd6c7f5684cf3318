"""Attention whose dropout mask PyTorch draws: what `attention` does where no `rng` is given and a vendor kernel takes the call.

Such a mask depends on the generator's state and on the kernel, not on a key and coordinates; a call with an `rng` never comes here. It is
PyTorch's own `scaled_dot_product_attention`, autograd included: cuDNN with dropout runs 2.5 times as fast as our kernel that draws by
key (H200, BERT-large, forward and backward, 2026-11-29), and keeps seed and offset by itself.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from ops_math import backends, settings
from ops_math.ops.attention import vendor
from ops_math.ops.attention.problem import AttentionProblem, cost
from ops_math.spec import Device
from ops_math.spec import dtype_name as name_of
from ops_math.stats import counter as counter_for

REASON = "PyTorch draws the mask: no rng was given"


def _problem(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> AttentionProblem:
    batch, q_len, heads, width = q.shape
    k_len, kv_heads = k.shape[1:3]
    rule = (scale, False, -1, 0 if causal else -1, 0.0, "", False, -1, 0, 0, dropout_p)
    return AttentionProblem(batch, q_len, k_len, heads, kv_heads, width, name_of(q.dtype), "", *rule)


@lru_cache(maxsize=256)
def _can(problem: AttentionProblem, device: Device) -> int:
    """The least traffic [B] of the call where a fused vendor kernel takes it, else -1."""
    without = problem._replace(dropout_p=0.0)
    fused = any(all(vendor.against(name, without, device, phase) is None for phase in ("fwd", "bwd")) for name in ("cudnn", "flash"))
    return cost(problem, "fwd").bytes if fused else -1


def can_draw(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> bool:
    """Whether PyTorch may draw the mask of this call: on GPUs with a fused kernel for it, when nothing else is asked for, at determinism
    level 0, and not while tracing, where a recomputation could draw another one."""
    if not q.is_cuda or torch.compiler.is_compiling() or dict(settings.policy().forced).get("attention", "vendor") != "vendor":
        return False
    return not settings.determinism_level() and _can(_problem(q, k, causal, scale, dropout_p), backends.device_of(q.device)) >= 0


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dropout_p: float) -> torch.Tensor:
    """out [B, Sq, H, D] of [B, S, H, D] tensors of one 16-bit dtype."""
    counter = counter_for("attention", "fwd", "vendor:sdpa", REASON)
    counter.calls += 1
    counter.bytes += _can(_problem(q, k, causal, scale, dropout_p), backends.device_of(q.device))
    grouped = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()
