"""Which implementation wins on a CPU: measures every candidate of an operator, interleaved, and prints rows for `schedule/measured.json`.

    OMP_NUM_THREADS=1 python benchmarks/cpu_choices.py > src/ops_math/schedule/measured.json

A row holds for problems up to four times smaller or larger (least traffic in bytes) than the one measured. Rows in which PyTorch's own
function wins are what the record is for.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import rows
from ops_math import backends, catalog, settings
from ops_math.testing.capture import watch
from ops_math.testing.inputs import Draw

SHAPES = ((256, 256), (1024, 320), (1024, 1024))
CALLS: dict[str, Callable[[Draw, int, int], tuple[Any, ...]]] = {
    "layer_norm": lambda d, m, n: (d.normal(m, n), d.normal(n), d.normal(n)),
    "softmax": lambda d, m, n: (d.normal(m, n),),
    "gelu": lambda d, m, n: (d.normal(m, n),),
}
REPEATS = 31
REACH = 4  # sizes between a quarter and four times of what was measured


def timed(operator: Any, phase: str, problem: Any, tensors: tuple[Any, ...], names: list[str]) -> dict[str, float]:
    """Lower quartile of the times [us] of each implementation's launcher, in the order A B B A ..."""
    device = backends.device_of(torch.device("cpu"))
    launchers = {}
    for i in operator.implementations():
        if i.name in names:
            configs = i.optional("configs", None)
            launchers[i.name] = (i.launcher(phase), configs(problem, device, phase)[0] if configs else None)
    times: dict[str, list[float]] = {name: [] for name in launchers}
    for order in itertools.islice(itertools.cycle([list(launchers), list(launchers)[::-1]]), REPEATS):
        for name in order:
            launcher, config = launchers[name]
            start = time.perf_counter()
            launcher(problem, config, *tensors)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: round(statistics.quantiles(t, n=4)[0], 1) for name, t in times.items()}


def able(operator: Any, phase: str, problem: Any) -> list[str]:
    """Implementations that can run the problem on the CPU."""
    device = backends.device_of(torch.device("cpu"))
    return [
        i.name
        for i in operator.implementations()
        if i.name != "triton_gpu" and not i.optional("supports", lambda *_: None)(problem, device, phase)
    ]


def main() -> None:
    """Measure and print."""
    facts = rows.environment("cpu")
    source = (
        ", ".join(f"{facts[k]}" for k in ("device", "date")) + f", torch {facts['torch']}, commit {facts['commit']}, {facts['command']}"
    )
    found = []
    for fn, (m, n) in itertools.product(CALLS, SHAPES):
        operator = catalog.public_functions()[fn]
        args = [a.requires_grad_() for a in CALLS[fn](Draw(1, "fp32"), m, n)]
        with settings.force(**{operator.name: "eager"}):
            seen = watch(lambda args=args, fn=fn, operator=operator: operator.public[fn](*args).sum().backward()).calls
        for call in seen:
            phase = operator.phases[call.phase]
            problem = phase.problem_of(*call.args)
            names = able(operator, call.phase, problem)
            if len(names) < 2:
                continue
            with torch.no_grad():
                times = timed(operator, call.phase, problem, call.args[: phase.num_tensors], names)
            size = operator.cost(problem, call.phase).bytes
            found.append(
                {
                    "op": operator.name,
                    "phase": call.phase,
                    "device": "cpu",
                    "dtype": "fp32",
                    "size_low": size // REACH,
                    "size_high": size * REACH,
                    "times_us": times,
                    "source": f"[{m}, {n}], {source}",
                }
            )
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
