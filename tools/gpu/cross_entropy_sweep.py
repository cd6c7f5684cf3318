"""cross_entropy and linear_cross_entropy on one GPU: correct, how fast, in how much memory, for every configuration.

    PYTHONPATH=src python3 tools/gpu/cross_entropy_sweep.py [right] [loss] [linear] [host]

Time is kernel time from the profiler (what all kernels of a call take, gaps left out); memory is the peak above what was there before
the call, gradients included and their size beside it. Each line stands alone: one failure does not end the run.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ops_math import backends, features
from ops_math.ops.cross_entropy import eager, eager_linear, op, op_linear, reference, reference_linear, triton_gpu, triton_gpu_linear

GPU = torch.device("cuda:0")
GIB = 2**30


def kernel_ms(fn: Callable[[], Any], repeats: int = 10, top: int = 0) -> float:
    """Device time of one call [ms], and the `top` kernels in it."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if top:
        by_name: dict[str, list[float]] = {}
        for e in events:
            by_name.setdefault(e.name, []).append(e.device_time)
        for name, times in sorted(by_name.items(), key=lambda kv: -sum(kv[1]))[:top]:
            print(f"        {sum(times) / repeats / 1e3:8.4f} ms  {len(times) // repeats:4d} x  {name[:110]}")
    return sum(e.device_time for e in events) / repeats / 1e3


def peak_bytes(fn: Callable[[], Any]) -> tuple[int, int]:
    """(peak above the level before, what remains after) [B]."""
    fn()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = fn()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del kept
    return peak, after


def attempt(label: str, fn: Callable[[], None]) -> None:
    """Run one measurement; report a failure in one line and go on."""
    try:
        fn()
    except Exception as error:  # noqa: BLE001 (each line stands alone)
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"FAILED {label}: {type(error).__name__}: {str(error)[:400]!r} at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}",
            flush=True,
        )
        torch.cuda.empty_cache()


def error_of(got: torch.Tensor, want: torch.Tensor) -> str:
    """Largest and l2 error relative to the oracle."""
    e, w = got.double() - want, want.double()
    return f"max {e.abs().max() / w.abs().max().clamp_min(1e-300):.2e} l2 {e.norm() / w.norm().clamp_min(1e-300):.2e}"


# ---- right ----------------------------------------------------------------------------------------------------------------------------


def right_loss(rows: int, cols: int, dtype: torch.dtype, **changes: Any) -> None:
    """Every configuration against the reference in float64, beside eager in the same dtype."""
    torch.manual_seed(0)
    logits, target = (3 * torch.randn(rows, cols, device=GPU)).to(dtype), torch.randint(0, cols, (rows,), device=GPU)
    target[::7] = -100
    dloss = torch.randn(rows, device=GPU)
    fwd = (
        logits,
        target,
        None,
        None,
        -100,
        changes.get("label_smoothing", 0.0),
        changes.get("z_loss", 0.0),
        changes.get("softcap") or 0.0,
        "none",
    )
    wide = logits.double().requires_grad_()
    want = reference.cross_entropy(wide, target, reduction="none", **changes)
    (want_d,) = torch.autograd.grad(want, wide, dloss.double())
    problem, here = op.OP.phases["fwd"].problem_of(*fwd), backends.device_of(GPU)
    for name, module in (("eager", eager), ("triton", triton_gpu)):
        fwd_configs = triton_gpu.configs(problem, here, "fwd") if name == "triton" else (None,)
        bwd_configs = triton_gpu.configs(problem, here, "bwd") if name == "triton" else (None,)
        for config in fwd_configs:
            loss, lse, _ = module.launch_fwd(problem, config, *fwd[:4])
            print(f"right loss [{rows},{cols}] {str(dtype)[6:]} {changes} {name} fwd {config}: {error_of(loss, want.detach())}")
        for config in bwd_configs:
            d = module.launch_bwd(problem, config, dloss, logits, target, None, lse, None)
            print(f"right loss [{rows},{cols}] {str(dtype)[6:]} {changes} {name} bwd {config}: {error_of(d, want_d)}", flush=True)


