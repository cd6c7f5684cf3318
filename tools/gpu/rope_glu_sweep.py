"""Rotary embedding, gated units and GELU on one GPU: are they right, and how fast is each configuration beside PyTorch and a copy.

Usage: PYTHONPATH=src python3 tools/gpu/rope_glu_sweep.py [right] [rope] [glu] [gelu]     (all by default)

Times are kernel times from the profiler (device time of all that a call launches), median of three rounds; rates count the least
traffic, each input read and each output written once. `copy` moves as many bytes by `Tensor.copy_`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ops_math import backends
from ops_math.catalog import operators
from ops_math.ops.rope import op_inplace  # noqa: F401 (registers the phase)
from ops_math.testing.measure import Judge

OPERATORS = ("rope", "glu", "gelu")
WORKERS = 8  # processes that check, and compile ahead
BF16 = torch.bfloat16


class Job(NamedTuple):
    """One phase of an operator on one shape: arguments of the dispatcher's operator, and plain PyTorch for the same (or None)."""

    label: str
    operator: str
    phase: str
    arguments: tuple[Any, ...]
    plain: Callable[[], Any] | None


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, flush=True)


def kernel_us(call: Callable[[], Any], repeats: int = 12) -> float:
    """Device time [us] of one call."""
    call()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
        rounds.append(sum(e.device_time for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA) / repeats)
    return statistics.median(rounds)


def attempt(label: str, call: Callable[[], Any]) -> Any:
    """Run, or print the error with its label and go on: one bad configuration must not end the sweep."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        say(f"{label:70s} FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}")
        return None


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


def backward_of(outputs: Any, inputs: tuple[torch.Tensor, ...], fed: Any) -> Callable[[], Any]:
    """PyTorch's backward of a graph that is kept."""
    return lambda: torch.autograd.grad(outputs, inputs, fed, retain_graph=True)


