"""Norms, softmax and dropout on one GPU: is each configuration right, and how near to a copy of the same number of bytes is it.

Usage: PYTHONPATH=src python3 tools/gpu/norm_sweep.py [--odd | --far | --limits] [NAME ...]
NAME: rms_norm, add_rms_norm, layer_norm, add_layer_norm, bert (add_layer_norm with bias and dropout), stream (the same on an fp32 residual
stream with a bf16 copy of y, as under autocast), softmax, dropout; wide for 28,672 columns and model for the shapes of llama-1b and
bert-large instead of the usual ones. All by default. --odd takes widths that are no multiple of 16 and one that is wide, with Liger's
kernels beside where they are installed, fewer repeats and configurations, and the best in a line at the end of each phase. --far takes
what is farthest from a copy, all configurations of the phases in question, without rivals; 90 s. --limits takes rows that lie in
registers whole, of which the forward can be given fewer; 25 s.

Time is kernel time from the profiler: the device time of all that a call launches, gaps left out. GB/s counts each input read once and
each output written once. `share` is the time of `copy_` of as many bytes over ours. `error` is the largest l2 error of an output
against the same formula in float64.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ops_math import backends
from ops_math.catalog import operators
from ops_math.dispatch import Operator
from ops_math.rng import Rng

SHAPES = ((16384, 4096), (32768, 1024), (8192, 8192))
WIDE = ((4096, 28672),)
MODEL = {"add_rms_norm": ((16384, 2048),), "rms_norm": ((16384, 2048),), "stream": ((16384, 1024),), "bert": ((16384, 1024),)}
ODD = ((28023, 1164), (161537, 2163), (155795, 3446), (3520, 4287), (721, 6616), (663, 15993), (105880, 69), (2, 2056), (8192, 28672))
FAR = {  # with the phases that are measured
    (161537, 2163): {"layer_norm": "fwd bwd", "add_layer_norm": "fwd bwd"},
    (28023, 1164): {"layer_norm": "fwd bwd", "add_layer_norm": "bwd"},
    (28023, 1163): {"layer_norm": "bwd", "add_layer_norm": "bwd"},
    (3520, 4287): {"layer_norm": "fwd bwd", "add_layer_norm": "bwd"},
    (663, 15993): {"rms_norm": "bwd", "add_rms_norm": "bwd", "layer_norm": "fwd bwd", "add_layer_norm": "bwd"},
    (8192, 15993): {"rms_norm": "bwd", "layer_norm": "bwd", "add_layer_norm": "bwd"},
    (16384, 12001): {"rms_norm": "bwd", "layer_norm": "bwd", "add_layer_norm": "bwd"},
    (16384, 12288): {"rms_norm": "bwd", "add_rms_norm": "bwd", "layer_norm": "bwd", "add_layer_norm": "bwd"},
    (8192, 16384): {"rms_norm": "bwd", "layer_norm": "bwd"},
    (8192, 28672): {"rms_norm": "bwd", "add_rms_norm": "bwd", "layer_norm": "bwd"},
    (105880, 69): {"softmax": "fwd"},
}
LIMITS = {  # likewise; the backward where its partial sums weigh most
    **{(8192, cols): {"rms_norm": "fwd", "layer_norm": "fwd"} for cols in (5120, 8192, 12288, 16384)},
    **{shape: {"rms_norm": "fwd bwd", "layer_norm": "fwd bwd"} for shape in ((16384, 4096), (32768, 1024))},
}
ODD_TASKS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "softmax")
WORKERS = 14  # processes that compile ahead into Triton's cache
LIMIT = 4e-3  # l2 error of bf16: one rounding has 2^-9 / sqrt(3)
BF16 = torch.bfloat16


class Task(NamedTuple):
    """One operator with its options. `fwd` and `bwd` give the arguments of the dispatcher operators, `plain` is PyTorch's own."""

    operator: str
    fwd: Callable[..., tuple[Any, ...]]
    bwd: Callable[..., tuple[Any, ...]]
    plain: Callable[..., Any] | None
    learning: int  # leading tensors that `plain` takes


