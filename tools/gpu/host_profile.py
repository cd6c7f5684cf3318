"""Host time of a training step: how long Python needs to queue forward, backward and optimizer, and where it goes.

python tools/gpu/host_profile.py bert-large [ops|plain]
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time

import torch

from benchmarks.steps import SETUPS, Runner


def main() -> None:
    """Print medians [ms] of queueing each part with an idle device, then the profile of five forwards."""
    name, variant = sys.argv[1], sys.argv[2]
    batch, seq, dtype, autocast = SETUPS[name]
    runner = Runner(name, variant, batch, seq, dtype, autocast, "cuda")
    for _ in range(4):
        runner.step()
    parts: list[list[float]] = [[], [], [], []]
    for _ in range(7):
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        loss = runner.loss()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        runner.optimizer.step()
        runner.optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        for kept, a, b in zip(parts, marks, marks[1:], strict=False):
            kept.append((b - a) * 1e3)
    print(
        name,
        variant,
        "queue ms: forward {:.1f} backward {:.1f} optimizer {:.1f} then wait {:.1f}".format(*tuple(statistics.median(p) for p in parts)),
    )
    profile = cProfile.Profile()
    for _ in range(5):
        torch.cuda.synchronize()
        profile.enable()
        loss = runner.loss()
        profile.disable()
        loss.backward()
        runner.optimizer.zero_grad(set_to_none=True)
    pstats.Stats(profile).sort_stats("tottime").print_stats(24)


if __name__ == "__main__":
    main()