def right_linear(rows: int, hidden: int, cols: int, dtype: torch.dtype, reduction: str, when: str, biased: bool) -> None:
    """Every configuration against the reference in float64, beside eager in the same dtype."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, hidden, device=GPU).to(dtype), (torch.randn(cols, hidden, device=GPU) * 2 * hidden**-0.5).to(dtype)
    bias = torch.randn(cols, device=GPU).to(dtype) if biased else None
    target = torch.randint(0, cols, (rows,), device=GPU)
    target[::7] = -100
    dloss = torch.randn(rows if reduction == "none" else (), device=GPU)
    wide = [t.double().requires_grad_() for t in (x, weight) + ((bias,) if bias is not None else ())]
    want = reference_linear.linear_cross_entropy(wide[0], wide[1], target, bias=wide[2] if biased else None, reduction=reduction)
    wanted = (want.detach(), *torch.autograd.grad(want, wide, dloss.double()))
    needs = (True, True, biased) if when == "forward" else (False,) * 3
    options = (-100, 0.0, 0.0, 0.0, reduction, dtype)
    fwd = (x, weight, target, bias, None, None, *options, *needs)
    problem = op_linear.OP.phases["fwd"].problem_of(*fwd)
    for name, module in (("eager", eager_linear), ("triton", triton_gpu_linear)):
        for config in triton_gpu_linear.configs(problem, backends.device_of(GPU), "fwd") if name == "triton" else (None,):
            loss, lse, divisor, *grads = module.launch_fwd(problem, config, *fwd[:6])
            grads = grads if when == "forward" else [None] * 3
            bwd = (dloss, x, weight, target, bias, None, lse, divisor if reduction == "mean" else None, *grads)
            results = module.launch_bwd(op_linear.OP.phases["bwd"].problem_of(*bwd, *options, True, True, biased), config, *bwd)
            errors = "; ".join(
                f"{n} {error_of(g, w)}" for n, g, w in zip(("loss", "dx", "dw", "db"), (loss, *results), wanted, strict=False)
            )
            print(f"right linear [{rows},{hidden}]x[{cols}] {str(dtype)[6:]} {reduction} {when} {name} {config}: {errors}", flush=True)


def right() -> None:
    """Correctness of all configurations on small shapes."""
    print(f"mm gives fp32: {features.widens('mm', GPU)}; addmm adds to fp32: {features.widens('addmm', GPU)}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, cols in ((300, 31), (65, 1003), (33, 4001), (17, 30522), (9, 128256)):
            attempt("right loss", lambda r=rows, c=cols, d=dtype: right_loss(r, c, d))
    attempt("right loss", lambda: right_loss(33, 5003, torch.float32, label_smoothing=0.1, z_loss=1e-3, softcap=5.0))
    attempt("right loss", lambda: right_loss(33, 1003, torch.float32, label_smoothing=0.1, z_loss=1e-3, softcap=5.0))
    for dtype in (torch.bfloat16, torch.float32):
        for reduction, when in (("mean", "forward"), ("mean", "backward"), ("none", "backward")):
            attempt("right linear", lambda d=dtype, r=reduction, w=when: right_linear(700, 256, 30522, d, r, w, biased=True))
            attempt("right linear", lambda d=dtype, r=reduction, w=when: right_linear(300, 128, 1003, d, r, w, biased=False))


# ---- loss alone -----------------------------------------------------------------------------------------------------------------------


def loss() -> None:
    """bf16 logits whose rows lie on 16-byte boundaries and whose do not."""
    for cols in (128256, 50257):
        attempt(f"loss {cols}", lambda c=cols: loss_of(8192, c))


def loss_of(rows: int, cols: int) -> None:
    """Every configuration, forward and backward, GB/s counting one pass forward and two backward."""
    torch.manual_seed(0)
    logits, target = torch.randn(rows, cols, device=GPU, dtype=torch.bfloat16), torch.randint(0, cols, (rows,), device=GPU)
    one, num_bytes = torch.ones((), device=GPU), rows * cols * 2
    fwd = (logits, target, None, None, -100, 0.0, 0.0, 0.0, "mean")
    problem, here = op.OP.phases["fwd"].problem_of(*fwd), backends.device_of(GPU)
    _, lse, divisor = triton_gpu.launch_fwd(problem, triton_gpu.configs(problem, here, "fwd")[0], *fwd[:4])

    def show(what: str, ms: float, passes: int) -> None:
        print(f"loss [{rows},{cols}] {what}: {ms:.4f} ms {passes * num_bytes / ms / 1e6:.0f} GB/s", flush=True)

    for config in triton_gpu.configs(problem, here, "fwd"):
        attempt(str(config), lambda c=config: show(f"fwd {c}", kernel_ms(lambda: triton_gpu.launch_fwd(problem, c, *fwd[:4])), 1))
    for config in triton_gpu.configs(problem, here, "bwd"):
        bwd = (one, logits, target, None, lse, divisor)
        attempt(str(config), lambda c=config, b=bwd: show(f"bwd {c}", kernel_ms(lambda: triton_gpu.launch_bwd(problem, c, *b)), 2))
    leaf = logits.requires_grad_()
    attempt(
        "whole",
        lambda: show(
            "fwd+bwd through the public function", kernel_ms(lambda: torch.autograd.grad(op.cross_entropy(leaf, target), leaf), top=5), 3
        ),
    )
    attempt(
        "eager",
        lambda: show(
            "fwd+bwd torch eager", kernel_ms(lambda: torch.autograd.grad(F.cross_entropy(leaf.float(), target), leaf), repeats=3), 3
        ),
    )


# ---- linear ---------------------------------------------------------------------------------------------------------------------------


def linear_one(rows: int, hidden: int, cols: int, when: str, config: triton_gpu_linear.Config, top: int = 0) -> None:
    """Forward and backward of one configuration."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(rows, hidden, device=GPU, dtype=torch.bfloat16),
        torch.randn(cols, hidden, device=GPU, dtype=torch.bfloat16) * hidden**-0.5,
    )
    target, one = torch.randint(0, cols, (rows,), device=GPU), torch.ones((), device=GPU)
    options = (-100, 0.0, 0.0, 0.0, "mean", torch.bfloat16)
    fwd = (x, weight, target, None, None, None, *options, *((when == "forward",) * 2), False)
    problem = op_linear.OP.phases["fwd"].problem_of(*fwd)

    def both() -> Any:
        _, lse, divisor, *grads = triton_gpu_linear.launch_fwd(problem, config, *fwd[:6])
        bwd = (one, x, weight, target, None, None, lse, divisor, *(grads if when == "forward" else (None,) * 3))
        return triton_gpu_linear.launch_bwd(op_linear.OP.phases["bwd"].problem_of(*bwd, *options, True, True, False), config, *bwd)

    peak, kept = peak_bytes(both)
    ms = kernel_ms(both, repeats=4, top=top)
    rate = 6 * rows * hidden * cols / ms / 1e9
    speed = f"{ms:.3f} ms {rate:.0f} TFLOP/s, peak {peak / GIB:.3f} GiB, gradients {kept / GIB:.3f} GiB"
    print(f"linear [{rows},{hidden}]x[{cols}] {when} {config}: {speed}", flush=True)