def _tensors(rows: int, cols: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    make = torch.Generator(device).manual_seed(1)
    wide = {name: torch.randn(rows, cols, device=device, dtype=BF16, generator=make) for name in ("x", "residual", "dy", "dsum")}
    narrow = {name: torch.randn(cols, device=device, dtype=BF16, generator=make) for name in ("weight", "bias", "x_bias")}
    single = {f"{name}_fp32": t.float() for name, t in (*wide.items(), *narrow.items()) if name != "x"}
    return {**wide, **narrow, **single, "state": Rng(5, device).state}


def _norm_bwd(t: dict[str, torch.Tensor], saved: Any, state: Any, p: float, x_bias: bool, dsum: bool) -> tuple[Any, ...]:
    _, total, mean, rstd, _ = saved
    total = total if total.numel() else t["x"]
    needs = (True, p > 0, True, True, x_bias)
    return t["dy"], None, t["dsum"] if dsum else None, total, t["weight"], mean, rstd, state, BF16, BF16, BF16, p, *needs


def _stream_bwd(t: dict[str, torch.Tensor], saved: Any) -> tuple[Any, ...]:
    _, total, mean, rstd, _ = saved
    dtypes = BF16, torch.float32, torch.float32
    return t["dy_fp32"], t["dy"], None, total, t["weight_fp32"], mean, rstd, t["state"], *dtypes, 0.1, *(True,) * 5


TASKS: dict[str, Task] = {
    "rms_norm": Task(
        "rms_norm",
        lambda t: (t["x"], None, t["weight"], 1e-6, 0.0, BF16),
        lambda t, saved: (t["dy"], None, t["x"], t["weight"], saved[2], 1e-6, 0.0, True, True),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        2,
    ),
    "add_rms_norm": Task(
        "rms_norm",
        lambda t: (t["x"], t["residual"], t["weight"], 1e-6, 0.0, BF16),
        lambda t, saved: (t["dy"], t["dsum"], saved[1], t["weight"], saved[2], 1e-6, 0.0, True, True),
        lambda x, r, w: (F.rms_norm(x + r, x.shape[-1:], w, 1e-6), x + r),
        3,
    ),
    "layer_norm": Task(
        "layer_norm",
        lambda t: (t["x"], None, t["weight"], t["bias"], None, None, 1e-5, 0.0, BF16, None),
        lambda t, saved: _norm_bwd(t, saved, None, 0.0, False, False),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        3,
    ),
    "add_layer_norm": Task(
        "layer_norm",
        lambda t: (t["x"], t["residual"], t["weight"], t["bias"], None, None, 1e-5, 0.0, BF16, None),
        lambda t, saved: _norm_bwd(t, saved, None, 0.0, False, True),
        None,
        0,
    ),
    "bert": Task(
        "layer_norm",
        lambda t: (t["x"], t["residual"], t["weight"], t["bias"], t["x_bias"], t["state"], 1e-5, 0.1, BF16, None),
        lambda t, saved: _norm_bwd(t, saved, t["state"], 0.1, True, True),
        None,
        0,
    ),
    "stream": Task(
        "layer_norm",
        lambda t: (
            *(t["x"], t["residual_fp32"], t["weight_fp32"], t["bias_fp32"], t["x_bias_fp32"], t["state"]),
            *(1e-5, 0.1, torch.float32, BF16),
        ),
        _stream_bwd,
        None,
        0,
    ),
    "softmax": Task(
        "softmax",
        lambda t: (t["x"], BF16),
        lambda t, saved: (t["dy"], saved[0], BF16),
        lambda x: F.softmax(x, -1),
        1,
    ),
    "dropout": Task(
        "dropout",
        lambda t: (t["x"], t["state"], 0.1),
        lambda t, saved: (t["dy"], t["state"], 0.1),
        lambda x: F.dropout(x, 0.1),
        1,
    ),
}


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


REPEATS = [12, 3]  # timed and before


def kernel_ms(call: Callable[[], Any]) -> float:
    """Device time [ms] of all that one call launches."""
    repeats, before = REPEATS
    for _ in range(before):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    return sum(e.device_time for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA) / repeats / 1e3


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _part(operator: Operator, name: str) -> Any:
    return next(i for i in operator.implementations() if i.name == name)


def oracle(operator: Operator, phase: str, problem: Any, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results in float64: eager on widened tensors."""
    wide = problem._replace(**{k: "fp64" for k, v in problem._asdict().items() if v in ("bf16", "fp32")})
    doubled = [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in tensors]
    return _tuple(_part(operator, "eager").launcher(phase)(wide, None, *doubled))


def worst_error(values: tuple[Any, ...], want: tuple[Any, ...]) -> float:
    """The largest l2 error of an output, NaN where one is."""
    gaps = [((v.double() - w).norm() / w.norm().clamp_min(1e-30)).item() for v, w in zip(values, want, strict=True) if v.numel()]
    return max(gaps, key=lambda g: float("inf") if g != g else g)


def liger(name: str, tensors: dict[str, torch.Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Liger's forward and backward as calls; None where it is not installed or has no such operator."""
    try:
        from liger_kernel import ops
    except ImportError:
        return None
    x, residual, weight, bias = (tensors[n].clone().requires_grad_() for n in ("x", "residual", "weight", "bias"))
    made = {
        "rms_norm": lambda: ops.rms_norm.LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False),
        "add_rms_norm": lambda: ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6, 0.0, "llama", False),
        "layer_norm": lambda: ops.layer_norm.LigerLayerNormFunction.apply(x, weight, bias, 1e-5),
        "softmax": lambda: ops.softmax.LigerSoftmaxFunction.apply(x),
    }.get(name)
    if made is None:
        return None
    for module in ("rms_norm", "fused_add_rms_norm", "layer_norm", "softmax"):
        importlib.import_module(f"liger_kernel.ops.{module}")
    leaves = {"rms_norm": (x, weight), "add_rms_norm": (x, residual, weight), "layer_norm": (x, weight, bias)}.get(name, (x,))
    outs = _tuple(made())
    fed = [tensors[n] for n in ("dy", "dsum")][: len(outs)]
    return made, lambda: torch.autograd.grad(outs, leaves, [t.clone() for t in fed], retain_graph=True)


