"""Attention with dropout on one GPU: is it right, and how long does each way of drawing take.

Usage: PYTHONPATH=src:. python tools/gpu/attention_dropout.py [right] [times] [tiles] [mask]     (right, times and mask by default)

right   our kernels against `eager` with the same key, and the drawn bits against the words of `ops_math.rng`
times   forward and backward: PyTorch's kernel that draws by itself, ours by key, ours by key inside the loops, ours without dropout.
        Kernel times [us] are sums of what the profiler saw on the device; host times [us] are of the calls alone. The ways take turns.
mask    the mask kernel alone, by tile
tiles   every tile of the three kernels with dropout beside the same tile without
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import ops_math as om
from ops_math import backends
from ops_math.ops.attention import triton_gpu, triton_gpu_drop
from ops_math.ops.attention.problem import AttentionProblem, Rule, cost, problem_of
from ops_math.ops.attention.triton_gpu import Backward
from ops_math.ops.attention.triton_gpu_drop import MASK_TILES, by_bits, draw_bits
from ops_math.rng import keep_mask

P = 0.1
# name: batch, length, heads, width, causal
SHAPES = {
    "bert-large 32 x 512, 16 x 64": (32, 512, 16, 64, False),
    "8 x 2048, 32 x 64, causal": (8, 2048, 32, 64, True),
    "4 x 4096, 16 x 128": (4, 4096, 16, 128, False),
}
ROUNDS, REPEATS = 5, 4


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


def made(shape: tuple[Any, ...]) -> list[torch.Tensor]:
    """q, k, v as views of one packed projection, and dout."""
    b, s, h, d, _ = shape
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(b, s, 3 * h, d, device="cuda", dtype=torch.bfloat16, generator=generator)
    return [*qkv.split(h, 2), torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16, generator=generator)]


def problem(shape: tuple[Any, ...], dropout_p: float) -> AttentionProblem:
    """The problem of a shape."""
    q = torch.empty(*shape[:4], device="meta", dtype=torch.bfloat16)
    return problem_of(q, q, None, None, None, Rule(shape[3] ** -0.5, True, -1, 0 if shape[4] else -1, 0.0, 0, 0, dropout_p))


def kernel_us(call: Callable[[], Any], repeats: int = REPEATS) -> dict[str, float]:
    """Device time [us] of one call by kernel name, and `sum`."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:40]] += event.device_time / repeats
            times["sum"] += event.device_time / repeats
    return times


def host_us(call: Callable[[], Any]) -> float:
    """Time [us] until a call returns, the device idle before it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    elapsed = 1e6 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return elapsed


def interleaved(ways: dict[str, Callable[[], Any]]) -> None:
    """Time the ways in turns, and print medians of the rounds with the kernels of the last."""
    for call in ways.values():
        for _ in range(3):
            call()
    kernels: dict[str, list[dict[str, float]]] = defaultdict(list)
    hosts: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, call in ways.items():
            kernels[name].append(kernel_us(call))
            hosts[name].append(host_us(call))
    for name in ways:
        total = statistics.median(t["sum"] for t in kernels[name])
        parts = sorted(((us, kernel) for kernel, us in kernels[name][-1].items() if kernel != "sum"), reverse=True)
        shown = ", ".join(f"{kernel} {us:.0f}" for us, kernel in parts[:5])
        say(f"    {name:44s} {total:8.1f} us of kernels  {statistics.median(hosts[name]):7.1f} us of host   {shown}")


def by_key(p: AttentionProblem, tensors: list[torch.Tensor], state: torch.Tensor | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Our forward and backward launchers in their default configurations; the gradient is one packed tensor."""
    q, k, v, dout = tensors
    device = backends.device_of(q.device)
    forward, backward = triton_gpu.configs(p, device, "fwd")[0], triton_gpu.configs(p, device, "bwd")[0]
    lookups = (None, None, None, None, state)
    out, lse = triton_gpu.launch_fwd(p, forward, q, k, v, *lookups)
    packed = p._replace(packed_qkv=True)
    return (
        lambda: triton_gpu.launch_fwd(p, forward, q, k, v, *lookups),
        lambda: triton_gpu.launch_bwd(packed, backward, dout, q, k, v, out, lse, *lookups),
    )