def rope_plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The half convention as model code writes it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rope_jobs(tiny: bool) -> Iterator[Job]:
    """Queries and keys apart in both conventions, packed, and in place."""
    for b, s, h, k, d in ((4, 4096, 32, 8, 128), (8, 2048, 32, 8, 64)):
        b, s = (1, 16) if tiny else (b, s)
        q, key, qkv = normal(b, s, h, d), normal(b, s, k, d), normal(b, s, h + 2 * k, d)
        shape = f"q[{b},{s},{h},{d}] k{k}"
        wide = [t.to(BF16)[:, None] for t in (torch.rand(s, d, device="cuda"), torch.rand(s, d, device="cuda"))]
        ids = torch.arange(s, device="cuda").expand(b, s).contiguous()
        learning = q.clone().requires_grad_(), key.clone().requires_grad_()
        outs = None if tiny else tuple(rope_plain(x, *wide) for x in learning)
        plain = {
            "fwd": lambda q=q, key=key, wide=wide: (rope_plain(q, *wide), rope_plain(key, *wide)),
            "bwd": None if tiny else backward_of(outs, learning, (q, key)),
        }
        for name, dtype, pairs, positions in (
            ("half", torch.float32, False, None),
            ("half, bf16 tables", BF16, False, None),
            ("pairs", torch.float32, True, None),
            ("half, positions", torch.float32, False, ids),
        ):
            tables = normal(s, d // 2, dtype=dtype), normal(s, d // 2, dtype=dtype)
            for phase in ("fwd", "bwd"):
                arguments = (q, key, *tables, positions, d, h, pairs, BF16)
                yield Job(f"rope {name} {shape}", "rope", phase, arguments, plain[phase] if name == "half" else None)
        tables = normal(s, d // 2, dtype=torch.float32), normal(s, d // 2, dtype=torch.float32)
        yield Job(f"rope packed {shape}", "rope", "fwd", (qkv, None, *tables, None, d, h + k, False, BF16), None)
        yield Job(f"rope in place {shape}", "rope", "inplace", (qkv, *tables, None, d, h + k, False, False), None)


def glu_jobs(tiny: bool) -> Iterator[Job]:
    """SwiGLU and GeGLU apart and packed."""
    for rows, cols in ((8192, 14336), (16384, 8192)):
        rows = 16 if tiny else rows
        gate, up, dy, packed = (normal(rows, n) for n in (cols, cols, cols, 2 * cols))
        learning = gate.clone().requires_grad_(), up.clone().requires_grad_()
        plain = {
            "silu": lambda g, u: F.silu(g) * u,
            "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
            "gelu": lambda g, u: F.gelu(g) * u,
        }
        for activation, fn in plain.items():
            shape = f"{activation} [{rows},{cols}]"
            yield Job(f"glu {shape}", "glu", "fwd", (gate, up, activation, "", False, BF16), partial(fn, gate, up))
            back = None if tiny else backward_of(fn(*learning), learning, dy)
            yield Job(f"glu {shape}", "glu", "bwd", (dy, gate, up, None, activation, "", True, True, False), back)
            if activation == "silu":
                yield Job(f"glu with y {shape}", "glu", "bwd", (dy, gate, up, None, activation, "", True, True, True), None)
                for packing in ("halves", "interleaved"):
                    yield Job(f"glu {packing} {shape}", "glu", "fwd", (packed, None, activation, packing, False, BF16), None)
                    yield Job(
                        f"glu {packing} {shape}", "glu", "bwd", (dy, packed, None, None, activation, packing, True, False, False), None
                    )


def gelu_jobs(tiny: bool) -> Iterator[Job]:
    """GELU alone and with a bias in front."""
    rows, cols = 16 if tiny else 16384, 4096
    x, dy, bias = normal(rows, cols), normal(rows, cols), normal(cols)
    for b in (None, bias):
        learning = [t.clone().requires_grad_() for t in (x, b) if t is not None]

        def plain(*t: torch.Tensor) -> torch.Tensor:
            return F.gelu(t[0] if len(t) == 1 else t[0] + t[1])

        shape = f"{'alone' if b is None else 'with bias'} [{rows},{cols}]"
        yield Job(
            f"gelu {shape}",
            "gelu",
            "fwd",
            (x, b, "none", BF16),
            partial(plain, *learning) if tiny else partial(plain, *(t.detach() for t in learning)),
        )
        back = None if tiny else backward_of(plain(*learning), tuple(learning), dy)
        yield Job(f"gelu {shape}", "gelu", "bwd", (dy, x, b, "none", True, b is not None, False), back)
        if b is not None:
            yield Job(f"gelu with y {shape}", "gelu", "bwd", (dy, x, b, "none", True, True, True), None)


JOBS = {"rope": rope_jobs, "glu": glu_jobs, "gelu": gelu_jobs}


@lru_cache(maxsize=64)
def copy_rate(num_bytes: int) -> float:
    """GB/s of a copy that moves this many bytes."""
    a = torch.empty(num_bytes // 4, device="cuda", dtype=BF16)
    b = torch.empty_like(a)
    return num_bytes / kernel_us(lambda: b.copy_(a)) / 1e3


def candidates(job: Job) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """(configuration, call of our launcher)."""
    operator = operators()[job.operator]
    phase = operator.phases[job.phase]
    problem = phase.problem_of(*job.arguments)
    kernels = operator.implementations()[0]
    for config in kernels.module.configs(problem, backends.device_of(torch.device("cuda")), job.phase):
        yield config, partial(kernels.launcher(job.phase), problem, config, *job.arguments[: phase.num_tensors])


def sweep(name: str) -> None:
    """Time every configuration of every job of an operator."""
    for job in JOBS[name](False):
        operator = operators()[job.operator]
        num_bytes = operator.cost(operator.phases[job.phase].problem_of(*job.arguments), job.phase).bytes
        label = f"{job.label} {job.phase}"
        results = []
        for config, call in candidates(job):
            took = attempt(f"{label} {tuple(config)}", partial(kernel_us, call))
            if took:
                results.append((num_bytes / took / 1e3, tuple(config)))
        plain = attempt(f"{label} plain", partial(kernel_us, job.plain)) if job.plain else None
        best = max(results, default=(0.0, None))
        rates = "  ".join(f"{config}: {rate:.0f}" for rate, config in results)
        beside = f"plain {num_bytes / plain / 1e3:.0f}" if plain else "plain -"
        copied = copy_rate(num_bytes)
        say(f"{label:58s} best {best[0]:6.0f} GB/s ({best[0] / copied:.2f} of copy {copied:.0f}) {beside:11s} | {rates}")


def worker(part: str) -> None:
    """A share of the cases checked, and of the jobs compiled."""
    index, count = (int(n) for n in part.split("/"))
    every = [(n, c, d) for n in OPERATORS for c in operators()[n].file("problem").CASES for d in c.dtypes]
    for name, case, dtype in every[index::count]:
        label = f"{name} {case.name} {dtype}"
        broken = attempt(label, lambda n=name, c=case, d=dtype: Judge(operators()[n], c, d, "cuda").verdict("triton_gpu", seeds=(1, 2)))
        if broken is None or broken:
            say(f"WRONG {label}: " + "; ".join(str(b) for b in broken or ()))
    calls = [(f"{job.label} {config}", call) for name in OPERATORS for job in JOBS[name](True) for config, call in candidates(job)]
    for label, call in calls[index::count]:
        attempt(label, call)
    torch.cuda.synchronize()
    say(f"RIGHT {len(every[index::count])} checked")


def right() -> None:
    """Every case in every dtype against float64, in several processes, which leave the compiled kernels on disk."""
    command = [sys.executable, __file__, "worker"]
    processes = [
        subprocess.Popen([*command, f"{i}/{WORKERS}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(WORKERS)
    ]
    checked, wrong = 0, 0
    for process in processes:
        output = process.communicate()[0]
        for line in output.splitlines():
            checked += int(line.split()[1]) if line.startswith("RIGHT") else 0
            if line.startswith("WRONG") or "FAILED" in line:
                wrong += 1
                say(line)
        if process.returncode:
            wrong += 1
            say(f"a worker ended with {process.returncode}: {output[-2000:]}")
    say(f"{checked} cases and dtypes checked against float64, {wrong} wrong")


def main(arguments: list[str]) -> None:
    """Run the named parts."""
    if arguments[:1] == ["worker"]:
        worker(arguments[1])
        return
    import triton

    say(
        f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}, copy of 4 GiB {copy_rate(2**32):.0f} GB/s"
    )
    for part in arguments or ["right", *OPERATORS]:
        start = time.perf_counter()
        if part == "right":
            right()
        else:
            sweep(part)
        say(f"-- {part}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
