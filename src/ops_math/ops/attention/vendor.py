"""PyTorch's attention kernels, called below `scaled_dot_product_attention` so that forward and backward are launches of their own.

They all take [B, H, S, D] with any strides (unit along D), so ours go in as transposed views; only lse needs another shape for some.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ops_math import features
from ops_math.layout import copied, dense
from ops_math.ops.attention import vendor_documents
from ops_math.ops.attention.problem import AttentionProblem, cost, gradients
from ops_math.spec import Device

KINDS = ("cpu", "cuda", "hip")
CPU, GPU = ("flash_cpu", "flash_cpu_wide"), ("cudnn", "flash", "efficient")
ATEN = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "flash_cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "flash_cpu_wide": "_scaled_dot_product_flash_attention_for_cpu",  # the backward of 16-bit tensors, on copies of them in fp32
}
ALIGNMENT = 16  # bytes
UNFIT = "an operand of attention", "its last dimension has a stride, or its memory starts off the kernels' grid"
LSE_ALIGNMENT = 32  # the memory-efficient kernel pads rows of lse to this
# [TFLOP/s] forward and backward, H200, bf16, torch 2.11, 2026-11-29: D 128 S 4096 and D 64 S 2048, causal, 32 heads on 8 keys.
RATES = {
    "cudnn": ((624.0, 470.0), (400.0, 318.0)),
    "flash": ((328.0, 253.0), (258.0, 189.0)),
    "efficient": ((180.0, 120.0), (150.0, 100.0)),
}


def supports(p: AttentionProblem, device: Device, phase: str) -> str | None:
    """Why none of them can run it, or None."""
    variants = CPU if device.kind == "cpu" else GPU
    reasons = [(name, against(name, p, device, phase)) for name in variants]
    return None if any(why is None for _, why in reasons) else "; ".join(dict.fromkeys(str(why) for _, why in reasons))


def configs(p: AttentionProblem, device: Device, phase: str) -> tuple[str, ...]:
    """The variants that can run it, fastest measured first."""
    return tuple(name for name in (CPU if device.kind == "cpu" else GPU) if against(name, p, device, phase) is None)


def against(name: str, p: AttentionProblem, device: Device, phase: str) -> str | None:
    """Why one variant cannot run the problem, or None."""
    function = ATEN[name] + ("" if phase == "fwd" else "_backward")
    if not features.has_kernel(function, device.kind):
        return f"this PyTorch has no {function} kernel for {device.kind}"
    if p.empty:
        return "does not take empty tensors"
    if p.documents >= 0 and name not in CPU:
        return "is not called on packed documents"
    if p.dropout_p:
        return "draws dropout masks of its own"
    if p.softcap:
        return "has no soft cap"
    causal = p.right == 0 and p.left < 0
    if not causal and (p.left >= 0 or p.right >= 0):
        return "has no sliding window"
    if name in CPU:
        return _against_cpu(name, p, causal, phase)
    if p.mask or p.key_padding:
        return "is not called with masks: rows without a key come out as NaN"
    if p.dtype not in ("fp16", "bf16"):
        return "wants fp16 or bf16"
    if name == "cudnn" and (device.kind != "cuda" or int(device.arch) < 80):
        return "cuDNN's attention needs an NVIDIA GPU from sm_80 on"
    if p.head_dim % 8 or p.head_dim > (128 if name == "cudnn" else 256):
        return f"takes head widths in steps of 8 up to {128 if name == 'cudnn' else 256}"
    if name == "cudnn" and p.q_len == p.k_len == 1:
        return "does not take one query on one key"
    if causal and p.q_len != p.k_len:
        return "is causal for as many queries as keys only"
    if name == "efficient" and p.group > 1:
        return "has no grouped queries"
    return None


def _against_cpu(name: str, p: AttentionProblem, causal: bool, phase: str) -> str | None:
    narrow = phase == "bwd" and p.dtype in ("fp16", "bf16")
    if narrow and name == "flash_cpu":  # measured: twice eager's error in dk and dv (torch 2.13)
        return "adds up the gradients of keys and values in 16 bits"
    if not narrow and name == "flash_cpu_wide":
        return "widens 16-bit tensors in the backward, where sums need it"
    if p.mask or p.key_padding:
        return "is not called with masks"
    if causal and p.bottom_right and p.q_len != p.k_len and p.documents < 0:
        return "aligns causal to the top left corner"
    if p.group > 1 and not _cpu_groups():
        return "has no grouped queries in this PyTorch"
    return None


@lru_cache(maxsize=1)
def _cpu_groups() -> bool:
    """Whether the CPU kernels let one key head serve several query heads in order, forward and backward: tried on a small call."""
    with torch.no_grad():
        own = torch.Generator().manual_seed(0)  # the user's numbers stay as they are
        q, k = (torch.randn(1, heads, 3, 8, device="cpu", generator=own) for heads in (4, 2))
        forward, backward = features.aten(ATEN["flash_cpu"]), features.aten(ATEN["flash_cpu"] + "_backward")
        try:
            out, lse = forward(q, k, k, 0.0, False)
            _, dk, _ = backward(q, q, k, k, out, lse, 0.0, False)
        except (RuntimeError, IndexError):
            return False
        wide = k.repeat_interleave(2, 1)
        expected, same = forward(q, wide, wide, 0.0, False)
        _, dwide, _ = backward(q, q, wide, wide, expected, same, 0.0, False)
        return torch.allclose(out, expected) and dk.shape == k.shape and torch.allclose(dk, dwide.unflatten(1, (2, 2)).sum(2), atol=1e-5)


def predict_us(p: AttentionProblem, device: Device, phase: str) -> float:
    """From rates measured on an H200, in proportion to the device's products; packing the gradient is three more passes."""
    name, flops = configs(p, device, phase)[0], cost(p, phase).total_flops
    if name in CPU:
        return flops / (device.product_tflops * 0.5e6) + device.launch_us  # not by document: eager makes more calls for each
    wide, narrow = RATES[name]
    rate = (wide if p.head_dim > 64 else narrow)[phase == "bwd"] * device.product_tflops / 770.0
    packing = 2 * p.batch * (p.q_len * p.heads + 2 * p.k_len * p.kv_heads) * p.head_dim * 2 if p.packed_qkv and phase == "bwd" else 0
    return flops / (rate * 1e6) + packing / (device.bandwidth_gbs * 1e3) + (1 if phase == "fwd" else 3) * device.launch_us