def calls(task: Task, tensors: dict[str, torch.Tensor]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """For each phase the problem and the launcher's tensors; what the forward saves comes from eager."""
    operator = operators()[task.operator]

    def split(phase: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return operator.phases[phase].problem_of(*args), args[: operator.phases[phase].num_tensors]

    problem, inputs = split("fwd", task.fwd(tensors))
    saved = _tuple(_part(operator, "eager").launcher("fwd")(problem, None, *inputs))
    return {"fwd": (problem, inputs), "bwd": split("bwd", task.bwd(tensors, saved))}


def compile_ahead(name: str, shape: tuple[int, int], phase: str, number: int) -> str:
    """Start one configuration once on few rows, so that its kernels are in Triton's cache."""
    operator = operators()[TASKS[name].operator]
    problem, tensors = calls(TASKS[name], _tensors(64 + shape[0] % 16, shape[1]))[phase]  # specialised as all rows will be
    module = _part(operator, "triton_gpu").module
    full = problem._replace(rows=shape[0])
    config = module.configs(full, backends.device_of(torch.device("cuda:0")), phase)[number]
    try:
        _part(operator, "triton_gpu").launcher(phase)(problem, config, *tensors)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 (reported where it is measured)
        return str(error)
    return ""


def configurations(name: str, shape: tuple[int, int], phase: str) -> tuple[Any, ...]:
    """The legal configurations of a task."""
    operator = operators()[TASKS[name].operator]
    problem, _ = calls(TASKS[name], _tensors(64, shape[1]))[phase]
    return _part(operator, "triton_gpu").module.configs(problem._replace(rows=shape[0]), backends.device_of(torch.device("cuda:0")), phase)


def picked(configs: tuple[Any, ...], few: bool) -> list[int]:
    """Which configurations are measured: all, or the first few and the first whose rows are not cut."""
    if not few:
        return list(range(len(configs)))
    uncut = [i for i, c in enumerate(configs) if not getattr(c, "ends", 0)]
    most = 5 if len(uncut) < len(configs) else 7  # those of wide rows are three and new ones
    return sorted({*range(min(most, len(configs))), *uncut[:1]})


def row(name: str, phase: str, shape: tuple[int, int], what: str, ms: float, size: int, copy_ms: float, error: float | None = None) -> None:
    """One line of the table."""
    note = "" if error is None else f"  error {error:.1e}" + ("" if error < LIMIT else "  WRONG")
    say(f"{name:15s} {phase} {shape!s:14s} {what:30s} {ms:8.4f} ms {size / ms / 1e6:7.0f} GB/s  share {copy_ms / ms:5.3f}{note}")


def copy_time(size: int) -> float:
    """Time of `copy_` that reads and writes `size` bytes in all [ms]."""
    source = torch.empty(size // 4, dtype=BF16, device="cuda").normal_()
    target = torch.empty_like(source)
    return kernel_ms(lambda: target.copy_(source))


def measure(name: str, shape: tuple[int, int], rivals: bool = False, phases: str = "fwd bwd") -> None:
    """All configurations of one task on one shape, beside PyTorch and a copy; with `rivals` few of them, and Liger's."""
    task, tensors = TASKS[name], _tensors(*shape)
    operator = operators()[task.operator]
    native = Natives(task, tensors)
    for phase, (problem, inputs) in calls(task, tensors).items():
        if phase not in phases.split():
            continue
        size = operator.cost(problem, phase).bytes
        copied = copy_time(size)
        row(name, phase, shape, "copy_", copied, size, copied)
        if task.plain is not None:
            row(name, phase, shape, "torch", kernel_ms(native.fwd if phase == "fwd" else native.bwd), size, copied)
        if rivals:
            peer(name, phase, shape, tensors, size, copied)
        want = oracle(operator, phase, problem, inputs)
        target = _part(operator, "triton_gpu")
        best: list[tuple[float, str]] = []
        configs = target.module.configs(problem, backends.device_of(torch.device("cuda:0")), phase)
        for config in (configs[i] for i in picked(configs, rivals)):
            try:
                call = lambda c=config: target.launcher(phase)(problem, c, *inputs)  # noqa: B023, E731
                error = worst_error(_tuple(call()), want)
                ms = kernel_ms(call)
                best.append((ms, str(tuple(config))))
                row(name, phase, shape, best[-1][1], ms, size, copied, error)
            except Exception:  # noqa: BLE001 (one bad configuration must not end the sweep)
                say(f"{name} {phase} {shape} {tuple(config)} FAILED", traceback.format_exc(limit=-1).splitlines()[-1][:300])
        if best:
            say(
                f"{name} {phase} {shape} best first:",
                *(f"{what} {copied / ms:.3f};" for ms, what in sorted(best)[:4]),
                f"of {best[0][1]} first",
            )


def peer(name: str, phase: str, shape: tuple[int, int], tensors: dict[str, torch.Tensor], size: int, copied: float) -> None:
    """Liger's line, or why there is none."""
    try:
        found = liger(name, tensors)
        if found is not None:
            row(name, phase, shape, "liger", kernel_ms(found[phase == "bwd"]), size, copied)
    except Exception:  # noqa: BLE001 (a rival's refusal must not end the sweep, and is told)
        say(f"{name} {phase} {shape} liger FAILED", traceback.format_exc(limit=-1).splitlines()[-1][:300])


class Natives:
    """PyTorch's own operator, forward and backward."""

    def __init__(self, task: Task, tensors: dict[str, torch.Tensor]) -> None:
        if task.plain is None:
            return
        names = {"rms_norm": ("x", "weight"), "layer_norm": ("x", "weight", "bias")}.get(task.operator, ("x",))
        names = ("x", "residual", "weight") if task.learning == 3 and task.operator == "rms_norm" else names
        leaves = [tensors[n].clone().requires_grad_() for n in names]
        self.fwd = lambda: task.plain(*leaves)  # type: ignore[misc]
        outs = _tuple(task.plain(*leaves))
        fed = [tensors[n] for n in ("dy", "dsum")][: len(outs)]
        self.bwd = lambda: torch.autograd.grad(outs, leaves, fed, retain_graph=True)


def main(names: list[str]) -> None:
    """Compile in parallel, then measure one by one."""
    say(torch.__version__, torch.cuda.get_device_name(), f"copy of 4 GiB {4 * 2**30 / copy_time(4 * 2**30) / 1e6:.0f} GB/s")
    if "--far" in names or "--limits" in names:
        far(names, FAR if "--far" in names else LIMITS)
        return
    if "--odd" in names:
        odd([n for n in ODD_TASKS if n in names or not set(names) & set(TASKS)])
        return
    chosen = [n for n in (MODEL if "model" in names else TASKS) if n in names or not set(names) & set(TASKS)]
    shapes = WIDE if "wide" in names else SHAPES + (() if names else WIDE)
    pairs = [(n, s) for n in chosen for s in MODEL[n]] if "model" in names else [(n, s) for s in shapes for n in chosen]
    compile_all(pairs)
    for name, shape in pairs:
        measure(name, shape)


def odd(chosen: list[str]) -> None:
    """The odd widths; a shape's line is of all operators, so that a run that is cut short has whole shapes."""
    REPEATS[:] = [6, 2]
    pairs = [(n, s) for s in ODD for n in chosen]
    compile_all(pairs, few=True)
    for name, shape in pairs:
        measure(name, shape, rivals=True)


def far(names: list[str], wanted: dict[tuple[int, int], dict[str, str]]) -> None:
    """The phases of tasks that are named by shape."""
    REPEATS[:] = [6, 2]
    chosen = [(n, s, phases) for s, tasks in wanted.items() for n, phases in tasks.items() if n in names or not set(names) & set(TASKS)]
    compile_all([(n, s) for n, s, _ in chosen], phases={(n, s): phases for n, s, phases in chosen})
    for name, shape, phases in chosen:
        measure(name, shape, phases=phases)


def compile_all(
    pairs: list[tuple[str, tuple[int, int]]], few: bool = False, phases: dict[tuple[str, tuple[int, int]], str] | None = None
) -> None:
    """Every configuration of all pairs, side by side."""
    wanted = [(n, s, ph) for n, s in pairs for ph in ("fwd", "bwd") if phases is None or ph in phases[n, s].split()]
    jobs = [(n, s, ph, i) for n, s, ph in wanted for i in picked(configurations(n, s, ph), few)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        failed = [f for f in pool.map(compile_ahead, *zip(*jobs, strict=True)) if f]
    say(f"compiled {len(jobs)} configurations, {len(failed)} failed", *{f[:200] for f in failed})


if __name__ == "__main__":
    main(sys.argv[1:])
