"""A step of AdamW: ours against PyTorch's fused and foreach ones, on the parameters of a model.

    python benchmarks/optimizer.py [MODEL ...] [--device cpu] [--scale 0.05] [--sweep] [--results benchmarks/results/h200.jsonl]

MODEL: bert (200 tensors, 110 M), llama1b (147 tensors, 1.2 B), many (400 tensors of mixed sizes, 60 M). All by default; `--scale` shrinks
every tensor. Kinds: fp32, bf16 (parameters and averages), mixed (bf16 with fp32 averages), master (mixed with an fp32 copy),
stochastic (bf16, rounded by key). `--sweep` also measures every configuration of the kernel.

On a GPU time is kernel time from the profiler, so that gaps do not count, and `host` is the host's time for a step while the device works;
on a CPU it is wall time. GB/s counts every parameter, gradient and average read once and written once where it changes; `share` is the
time of a `copy_` of as many bytes over the time of the step. Gradients keep their addresses in `host`; `moving` is the host's time when
every gradient has a new address.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

import ops_math as om
from benchmarks import rows
from ops_math.ops.adamw import op_tables
from ops_math.ops.adamw.problem import AdamWProblem, cost
from ops_math.spec import dtype_name
from ops_nn.optim import AdamW

BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "mixed": {"state_dtype": FP32},
    "master": {"state_dtype": FP32, "master_weights": True},
    "stochastic": {},
}


def llama1b() -> Iterator[tuple[int, ...]]:
    """The tensors of a Llama of 1.2 billion parameters: 16 layers of width 2,048."""
    yield (128256, 2048)
    for _ in range(16):
        yield from ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192), (2048,), (2048,))
    yield from ((2048,), (2048,))


def bert() -> Iterator[tuple[int, ...]]:
    """The tensors of BERT base: 12 layers of width 768 with biases."""
    yield from ((30522, 768), (512, 768), (2, 768), (768,), (768,))
    for _ in range(12):
        for shape in ((768, 768),) * 4 + ((3072, 768), (768, 3072)):
            yield from (shape, shape[:1])
        yield from ((768,),) * 4
    yield from ((768, 768), (768,))


def many() -> Iterator[tuple[int, ...]]:
    """400 tensors, most of them small: what a step costs besides its bytes."""
    for number in range(400):
        yield (1 << (6 + number % 14) if number % 4 else 1001,)


MODELS: dict[str, Callable[[], Iterator[tuple[int, ...]]]] = {"bert": bert, "llama1b": llama1b, "many": many}


def parameters(model: str, kind: str, device: str, scale: float) -> list[Parameter]:
    """Random parameters with random gradients, which is what real ones look like to memory and to the power limit."""
    dtype = FP32 if kind == "fp32" else BF16
    found = []
    for shape in MODELS[model]():
        first = max(int(shape[0] * scale), 1)
        p = Parameter(torch.randn(first, *shape[1:], device=device).to(dtype))
        p.grad = torch.randn_like(p)
        found.append(p)
    return found


def num_bytes(params: list[Parameter], kind: str) -> int:
    """The least traffic of a step [B]."""
    dtype = dtype_name(params[0].dtype)
    state = "fp32" if kind in ("fp32", "mixed", "master") else "bf16"
    return cost(AdamWProblem(sum(p.numel() for p in params), len(params), dtype, dtype, state, master=kind == "master")).bytes


def optimizers(params: list[Parameter], kind: str, device: str) -> dict[str, torch.optim.Optimizer]:
    """Ours, and PyTorch's where it has the kind."""
    rounding = om.Rng(1, device) if kind == "stochastic" else None
    found: dict[str, torch.optim.Optimizer] = {"ours": AdamW(params, lr=1e-4, stochastic_rounding=rounding, **OPTIONS[kind])}
    if kind in ("fp32", "bf16"):
        found["torch fused"] = torch.optim.AdamW(params, lr=1e-4, fused=True)
        found["torch foreach"] = torch.optim.AdamW(params, lr=1e-4, foreach=True)
    return found