def launch_fwd(
    p: AttentionProblem, config: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, S, H, D] contiguous and lse [B, H, S]."""
    if p.documents >= 0:
        return vendor_documents.launch_fwd(p, q, k, v, *masks[2:4])
    function, causal = features.aten(ATEN[config]), p.right == 0
    inputs = heads_first(q, k, v)
    if config in CPU:
        out, lse = function(*inputs, 0.0, causal, scale=p.scale)
    elif config == "flash":
        out, lse = function(*inputs, 0.0, causal, False, scale=p.scale)[:2]
    elif config == "cudnn":
        out, lse = function(*inputs, None, True, 0.0, causal, False, scale=p.scale)[:2]
    else:
        out, lse = function(*inputs, None, True, 0.0, causal, scale=p.scale)[:2]
    return dense(out.transpose(1, 2), "attention's output", "PyTorch's kernel wrote it heads first"), lse_out(lse, p)


def launch_bwd(
    p: AttentionProblem,
    config: str,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *masks: Any,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, or the gradient of one projection."""
    if p.documents >= 0:
        return vendor_documents.launch_bwd(p, config == "flash_cpu_wide", dout, q, k, v, out, lse, *masks[2:4])
    function, causal = features.aten(ATEN[config] + "_backward"), p.right == 0
    head = heads_first(dout, q, k, v)
    o = out.transpose(1, 2)
    if config == "flash_cpu_wide":
        grads = function(*(t.float() for t in (*head, o)), lse, 0.0, causal, scale=p.scale)
    elif config == "flash_cpu":
        grads = function(*head, o, lse, 0.0, causal, scale=p.scale)
    elif config == "efficient":
        seed = _philox(q)
        padded = F.pad(lse, (0, -p.q_len % LSE_ALIGNMENT))
        grads = function(*head, None, o, padded, seed, seed, 0.0, [p.need_dq, p.need_dk, p.need_dv, False], causal, scale=p.scale)
    elif config == "flash":
        seed = _philox(q)
        grads = function(*head, o, lse, None, None, p.q_len, p.k_len, 0.0, causal, seed, seed, scale=p.scale)
    else:
        seed = _philox(q)
        grads = function(*head, o, lse[..., None], seed, seed, None, None, None, p.q_len, p.k_len, 0.0, causal, scale=p.scale)
    return collected(p, grads, q, k, v)


def collected(p: AttentionProblem, grads: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, S, H, D] contiguous; into one tensor where the inputs are one projection."""
    back = [None if g is None else g.transpose(1, 2) for g in grads[:3]]
    if not p.packed_qkv:
        needed = (p.need_dq, p.need_dk, p.need_dv)
        why = "attention's gradient", "PyTorch's kernel wrote it heads first"
        return tuple(dense(g.to(q.dtype), *why) if need and g is not None else q.new_empty(0) for g, need in zip(back, needed, strict=True))
    results, views = gradients(p, q, k, v)
    for view, g in zip(views, back, strict=True):
        view.copy_(g)
    copied(results[0], "gradient of q, k and v as one", "PyTorch's kernels write them apart")
    return results


def heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[B, H, S, D] as views; a copy only where the last dimension has a stride, or where a base is not aligned as the kernels assume."""
    return tuple((x if x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0 else _moved(x)).transpose(1, 2) for x in tensors)


def _moved(x: torch.Tensor) -> torch.Tensor:
    return copied(x.clone(memory_format=torch.contiguous_format), *UNFIT)


def lse_out(lse: torch.Tensor, p: AttentionProblem) -> torch.Tensor:
    """lse [B, H, S] dense: padding cut off, a last dimension of one dropped."""
    sums = (lse[..., 0] if lse.dim() == 4 else lse)[:, :, : p.q_len]
    return dense(sums, "attention's sums", "PyTorch's kernel wrote them in other strides")


def _philox(q: torch.Tensor) -> torch.Tensor:
    """The random state that a backward without dropout does not read."""
    return torch.zeros((), dtype=torch.int64, device=q.device)
