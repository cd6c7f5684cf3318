"""Gated units, GELU and dropout at awkward widths on one GPU: how near is each configuration to a copy of the same number of bytes.

Usage: PYTHONPATH=src python3 tools/gpu/elementwise_sweep.py [ROWSxCOLS ...] [glu] [geglu] [gelu] [gelu_bias] [dropout] [glu_packed]
All shapes, and all operators but gelu_bias and glu_packed, by default; under a minute. glu_packed has gate and up as halves of one tensor,
which of an odd width start at different places between 16-byte boundaries.

Time is kernel time from the profiler: the device time of all that a call launches, the median of its repetitions. A share is the time of
`copy_` of as many bytes (each input read once, each output written once) over ours. PyTorch and Liger (where it is installed) stand
beside. The first and last rows of each result are checked against `eager`, and configurations against one another bit for bit.
Kernels are compiled ahead, in processes that see no GPU, into Triton's cache.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ops_math import backends
from ops_math.backends import null
from ops_math.catalog import operators
from ops_math.rng import Rng

SHAPES = (*((155795, 3446), (28023, 1164), (410696, 753), (721, 6616), (663, 15993), (25, 270), (2, 340), (8192, 14336), (32768, 4096)),)
TASKS = ("glu", "geglu", "gelu", "dropout", "gelu_bias", "glu_packed")
BF16 = torch.bfloat16
WORKERS = 12
CHECKED = 8  # rows at either end
ROUNDING = 2**-7  # of bf16, twice


class Task(NamedTuple):
    """One phase of an operator: the arguments of its dispatcher operator, and the same by others."""

    operator: str
    phase: str
    arguments: tuple[Any, ...]
    others: dict[str, Callable[[], Any]]


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


def kernel_us(call: Callable[[], Any], repeats: int = 10) -> float:
    """Device time [us] of one call: the median of its repetitions."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    times = [e.device_time for e in sorted(seen.events(), key=lambda e: e.time_range.start) if e.device_type.name == "CUDA"]
    each = max(len(times) // repeats, 1)
    return statistics.median(sum(times[i : i + each]) for i in range(0, each * repeats, each))


@lru_cache(maxsize=128)
def copy_us(num_bytes: int) -> float:
    """Time [us] of a copy that reads and writes `num_bytes` in all."""
    source = torch.empty(max(num_bytes // 4, 1), dtype=BF16, device="cuda")
    target = torch.empty_like(source)
    return kernel_us(lambda: target.copy_(source))


def backward_of(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Callable[[], Any]:
    """PyTorch's backward of a graph that is kept."""
    return lambda: torch.autograd.grad(out, inputs, dy, retain_graph=True)


def liger(stem: str, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> list[dict[str, Callable[[], Any]]]:
    """Liger's forward and backward of a gated unit; nothing where it is not installed."""
    try:
        from liger_kernel.ops import geglu, swiglu
    except ImportError:
        return [{}, {}]
    module = swiglu if stem == "swiglu" else geglu
    forward, backward = getattr(module, f"{stem}_forward"), getattr(module, f"{stem}_backward")
    return [{"liger": partial(forward, gate, up)}, {"liger": partial(backward, gate.clone(), up.clone(), dy)}]  # it writes over its inputs


def _gated(name: str, rows: int, cols: int, make: Callable[..., torch.Tensor]) -> list[Task]:
    gate, up, dy = make(rows, cols), make(rows, cols), make(rows, cols)
    activation, function = ("silu", F.silu) if name == "glu" else ("gelu_tanh", partial(F.gelu, approximate="tanh"))
    fwd, bwd = (gate, up, activation, "", False, BF16), (dy, gate, up, None, activation, "", True, True, False)
    others: list[dict[str, Callable[[], Any]]] = [{}, {}]
    if gate.is_cuda:
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        plain = ({"torch": lambda: function(gate) * up}, {"torch": backward_of(function(leaves[0]) * leaves[1], leaves, dy)})
        others = [{**p, **other} for p, other in zip(plain, liger("swiglu" if name == "glu" else "geglu", gate, up, dy), strict=True)]
    return [Task("glu", "fwd", fwd, others[0]), Task("glu", "bwd", bwd, others[1])]


def _packed(name: str, rows: int, cols: int, make: Callable[..., torch.Tensor]) -> list[Task]:
    packed, dy = make(rows, 2 * cols), make(rows, cols)
    fwd, bwd = (packed, None, "silu", "halves", False, BF16), (dy, packed, None, None, "silu", "halves", True, False, False)
    others: list[dict[str, Callable[[], Any]]] = [{}, {}]
    if packed.is_cuda:
        leaf = packed.detach().requires_grad_()
        gate, up = leaf.chunk(2, -1)
        plain = packed.chunk(2, -1)
        others = [{"torch": lambda: F.silu(plain[0]) * plain[1]}, {"torch": backward_of(F.silu(gate) * up, (leaf,), dy)}]
    return [Task("glu", "fwd", fwd, others[0]), Task("glu", "bwd", bwd, others[1])]


def _gelu(name: str, rows: int, cols: int, make: Callable[..., torch.Tensor]) -> list[Task]:
    x, dy, bias = make(rows, cols), make(rows, cols), make(cols) if name == "gelu_bias" else None
    fwd, bwd = (x, bias, "none", BF16), (dy, x, bias, "none", True, bias is not None, False)
    others: list[dict[str, Callable[[], Any]]] = [{}, {}]
    if x.is_cuda:
        leaves = tuple(t.detach().requires_grad_() for t in (x, bias) if t is not None)
        others[0] = {"torch": lambda: F.gelu(x if bias is None else x + bias)}
        others[1] = {"torch": backward_of(F.gelu(sum(leaves[1:], leaves[0])), leaves, dy)}
    return [Task("gelu", "fwd", fwd, others[0]), Task("gelu", "bwd", bwd, others[1])]


def _dropout(name: str, rows: int, cols: int, make: Callable[..., torch.Tensor]) -> list[Task]:
    x, dy = make(rows, cols), make(rows, cols)
    state = torch.empty(3, dtype=torch.int64, device="meta") if x.is_meta else Rng(5, x.device).state
    others: list[dict[str, Callable[[], Any]]] = [{}, {}]
    if x.is_cuda:
        leaf = x.detach().requires_grad_()
        others = [{"torch": lambda: F.dropout(leaf, 0.1)}, {"torch": backward_of(F.dropout(leaf, 0.1), (leaf,), dy)}]
    return [Task("dropout", "fwd", (x, state, 0.1), others[0]), Task("dropout", "bwd", (dy, state, 0.1), others[1])]


MAKERS = {"glu": _gated, "geglu": _gated, "gelu": _gelu, "gelu_bias": _gelu, "dropout": _dropout, "glu_packed": _packed}


def _part(task: Task, name: str = "triton_gpu") -> Any:
    return next(i for i in operators()[task.operator].implementations() if i.name == name)


def _problem(task: Task) -> Any:
    return operators()[task.operator].phases[task.phase].problem_of(*task.arguments)


def _tensors(task: Task) -> tuple[Any, ...]:
    return task.arguments[: operators()[task.operator].phases[task.phase].num_tensors]


def compile_ahead(name: str, shape: tuple[int, int], device_name: str) -> int:
    """Compile every configuration of an operator on a shape for a device of this name; how many kernels."""
    device, count = backends.NAMED[device_name], 0
    for task in MAKERS[name](name, *shape, lambda *size: torch.empty(size, dtype=BF16, device="meta")):
        with null.pretend(device) as compiled:
            for config in _part(task).module.configs(_problem(task), device, task.phase):
                _part(task).launcher(task.phase)(_problem(task), config, *_tensors(task))
            count += len(compiled)
            compiled.clear()
    return count


def _tuple(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def wrong(task: Task, values: tuple[torch.Tensor, ...]) -> str:
    """Where results of full size differ from `eager` in the first or last rows."""
    rows = task.arguments[0].shape[0]
    for start in (0, max(rows - CHECKED, 0)):
        piece = slice(start, start + CHECKED)
        given = [t[piece] if isinstance(t, torch.Tensor) and t.dim() == 2 else t for t in task.arguments]
        if task.operator == "dropout":
            given[1] = Rng.of_state(given[1]).at_row(start).state
        count = operators()[task.operator].phases[task.phase].num_tensors
        problem = operators()[task.operator].phases[task.phase].problem_of(*given)
        want = _tuple(_part(task, "eager").launcher(task.phase)(problem, None, *given[:count]))
        for number, (v, w) in enumerate(zip(values, want, strict=True)):
            if v.dim() == 2 and v.shape[0] == rows:
                gap = (v[piece].float() - w.float()).abs() - ROUNDING * w.float().abs()
                if not gap.max().item() < 1e-3 or (task.operator == "dropout" and not torch.equal(v[piece] == 0, w == 0)):
                    return f"WRONG: result {number}, rows from {start}"
    return ""


def measure(name: str, shape: tuple[int, int], tasks: list[Task]) -> None:
    """Every configuration of a task beside a copy and the others."""
    for task in tasks:
        problem, part = _problem(task), _part(task)
        copied = copy_us(operators()[task.operator].cost(problem, task.phase).bytes)
        rates, notes, first = [], [], None
        for config in part.module.configs(problem, backends.device_of(torch.device("cuda")), task.phase):
            call = partial(part.launcher(task.phase), problem, config, *_tensors(task))
            try:
                values = _tuple(call())
                notes.append(wrong(task, values))
                same = first is None or name == "gelu_bias" or all(torch.equal(a, b) for a, b in zip(values, first, strict=True))
                notes.append("" if same else f"WRONG: {tuple(config)} has other bits than the first configuration")
                first = values if first is None else first
                rates.append((kernel_us(call), "x".join(map(str, config))))
            except Exception as error:  # noqa: BLE001 (one bad configuration must not end the sweep)
                notes.append(f"FAILED {tuple(config)} {type(error).__name__}: {str(error)[:150]}")
        others = []
        for other, call in task.others.items():
            try:
                others.append(f"{other} {copied / kernel_us(call):.2f}")
            except Exception as error:  # noqa: BLE001
                others.append(f"{other} {type(error).__name__}")
        ours = "  ".join(f"{config}: {copied / us:.2f}" for us, config in rates)
        took = f"{rates[0][0]:8.1f} us" if rates else " " * 11
        shares = f"copy {copied:7.1f} us  {' '.join(others):26s}"
        say(f"{name:9s} {task.phase} {'x'.join(map(str, shape)):12s} {took}  {shares} | {ours} {' '.join(n for n in notes if n)}")


def main(arguments: list[str]) -> None:
    """Compile, then measure."""
    began = time.perf_counter()
    shapes = [tuple(int(n) for n in a.split("x")) for a in arguments if a[0].isdigit()] or list(SHAPES)
    names = [a for a in arguments if a in TASKS] or list(TASKS[:-2])
    jobs = [(n, s) for s in shapes for n in names]
    found = torch.cuda.get_device_name().lower()
    device_name = next((n for n in backends.NAMED if n in found), "h200")
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        count = sum(pool.map(compile_ahead, *zip(*jobs, strict=True), [device_name] * len(jobs)))
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {count} kernels compiled in {time.perf_counter() - began:.0f} s")
    say("shares of a copy: PyTorch, Liger | ours by configuration, the first is the default, whose time is given")
    for name, shape in jobs:
        tasks = MAKERS[name](name, *shape, lambda *size: torch.randn(size, dtype=BF16, device="cuda"))
        measure(name, shape, tasks)
        del tasks
        copy_us.cache_clear()
        torch.cuda.empty_cache()
    say(f"-- {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