def linear_eager(rows: int, hidden: int, cols: int) -> None:
    """Plain PyTorch."""
    x = torch.randn(rows, hidden, device=GPU, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(cols, hidden, device=GPU, dtype=torch.bfloat16) * hidden**-0.5).requires_grad_()
    target = torch.randint(0, cols, (rows,), device=GPU)

    def both() -> Any:
        return torch.autograd.grad(F.cross_entropy((x @ weight.T).float(), target), (x, weight))

    peak, kept = peak_bytes(both)
    ms = kernel_ms(both, repeats=2)
    rate = 6 * rows * hidden * cols / ms / 1e9
    speed = f"{ms:.3f} ms {rate:.0f} TFLOP/s, peak {peak / GIB:.3f} GiB, gradients {kept / GIB:.3f} GiB"
    print(f"linear [{rows},{hidden}]x[{cols}] torch eager: {speed}", flush=True)


def linear() -> None:
    """All configurations and a sweep of chunk sizes on the shapes of the goals."""
    here = backends.device_of(GPU)
    for shape in ((16384, 2048, 128256), (8192, 4096, 128256), (16384, 1024, 30522)):
        rows, hidden, cols = shape
        x, weight = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((rows, hidden), (cols, hidden)))
        options = (-100, 0.0, 0.0, 0.0, "mean", torch.bfloat16, True, True, False)
        problem = op_linear.OP.phases["fwd"].problem_of(x, weight, None, None, None, None, *options)
        fast, lean = (triton_gpu_linear.configs(problem._replace(when=w), here, "fwd")[0] for w in ("forward", "backward"))
        runs = [("forward", fast, 6), ("backward", lean, 6)]
        runs += [("forward", fast._replace(one_visit=True, block_n=n, num_warps=w), 0) for n, w in ((8192, 16), (4096, 16), (8192, 32))]
        runs += [("forward", fast._replace(chunk_rows=n), 0) for n in (512, 1024, 2048, 4096, 8192) if n != fast.chunk_rows]
        runs += [("backward", lean._replace(slice_cols=n), 0) for n in (2048, 4096, 8192, 16384) if n != lean.slice_cols]
        runs += [("forward", fast._replace(vocab_multiple=n), 0) for n in (1, 8) if cols % 64]
        for when, config, top in runs:
            attempt(f"{shape} {config}", lambda s=shape, w=when, c=config, t=top: linear_one(*s, w, c, t))
        attempt(f"{shape}", lambda s=shape: linear_eager(*s))
        torch.cuda.empty_cache()


# ---- host -----------------------------------------------------------------------------------------------------------------------------


def host() -> None:
    """Host time of a small call, forward and backward [us], beside plain PyTorch."""
    logits = torch.randn(64, 1000, device=GPU, requires_grad=True)
    x, weight = torch.randn(64, 64, device=GPU, requires_grad=True), torch.randn(1000, 64, device=GPU, requires_grad=True)
    target = torch.randint(0, 1000, (64,), device=GPU)
    calls = {
        "cross_entropy": lambda: op.cross_entropy(logits, target).backward(),
        "F.cross_entropy": lambda: F.cross_entropy(logits, target).backward(),
        "linear_cross_entropy": lambda: op_linear.linear_cross_entropy(x, weight, target).backward(),
        "F.linear, F.cross_entropy": lambda: F.cross_entropy(F.linear(x, weight), target).backward(),
    }
    for name, call in calls.items():
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        print(f"host {name}: {(time.perf_counter() - start) / 50 * 1e6:.0f} us", flush=True)
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for section in sys.argv[1:] or ["right", "loss", "linear", "host"]:
        started = time.perf_counter()
        attempt(section, globals()[section])
        print(f"-- {section}: {time.perf_counter() - started:.0f} s", flush=True)
