"""Host time [us] of what a block is made of, on small tensors so that the device never holds the host back."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import ops_math as om
from ops_math.blocks import recognise
from ops_math.ops.attention import op_drawn
from ops_nn.models.bert import BertConfig, BertForMaskedLM


class Nothing(torch.autograd.Function):
    """A function that does nothing."""

    @staticmethod
    def forward(ctx, x, w):
        """x as a view."""
        ctx.save_for_backward(x, w)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        """dy."""
        return dy, None


def cost(name, call, n=300):
    """Print the time of one call."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(n):
        call()
        if i % 100 == 99:
            torch.cuda.synchronize()
    print(f"{name:34s} {(time.perf_counter() - start) / n * 1e6:8.1f} us")


def alternating(calls, rounds=40, n=25):
    """Print the time of each call, the median of rounds in which they take turns."""
    for _, call in calls:
        for _ in range(40):  # past the sixteenth, which is written down
            call()
    times = {name: [] for name, _ in calls}
    for _ in range(rounds):
        for name, call in calls:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                call()
            times[name].append((time.perf_counter() - start) / n * 1e6)
    torch.cuda.synchronize()
    for name, found in times.items():
        print(f"{name:44s} {statistics.median(found):8.1f} us  (least {min(found):.1f})")


def norms():
    """RMSNorm forward, with and without gradients, and forward and backward: ours, PyTorch's, and Liger's where it is installed."""
    bf = torch.bfloat16
    x, w = torch.randn(2, 64, 256, device="cuda", dtype=bf), torch.randn(256, device="cuda", dtype=bf)
    xg, wg, dy = x.clone().requires_grad_(), torch.nn.Parameter(w.clone()), torch.ones_like(x)
    contenders = {"om.rms_norm": om.rms_norm, "F.rms_norm": lambda x, w: F.rms_norm(x, (256,), w, 1e-6)}
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        contenders["Liger rms_norm"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6)
    except ImportError as error:
        print(f"Liger is left out: {error}")
    calls = [("torch.empty", lambda: torch.empty(64, device="cuda")), ("Function.apply", lambda: Nothing.apply(xg, wg))]
    calls.append(("Function.apply, backward", lambda: torch.autograd.grad(Nothing.apply(xg, wg), xg, dy)))
    for name, norm in contenders.items():
        calls.append((f"{name}, no grad", lambda norm=norm: norm(x, w)))
        calls.append((f"{name}, grad", lambda norm=norm: norm(xg, wg)))
        calls.append((f"{name}, forward and autograd.grad", lambda norm=norm: torch.autograd.grad(norm(xg, wg), (xg, wg), dy)))

        def step(norm=norm):
            norm(xg, wg).backward(dy)
            xg.grad = wg.grad = None

        calls.append((f"{name}, forward and .backward()", step))
    alternating(calls)


def main() -> None:
    """Measure."""
    norms()
    if "norms" in sys.argv:
        return
    bf = torch.bfloat16
    x = torch.randn(2, 64, 256, device="cuda", dtype=bf)
    xg = x.clone().requires_grad_()
    w, b = torch.randn(256, 256, device="cuda", dtype=bf), torch.randn(256, device="cuda", dtype=bf)
    wf = [torch.randn(256, 256, device="cuda") for _ in range(6)]
    rows = x.view(-1, 256)
    q = torch.randn(2, 64, 4, 64, device="cuda", dtype=bf)
    norm_w = torch.randn(256, device="cuda")
    cost("python call", lambda: None)
    cost("torch.empty", lambda: torch.empty(64, device="cuda"))
    cost("view", lambda: x.view(-1, 256))
    cost("unflatten", lambda: x.unflatten(-1, (4, 64)))
    cost("to(bf16)", lambda: wf[0].to(bf))
    cost("foreach_copy 6", lambda: torch._foreach_copy_([w] * 6, wf))
    cost("split 6", lambda: torch.empty(6 * 256, device="cuda").split([256] * 6))
    cost("randint(3)", lambda: torch.randint(-(2**62), 2**62, (3,), device="cuda"))
    cost("linear with bias", lambda: F.linear(x, w, b))
    cost("linear", lambda: F.linear(x, w))
    cost("mm", lambda: rows @ w)
    cost("mm to fp32", lambda: torch.ops.aten.mm.dtype(rows.t(), rows, torch.float32))
    cost("sum(0) fp32", lambda: rows.sum(0, dtype=torch.float32))
    cost("Function.apply", lambda: Nothing.apply(xg, w))
    cost("rms_norm, no grad", lambda: om.rms_norm(x, norm_w))
    cost("rms_norm, grad", lambda: om.rms_norm(xg, norm_w))
    cost("F.rms_norm, no grad", lambda: F.rms_norm(x, (256,), b))
    cost("add_layer_norm dropout, grad", lambda: om.add_layer_norm(xg, x, norm_w, norm_w, dropout_p=0.1, x_bias=norm_w))
    cost("gelu bias", lambda: om.gelu(xg, norm_w))
    cost("attention drawn", lambda: om.attention(q, q, q, dropout_p=0.1))
    cost("can_draw", lambda: op_drawn.can_draw(q, q, False, 0.125, 0.1))
    cost("sdpa dropout", lambda: F.scaled_dot_product_attention(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2), dropout_p=0.1))
    model = BertForMaskedLM(BertConfig(512, 256, 1024, num_layers=1, num_heads=4)).cuda().train()
    layer = model.bert.encoder.layer[0]
    cost("sound(attention)", lambda: recognise.sound(layer.attention, ("bert_attention",)))
    with torch.autocast("cuda", bf):
        if "profile" in sys.argv:
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(200):
                om.residual_attention(xg, None, layer.attention, norm_first=False)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(32)
            return
        cost("plain attention", lambda: layer.attention(xg))
        cost("residual_attention", lambda: om.residual_attention(xg, None, layer.attention, norm_first=False))
        cost("residual_mlp", lambda: om.residual_mlp(xg, None, layer, norm_first=False))
        cost("plain layer", lambda: layer(xg))
        out = om.residual_mlp(om.residual_attention(xg, None, layer.attention, norm_first=False), None, layer, norm_first=False)
        plain = layer(xg)
        params = [xg, *(p for p in layer.parameters())]
        fed = torch.ones_like(out)
        cost("backward of both blocks", lambda: torch.autograd.grad(out, params, fed, retain_graph=True))
        fed2 = torch.ones_like(plain)
        cost("backward of the plain layer", lambda: torch.autograd.grad(plain, params, fed2, retain_graph=True))


if __name__ == "__main__":
    main()
