"""Every operator against plain PyTorch (and torch.compile) on one device, forward and backward.

    python benchmarks/operators.py [OP ...] [--compile] [--results benchmarks/results/h200.jsonl]

Kernel time comes from the profiler, so that host gaps do not count; host time stands beside it. Rates are the least traffic
(`cost()` of the problem) over kernel time; `share` is that rate over the rate of a `copy_` of the same number of bytes measured
beside it; matrix operators show TFLOP/s. Inputs are random and larger than the cache where the operator is bound by memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import ops_math as om
from benchmarks import rows
from ops_math import catalog, settings
from ops_math.spec import DTYPE_OF
from ops_math.testing.capture import watch
from ops_math.testing.inputs import Draw, is_floating

BF16 = torch.bfloat16
ROWS = ((16384, 4096), (32768, 1024), (8192, 8192))


class DeviceDraw(Draw):
    """Draws on the device itself: gigabytes of input in milliseconds."""

    def normal(self, *shape: int, scale: float = 1.0, offset: float = 0.0, dtype: str | None = None) -> torch.Tensor:
        """Normal numbers, `offset + scale * N(0, 1)`."""
        return torch.randn(*shape, device=self.device, dtype=DTYPE_OF[dtype or self.dtype]).mul_(scale).add_(offset)

    def uniform(self, *shape: int, dtype: str | None = None) -> torch.Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(*shape, device=self.device, dtype=DTYPE_OF[dtype or self.dtype])

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high)."""
        return torch.randint(0, high, shape, device=self.device)


class Bench:
    """One call to measure: a public function's name, a label, and its tensors."""

    def __init__(self, fn: str, label: str, args: Callable[[Draw], tuple[Any, ...]], **kwargs: Any) -> None:
        self.fn, self.label, self.args, self.kwargs = fn, label, args, kwargs


def _norms() -> list[Bench]:
    found = []
    for m, n in ROWS:
        label = f"[{m},{n}]"
        found += [
            Bench("rms_norm", label, lambda d, m=m, n=n: (d.normal(m, n), d.normal(n))),
            Bench("layer_norm", label, lambda d, m=m, n=n: (d.normal(m, n), d.normal(n), d.normal(n))),
            Bench("add_rms_norm", label, lambda d, m=m, n=n: (d.normal(m, n), d.normal(m, n), d.normal(n))),
            Bench("add_layer_norm", label, lambda d, m=m, n=n: (d.normal(m, n), d.normal(m, n), d.normal(n), d.normal(n))),
            Bench("softmax", label, lambda d, m=m, n=n: (d.normal(m, n),)),
            Bench("dropout", label, lambda d, m=m, n=n: (d.normal(m, n), 0.1)),
        ]
    return found


def _attention() -> list[Bench]:
    found = []
    shapes = (
        (4, 4096, 32, 8, 128, True),
        (1, 16384, 32, 8, 128, True),
        (8, 2048, 32, 8, 64, True),
        (4, 4096, 32, 32, 128, False),
        (32, 512, 16, 16, 64, False),
    )
    for b, s, h, k, dim, causal in shapes:

        def args(d: Draw, q: tuple[int, ...] = (b, s, h, dim), kv: tuple[int, ...] = (b, s, k, dim)) -> tuple[Any, ...]:
            return d.normal(*q), d.normal(*kv), d.normal(*kv)

        found.append(Bench("attention", f"B{b} S{s} H{h}/{k} D{dim} {'causal' if causal else 'full'}", args, causal=causal))
    return found


def _head(m: int, h: int, v: int) -> Bench:
    return Bench("linear_cross_entropy", f"[{m},{h}]x[{v}]", lambda d: (d.normal(m, h), d.normal(v, h, scale=h**-0.5), d.ints(v, m)))


def _rope(d: Draw) -> tuple[Any, ...]:
    return d.normal(4, 4096, 32, 128), d.normal(4, 4096, 8, 128), d.uniform(4096, 64), d.uniform(4096, 64)


BENCHES: list[Bench] = [
    *_norms(),
    Bench("swiglu", "[8192,14336]", lambda d: (d.normal(8192, 14336), d.normal(8192, 14336))),
    Bench("swiglu_packed", "[8192,28672]", lambda d: (d.normal(8192, 28672),)),
    Bench("geglu", "[8192,14336]", lambda d: (d.normal(8192, 14336), d.normal(8192, 14336))),
    Bench("rope", "q[4,4096,32,128] k8", _rope),
    Bench("cross_entropy", "[8192,128256]", lambda d: (d.normal(8192, 128256), d.ints(128256, 8192))),
    _head(8192, 4096, 128256),
    _head(16384, 2048, 128256),
    *_attention(),
]
FROZEN = {"rope": (2, 3)}