def drawn_by_pytorch(shape: tuple[Any, ...], tensors: list[torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """PyTorch's attention, whichever kernel it takes, with the `cat` that makes one gradient of its three."""
    heads = [t.detach().transpose(1, 2).requires_grad_() for t in tensors[:3]]
    dout = tensors[3].transpose(1, 2)

    def forward() -> Any:
        return F.scaled_dot_product_attention(*heads, None, P, shape[4])

    out = forward()

    def backward() -> Any:
        return torch.cat([g.transpose(1, 2) for g in torch.autograd.grad(out, heads, dout, retain_graph=True)], 2)

    return forward, backward


def inside(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with no room for bits, so that its kernels draw inside their loops."""

    def run() -> Any:
        with mock.patch.object(triton_gpu_drop, "MOST_BYTES", 0):
            return call()

    return run


def times() -> None:
    """The ways of drawing beside each other."""
    for name, shape in SHAPES.items():
        tensors, state = made(shape), om.Rng(1, "cuda").state
        p, none = problem(shape, P), problem(shape, 0.0)
        drawn, ours, free = drawn_by_pytorch(shape, tensors), by_key(p, tensors, state), by_key(none, tensors, None)
        with mock.patch.object(triton_gpu_drop, "MOST_BYTES", 0):
            loops = by_key(p, tensors, state)
        for i, phase in enumerate(("forward", "backward")):
            say(f"{name}, {phase}: {cost(p, ('fwd', 'bwd')[i]).total_flops / 1e9:.1f} GFLOP of products")
            ways = {"PyTorch draws (backward with cat)": drawn[i], "ours, bits drawn ahead": ours[i], "ours, without dropout": free[i]}
            interleaved({**ways, "ours, drawn inside the loops": inside(loops[i])})


def masks() -> None:
    """The mask kernel alone."""
    for name, shape in SHAPES.items():
        p, state = problem(shape, P), om.Rng(1, "cuda").state
        say(f"{name}: mask kernel, {triton_gpu_drop.num_bytes(p) / 1e6:.1f} MB")
        interleaved({str(tuple(tile)): partial(draw_bits, p, state, state, tile) for tile in MASK_TILES})


def tiles() -> None:
    """Every tile of each kernel, with bits and without dropout."""
    device = backends.device_of(torch.device("cuda"))
    for name, shape in SHAPES.items():
        (q, k, v, dout), state = made(shape), om.Rng(1, "cuda").state
        for kernel in ("fwd", "dkdv", "dq"):
            ways: dict[str, Callable[[], Any]] = {}
            for dropout_p in (P, 0.0):
                p, lookups = problem(shape, dropout_p), (None, None, None, None, state if dropout_p else None)
                first = triton_gpu._tiles(p, device, "fwd")[0]
                out, lse = triton_gpu.launch_fwd(p, first, q, k, v, *lookups)
                need = {"need_dq": kernel == "dq", "need_dk": kernel == "dkdv", "need_dv": kernel == "dkdv"}
                for tile in triton_gpu._tiles(p, device, kernel):
                    call: Callable[[], Any] = partial(triton_gpu.launch_fwd, p, tile, q, k, v, *lookups)
                    if kernel != "fwd":
                        one = p._replace(**need)
                        call = partial(triton_gpu.launch_bwd, one, Backward(tile, tile), dout, q, k, v, out, lse, *lookups)
                    ways[f"{tuple(tile)} p {dropout_p}"] = call
            say(f"{name}: {kernel}")
            interleaved(ways)


def right() -> None:
    """Bits word for word against `ops_math.rng`, results against eager in fp32 with the same key."""
    for b, s, t, h, k, d, options in (
        (2, 512, 512, 4, 4, 64, {}),
        (2, 512, 512, 4, 2, 64, {"causal": True}),
        (1, 384, 640, 2, 2, 128, {"causal": True}),
        (1, 333, 615, 2, 1, 128, {"window": (100, 30)}),
        (1, 256, 256, 2, 2, 256, {"causal": True, "softcap": 10.0}),
        (1, 200, 200, 3, 3, 40, {}),
    ):
        for p in (0.1, 0.7):
            generator = torch.Generator("cuda").manual_seed(1)
            q, key, v, dout = (torch.randn(b, n, m, d, device="cuda", generator=generator) for n, m in ((s, h), (t, k), (t, k), (s, h)))
            rng, results = om.Rng(9, "cuda", first_row=5), []
            for implementation, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("triton_gpu", torch.bfloat16)):
                with om.force(attention=implementation):
                    leaves = [x.bfloat16().to(dtype).requires_grad_() for x in (q, key, v)]
                    out = om.attention(*leaves, dropout_p=p, rng=rng, **options)
                    results.append([out, *torch.autograd.grad(out, leaves, dout.bfloat16().to(dtype))])
            exact = results[0]
            errors = [[((a.float() - r).norm() / r.norm()).item() for a, r in zip(one, exact, strict=True)] for one in results[1:]]
            worst = max(ours / max(eager, 1e-4) for eager, ours in zip(*errors, strict=True))
            shown = " ".join(f"{e:.1e}" for e in errors[1])
            verdict = "ok   " if worst < 1.5 else "WRONG"
            say(f"{verdict} {(b, s, t, h, k, d)} {options} p {p}: out dq dk dv off by {shown}, {worst:.2f} of eager's")
    for name, shape in SHAPES.items():
        p = problem((2, *shape[1:4], False), P)
        state = om.Rng(9, "cuda", first_row=5).state
        same, words = True, draw_bits(p, state, state).words
        assert by_bits(p)
        assert words is not None
        keys = torch.arange(p.k_len, device="cuda")
        place = 2 * (keys % 32 // 8) + keys // 4 % 2 + 8 * (keys // 2 % 2) + 16 * (keys % 2)
        for sequence in (0, p.batch * p.heads - 1):
            rows = sequence // p.heads * p.q_len + torch.arange(p.q_len, device="cuda")
            want = keep_mask(state, rows, torch.tensor(sequence % p.heads, device="cuda"), p.k_len, P)
            got = (words[sequence][keys // 32, : p.q_len] >> place[:, None] & 1).T.bool()
            same &= torch.equal(want, got)
        say(f"{'ok   ' if same else 'WRONG'} {name}: drawn bits are those of the words")


def main(arguments: list[str]) -> None:
    """Run the named parts."""
    import triton

    say(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    parts = {"right": right, "times": times, "mask": masks, "tiles": tiles}
    for part in arguments or ["right", "times", "mask"]:
        start = time.perf_counter()
        parts[part]()
        say(f"-- {part}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