def device_us(call: Callable[[], Any], device: str, repeats: int = 10) -> float:
    """Time of one call [us]: kernels alone on a GPU, the wall's median on a CPU."""
    for _ in range(3):
        call()
    if device != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return sum(e.device_time for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA) / repeats


def host_us(call: Callable[[], Any], device: str, before: Callable[[], Any], repeats: int = 15) -> float:
    """Median time [us] that the host spends in one call, with the device idle at its start; `before` is not counted."""
    times = []
    for _ in range(repeats):
        before()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def copy_us(size: int, device: str) -> float:
    """Time of a `copy_` that reads and writes `size` bytes in all [us]."""
    source = torch.randn(max(size // 8, 1), device=device)
    target = torch.empty_like(source)
    return device_us(lambda: target.copy_(source), device)


def move_gradients(params: list[Parameter]) -> list[Any]:
    """Give every gradient another address; returns the old ones, which keep theirs until they are dropped."""
    old = [p.grad for p in params]
    for p in params:
        p.grad = p.grad.clone()
    return old


def measure(model: str, kind: str, name: str, optimizer: torch.optim.Optimizer, params: list[Parameter], copied: float) -> dict[str, Any]:
    """One row."""
    size = num_bytes(params, kind)
    device = params[0].device.type
    us = device_us(optimizer.step, device)
    host = host_us(optimizer.step, device, lambda: None)
    moving = host_us(optimizer.step, device, lambda: move_gradients(params))
    row = {
        "benchmark": "optimizer", "op": "adamw", "model": model, "kind": kind, "variant": name, "tensors": len(params),
        "elements": sum(p.numel() for p in params), "bytes": size, "kernel_us": us, "host_us": host, "host_moving_us": moving,
        "gbs": size / us / 1e3, "share": copied / us,
    }  # fmt: skip
    print(
        f"{model:8s} {kind:10s} {name:32s} {us:10.1f} us {row['gbs']:8.1f} GB/s share {row['share']:5.3f} "
        f"host {host:7.0f} us moving {moving:7.0f} us",
        flush=True,
    )
    return row


def sweep(model: str, kind: str, params: list[Parameter], device: str, copied: float) -> list[dict[str, Any]]:
    """A row for each configuration of the kernel and each number of tiles a program."""
    target = op_tables.IMPLEMENTATIONS[0].module
    listed, found = target.configs, []
    problem = AdamWProblem(sum(p.numel() for p in params), len(params), "bf16", "bf16", "bf16")
    every = dict.fromkeys(c._replace(tiles=t) for c in listed(problem, facts_of(device)) for t in (1, 2, 4, 8, 16))
    for config in every:
        target.configs = lambda *_, only=config: (only,)
        optimizer = optimizers(params, kind, device)["ours"]
        found.append(measure(model, kind, f"ours {tuple(config)}", optimizer, params, copied))
        optimizer.state.clear()
    target.configs = listed
    return found


def facts_of(device: str) -> Any:
    """Facts about the device."""
    from ops_math import backends

    return backends.device_of(torch.device(device, 0) if device == "cuda" else torch.device(device))


def main() -> None:
    """Measure and print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--kinds", nargs="*", default=list(OPTIONS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--results")
    arguments = parser.parse_args()
    device = arguments.device
    print(torch.__version__, torch.cuda.get_device_name() if device == "cuda" else "cpu", om.__version__, flush=True)
    for model in arguments.models or MODELS:
        for kind in arguments.kinds:
            params = parameters(model, kind, device, arguments.scale)
            copied = copy_us(num_bytes(params, kind), device)
            found = []
            for name, optimizer in optimizers(params, kind, device).items():
                found.append(measure(model, kind, name, optimizer, params, copied))
                optimizer.state.clear()  # gigabytes, which the next one needs
            if arguments.sweep and device == "cuda":
                found += sweep(model, kind, params, device, copied)
            rows.append(arguments.results, found, device)
            del params, optimizer
            gc.collect()
    print(om.stats(), flush=True)


if __name__ == "__main__":
    main()