def timed(fn: Callable[[], Any], repeats: int = 20) -> tuple[float, float]:
    """(kernel time [us], host time [us]) of one call."""
    for _ in range(4):
        fn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        fn()
    host = (time.perf_counter() - start) / 8 * 1e6
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    return sum(e.device_time for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA) / repeats, host


def copy_gbs(num_bytes: int) -> float:
    """GB/s of a copy that moves this many bytes in all."""
    source = torch.randn(max(num_bytes // 4, 1 << 20), device="cuda").to(BF16)
    target = torch.empty_like(source)
    us, _ = timed(lambda: target.copy_(source))
    return source.numel() * 4 / us / 1e3


def variants(bench: Bench, compiled: bool) -> dict[str, tuple[Callable[..., Any], Any]]:
    """What to measure: the scheduler's choice, every implementation, plain PyTorch, torch.compile of it."""
    operator = catalog.public_functions()[bench.fn]
    public = operator.public[bench.fn]

    def plain(*args: Any, **kwargs: Any) -> Any:
        with settings.enabled(False):
            return public(*args, **kwargs)

    found: dict[str, tuple[Callable[..., Any], Any]] = {"ops_math": (public, None), "plain": (plain, None)}
    for i in operator.implementations():
        found[i.name] = (public, {operator.name: i.name})
    if compiled:
        plain_module = operator.file("plain")
        found["compile"] = (torch.compile(getattr(plain_module, bench.fn), dynamic=False), None)
    return found


def measure(bench: Bench, name: str, fn: Callable[..., Any], force: Any, device: str) -> list[dict[str, Any]]:
    """Rows for forward and backward of one variant."""
    operator = catalog.public_functions()[bench.fn]
    frozen = FROZEN.get(bench.fn, ())
    args = list(bench.args(DeviceDraw(1, "bf16", device)))
    args = [a.requires_grad_() if is_floating(a) and i not in frozen else a for i, a in enumerate(args)]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    found = []
    with settings.force(**(force or {})):
        seen = watch(lambda: _both(operator.public[bench.fn], args, bench.kwargs, leaves)).calls
        problems = {c.phase: operator.phases[c.phase].problem_of(*c.args) for c in seen}
        out = fn(*args, **bench.kwargs)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        fed = [torch.randn_like(o) for o in outs]
        phases = {"fwd": lambda: fn(*args, **bench.kwargs), "bwd": lambda: torch.autograd.grad(outs, leaves, fed, retain_graph=True)}
        for phase, go in phases.items():
            us, host = timed(go)
            cost = operator.cost(problems[phase], phase)
            row = {
                "benchmark": "operator",
                "op": bench.fn,
                "shape": bench.label,
                "phase": phase,
                "variant": name,
                "kernel_us": us,
                "host_us": host,
            }
            products = sum(n for term, n in cost.flops if "product" in term)
            row |= {"tflops": products / us / 1e6} if products else {"gbs": cost.bytes / us / 1e3, "bytes": cost.bytes}
            found.append(row)
    return found


def _both(fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], leaves: list[torch.Tensor]) -> None:
    out = fn(*args, **kwargs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs])


def describe(row: dict[str, Any]) -> str:
    """A result row in one line."""
    rate = f"{row['tflops']:8.1f} TFLOP/s" if "tflops" in row else f"{row['gbs']:8.1f} GB/s share {row['share']:.2f}"
    what = f"{row['op']:21s} {row['shape']:30s} {row['phase']} {row['variant']:12s}"
    return f"{what} {row['kernel_us']:10.1f} us {rate} host {row['host_us']:.0f} us"


def main() -> None:
    """Measure and print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--results")
    arguments = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), om.__version__, flush=True)
    ceilings: dict[int, float] = {}
    for bench in BENCHES:
        if arguments.ops and bench.fn not in arguments.ops:
            continue
        for name, (fn, force) in variants(bench, arguments.compile).items():
            try:
                found = measure(bench, name, fn, force, "cuda")
            except (RuntimeError, ValueError) as error:
                print(f"{bench.fn:22s} {bench.label:28s} {name:12s} cannot: {str(error)[:120]}", flush=True)
                continue
            for row in found:
                if "bytes" in row:
                    size = row["bytes"]
                    ceilings.setdefault(size, copy_gbs(size))
                    row["share"] = row["gbs"] / ceilings[size]
                print(describe(row), flush=True)
            rows.append(arguments.results, found, "cuda")


if __name__ == "__main__":
    main()
