"""Attention on one GPU: is it right, and how fast is each configuration beside PyTorch's own kernels.

Usage: PYTHONPATH=src python3 tools/gpu/attention_sweep.py [right] [fwd] [bwd] [vendor]     (all by default)

Times are kernel times from the profiler (device time of what a call launches), rates count two products forward and five backward.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import ops_math as om
from ops_math import backends
from ops_math.catalog import operators
from ops_math.ops.attention import triton_gpu, vendor
from ops_math.ops.attention.problem import AttentionProblem, Rule, cost, problem_of

# batch, length, heads, key heads, width, causal
SHAPES = (
    (4, 4096, 32, 8, 128, True),
    (1, 16384, 32, 8, 128, True),
    (8, 2048, 32, 8, 64, True),
    (4, 4096, 32, 32, 128, False),
    (32, 512, 16, 16, 64, False),
)
WORKERS = 8  # processes that compile ahead
NOTHING = (None,) * 5


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


def name_of(shape: tuple[Any, ...]) -> str:
    """A shape as the peers' table writes it."""
    b, s, h, k, d, causal = shape
    return f"B{b} S{s} H{h}/{k} D{d} {'causal' if causal else 'full'}"


def inputs(shape: tuple[Any, ...]) -> tuple[AttentionProblem, list[torch.Tensor]]:
    """The problem and q, k, v, dout."""
    b, s, h, k, d, causal = shape
    generator = torch.Generator("cuda").manual_seed(0)
    q, key, v, dout = (torch.randn(b, s, n, d, device="cuda", dtype=torch.bfloat16, generator=generator) for n in (h, k, k, h))
    return problem_of(q, key, None, None, None, Rule(d**-0.5, True, -1, 0 if causal else -1, 0.0, 0, 0, 0.0)), [q, key, v, dout]


def kernel_ms(call: Callable[[], Any], repeats: int = 10) -> dict[str, float]:
    """Device time [ms] of one call by kernel name, and `sum`."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / repeats / 1e3
            times["sum"] += event.device_time / repeats / 1e3
    return times


def attempt(label: str, call: Callable[[], Any]) -> Any:
    """Run, or print the error with its label and go on: one bad configuration must not end the sweep."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        say(f"{label:60s} FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}")
        return None


def tiles(p: AttentionProblem, kernel: str) -> tuple[Any, ...]:
    """All tiles of a kernel that are legal here."""
    return triton_gpu._tiles(p, backends.device_of(torch.device("cuda")), kernel)


def run_tile(p: AttentionProblem, tensors: list[torch.Tensor], kernel: str, tile: Any) -> Callable[[], Any]:
    """A call that launches one kernel in one configuration."""
    q, k, v, dout = tensors
    if kernel == "fwd":
        return lambda: triton_gpu.launch_fwd(p, tile, q, k, v, *NOTHING)
    dq = kernel == "dq"
    only = p._replace(need_dq=dq, need_dk=not dq, need_dv=not dq)
    out, lse = triton_gpu.launch_fwd(p, tiles(p, "fwd")[-1], q, k, v, *NOTHING)
    return lambda: triton_gpu.launch_bwd(only, triton_gpu.Backward(tile, tile), dout, q, k, v, out, lse, *NOTHING)


def timed(p: AttentionProblem, tensors: list[torch.Tensor], kernel: str, tile: Any) -> dict[str, float]:
    """`kernel_ms` of one kernel in one configuration."""
    return kernel_ms(run_tile(p, tensors, kernel, tile))


def jobs(kernels: tuple[str, ...]) -> list[tuple[int, str, int]]:
    """(shape, kernel, tile) of everything to time."""
    listed = []
    for i, shape in enumerate(SHAPES):
        p = inputs((1, 128, shape[2], shape[3], shape[4], shape[5]))[0]
        listed += [(i, kernel, j) for kernel in kernels for j in range(len(tiles(p, kernel)))]
    return listed


