"""What `om.accumulate_into_grad` is worth: steps of several micro-batches with and without it, in turns, and their peak memory.

    PYTHONPATH=src:. python tools/gpu/accumulate.py [--model llama-1b] [--micro 4] [--results FILE]

On a CPU it runs too, with llama-tiny, and gives the ratio alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import Any

import torch

import ops_math as om
from benchmarks import rows
from ops_math.cli.bench.clock import turns
from ops_math.cli.bench.contenders import Runner
from ops_math.cli.bench.steps import SETUPS
from ops_math.schedule.ceilings import synchronize

NAMES = ("usual", "accumulated")
WARM = 2


def step(runner: Runner, micro: int, into: Any) -> float:
    """One step of several micro-batches; returns its time [ms]."""
    device = torch.device(runner.device)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(micro):
        loss = runner.loss() / micro
        with contextlib.nullcontext() if into is None else into:
            loss.backward()
    runner.optimizer.step()
    runner.optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Measure, print a line, append a row."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETUPS), default="llama-1b" if gpu else "llama-tiny")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches a step; each is a quarter of the model's batch")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--results")
    arguments = parser.parse_args()
    device = "cuda" if gpu else "cpu"
    torch.set_float32_matmul_precision("high")
    setup = SETUPS[arguments.model]
    batch = max(1, setup.batch // 4)
    runner = Runner(arguments.model, "packed", batch, setup.seq, setup.dtype, setup.autocast, device)
    ways = {"usual": None, "accumulated": om.accumulate_into_grad(runner.model)}
    peaks: dict[str, float] = {}
    for name in NAMES:
        for _ in range(WARM):
            step(runner, arguments.micro, ways[name])
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            step(runner, arguments.micro, ways[name])
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for name in turns(NAMES, arguments.rounds):
        times[name].append(step(runner, arguments.micro, ways[name]))
    ratio = statistics.median(a / u for a, u in zip(times["accumulated"], times["usual"], strict=True))
    row: dict[str, Any] = {
        "benchmark": "accumulate", "model": arguments.model, "micro_batches": arguments.micro, "batch": batch, "seq": setup.seq,
        "ratio_to_usual": round(ratio, 4), "told": str(ways["accumulated"]),
    }  # fmt: skip
    if gpu:
        row |= {f"{name}_ms": statistics.median(taken) for name, taken in times.items()}
        row |= {f"{name}_peak_gib": round(peak, 2) for name, peak in peaks.items()}
    print(row, flush=True)
    rows.append(arguments.results, [row], device)


if __name__ == "__main__":
    main()
