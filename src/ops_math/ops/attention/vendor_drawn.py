"""cuDNN's attention with dropout, whose mask comes from PyTorch's CUDA generator and is drawn again from the returned seed and offset."""

from __future__ import annotations

import torch

from ops_math import features
from ops_math.ops.attention import vendor
from ops_math.ops.attention.problem import AttentionProblem
from ops_math.spec import Device

KINDS = ("cuda",)


def supports(p: AttentionProblem, device: Device, phase: str) -> str | None:
    """What cuDNN takes without dropout it takes with it."""
    return vendor.against("cudnn", p._replace(dropout_p=0.0), device, phase)


def determinism(p: AttentionProblem, config: None, phase: str) -> int:
    """The forward repeats for a state of the generator; the backward may add in another order."""
    return 1 if phase == "fwd" else 0


def launch_fwd(p: AttentionProblem, config: None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """out [B, S, H, D], lse [B, H, S], and (seed, offset) int64 [2] on the device."""
    forward, inputs = features.aten(vendor.ATEN["cudnn"]), vendor.heads_first(q, k, v)
    out, lse, _, _, _, _, seed, offset, _ = forward(*inputs, None, True, p.dropout_p, p.right == 0, False, scale=p.scale)
    drawn = torch.stack([seed.reshape(()), offset.reshape(())]).to(torch.int64)
    return out.transpose(1, 2).contiguous(), vendor.lse_out(lse, p), drawn


def launch_bwd(
    p: AttentionProblem,
    config: None,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    drawn: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv [B, S, H, D]."""
    backward, seeds = features.aten(vendor.ATEN["cudnn"] + "_backward"), drawn.unbind()
    inputs = vendor.heads_first(dout, q, k, v)
    grads = backward(
        *inputs, out.transpose(1, 2), lse[..., None], *seeds, None, None, None, p.q_len, p.k_len, p.dropout_p, p.right == 0, scale=p.scale
    )
    return vendor.collected(p, grads, q, k, v)