def warm(kernels: tuple[str, ...]) -> None:
    """Compile everything ahead in several processes: Triton keeps the results on disk."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "warm", *kernels]
    workers = [subprocess.Popen([*command, f"{i}/{WORKERS}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for i in range(WORKERS)]
    for worker in workers:
        worker.wait()
    say(f"compiled ahead in {time.perf_counter() - start:.0f} s")


def warm_worker(kernels: tuple[str, ...], part: str) -> None:
    """One process's share of the compilation."""
    index, count = (int(n) for n in part.split("/"))
    seen = set()
    for i, kernel, j in jobs(kernels):
        key = (SHAPES[i][4], SHAPES[i][5], SHAPES[i][2] == SHAPES[i][3], kernel, j)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % count == index:
            _, _, h, k, d, causal = SHAPES[i]
            p, tensors = inputs((1, 256, h, k, d, causal))
            attempt(str(key), run_tile(p, tensors, kernel, tiles(p, kernel)[j]))
    torch.cuda.synchronize()


def sweep(kernels: tuple[str, ...]) -> None:
    """Time every tile of each kernel on the five shapes, and the best sum."""
    warm(kernels)
    for shape in SHAPES:
        p, tensors = inputs(shape)
        best: dict[str, tuple[float, Any]] = {}
        for kernel in kernels:
            for tile in tiles(p, kernel):
                label = f"{name_of(shape):30s} {kernel:5s} {tuple(tile)!s}"
                times = attempt(label, partial(timed, p, tensors, kernel, tile))
                if times:
                    own = next(ms for name, ms in times.items() if kernel in name)
                    flops = cost(p, "fwd").total_flops * {"fwd": 1.0, "dkdv": 2.0, "dq": 1.5}[kernel]
                    extra = f"  prepare {next((ms for n, ms in times.items() if 'prepare' in n), 0.0):.4f} ms" if kernel != "fwd" else ""
                    say(f"{label:62s} {own:9.4f} ms  {flops / own / 1e9:7.1f} TFLOP/s of its own products{extra}")
                    best[kernel] = min(best.get(kernel, (1e9, None)), (own, tile), key=lambda pair: pair[0])
                    best["delta"] = (times["sum"] - own, None)
        if "fwd" in best:
            say(f"{name_of(shape):30s} BEST fwd {cost(p, 'fwd').total_flops / best['fwd'][0] / 1e9:7.1f} TFLOP/s {best['fwd']}")
        if "dkdv" in best and "dq" in best:
            total = best["dkdv"][0] + best["dq"][0] + best["delta"][0]
            say(f"{name_of(shape):30s} BEST bwd {cost(p, 'bwd').total_flops / total / 1e9:7.1f} TFLOP/s {total:.4f} ms {best}")


def vendors() -> None:
    """PyTorch's kernels on the five shapes."""
    device = backends.device_of(torch.device("cuda"))
    for shape in SHAPES:
        p, (q, k, v, dout) = inputs(shape)
        for config in vendor.GPU:
            for phase in ("fwd", "bwd"):
                label = f"{name_of(shape):30s} {config} {phase}"
                why = vendor.against(config, p, device, phase)
                if why:
                    say(f"{label:62s} not legal: {why}")
                    continue
                call = partial(vendor.launch_fwd, p, config, q, k, v)
                if phase == "bwd":
                    call = partial(
                        vendor.launch_bwd, p, config, dout, q, k, v, *triton_gpu.launch_fwd(p, tiles(p, "fwd")[-1], q, k, v, *NOTHING)
                    )
                times = attempt(label, partial(kernel_ms, call))
                if times:
                    rate = cost(p, phase).total_flops / times["sum"] / 1e9
                    say(f"{label:62s} {times['sum']:9.4f} ms  {rate:7.1f} TFLOP/s  {len(times) - 1} kernels")


def padding(*lengths: int, total: int) -> torch.Tensor:
    """Keys to keep."""
    return torch.arange(total, device="cuda")[None] < torch.tensor(lengths, device="cuda")[:, None]


def cases() -> list[tuple[str, Any, Any, dict[str, Any]]]:
    """Calls to check: name, shape of q, shape of k, options."""
    ends = torch.tensor([0, 300, 300, 301, 1000], device="cuda", dtype=torch.int32)
    return [
        ("causal grouped D128", (2, 1024, 8, 128), (2, 1024, 2, 128), {"causal": True}),
        ("causal D64 odd", (2, 777, 4, 64), (2, 777, 4, 64), {"causal": True}),
        ("full D64", (2, 512, 8, 64), (2, 512, 8, 64), {}),
        ("full odd D128", (1, 333, 4, 128), (1, 615, 4, 128), {}),
        ("D96 window", (1, 700, 4, 96), (1, 700, 2, 96), {"causal": True, "window": (100, 0)}),
        ("D256 causal", (1, 400, 2, 256), (1, 400, 1, 256), {"causal": True}),
        ("cross bottom right", (1, 200, 4, 64), (1, 500, 4, 64), {"causal": True}),
        ("cross top left", (1, 500, 4, 64), (1, 200, 4, 64), {"causal": "top_left"}),
        ("soft cap", (1, 512, 4, 128), (1, 512, 2, 128), {"causal": True, "softcap": 10.0}),
        ("packed", (1000, 4, 128), (1000, 2, 128), {"causal": True, "cu_seqlens_q": ends}),
        ("padding", (3, 500, 4, 64), (3, 500, 4, 64), {"key_padding_mask": padding(500, 77, 0, total=500)}),
        ("dropout", (2, 512, 4, 64), (2, 512, 4, 64), {"dropout_p": 0.1, "rng": om.Rng(1, "cuda")}),
        ("additive mask", (2, 300, 4, 64), (2, 300, 4, 64), {"mask": torch.randn(300, 300, device="cuda")}),
    ]


def right() -> None:
    """Errors against float64, forward and the three gradients, beside eager's in the same dtype."""
    reference = operators()["attention"].file("reference").attention
    for name, q_shape, k_shape, options in cases():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            generator = torch.Generator("cuda").manual_seed(1)
            made = [torch.randn(*s, device="cuda", generator=generator).to(dtype) for s in (q_shape, k_shape, k_shape, q_shape)]

            def run(fn: Any, wide: torch.dtype, made: Any = made, options: Any = options) -> list[torch.Tensor]:
                q, k, v = (x.to(wide).requires_grad_() for x in made[:3])
                out = fn(q, k, v, **options)
                return [out.detach(), *torch.autograd.grad(out, (q, k, v), made[3].to(wide))]

            def errors(implementation: str, exact: Any, dtype: Any = dtype, run: Any = run) -> list[float]:
                with om.force(attention=implementation):
                    return [((a.double() - r).norm() / r.norm()).item() for a, r in zip(run(om.attention, dtype), exact, strict=True)]

            exact = run(reference, torch.float64)
            label = f"{name} {str(dtype)[6:]}"
            for implementation in ("eager", "triton_gpu", "vendor"):
                try:
                    found = errors(implementation, exact)
                except om.UnsupportedError:
                    if implementation == "triton_gpu":
                        say(f"{label:32s} {implementation:10s} does not take it")
                    continue
                except Exception as error:  # noqa: BLE001
                    say(f"{label:32s} {implementation:10s} FAILED {type(error).__name__} {str(error)[-300:]}")
                    continue
                say(f"{label:32s} {implementation:10s} l2 error out dq dk dv: " + " ".join(f"{e:.2e}" for e in found))


def main(arguments: list[str]) -> None:
    """Run the named parts."""
    if arguments[:1] == ["warm"]:
        warm_worker(tuple(arguments[1:-1]), arguments[-1])
        return
    import triton

    say(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    for part in arguments or ["vendor", "fwd", "bwd", "right"]:
        start = time.perf_counter()
        if part == "right":
            right()
        elif part == "vendor":
            vendors()
        else:
            sweep(("fwd",) if part == "fwd" else ("dkdv", "dq"))
        say(f"-- {part}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
