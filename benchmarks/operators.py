"""Every operator against plain PyTorch and its rivals on one GPU, forward and backward: `ops-math bench` from a clone, with torch alone.

    python benchmarks/operators.py [OP ...] [--compile] [--vs liger,quack,fa4] [--random 20] [--results benchmarks/results/h200.jsonl]
    python benchmarks/operators.py --first --compile ours      # are compiled calls slower than eager ones? two minutes

Every implementation of ours is timed beside the scheduler's choice. Kernel time comes from the profiler, so that host gaps do not count;
host time stands beside it. Rates are the least traffic (`cost()` of the problem) over kernel time; `share` is that rate over the rate of a
`copy_` of the same number of bytes in the same turns; operators of matrix products show TFLOP/s, and their share of an 8192-wide product.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import rows
from ops_math.cli.bench import calls, driver, live, optimizer, rivals
from ops_math.cli.bench.clock import clock_for


def describe(row: dict[str, Any]) -> str:
    """A result row in one line."""
    rate = "no rate known"
    if "share" in row:
        rate = (f"{row['tflops']:8.1f} TFLOP/s" if "tflops" in row else f"{row['gbs']:8.1f} GB/s") + f" share {row['share']:.2f}"
    what = f"{row['op']:21s} {row['shape']:30s} {row['phase']:4s} {row['variant']:20s}"
    wrong = f" WRONG: {row['wrong']}" if row["wrong"] else ""
    return f"{what} {row['kernel_us']:10.1f} us {rate} host {row['host_us']:.0f} us{wrong}"


def plans(arguments: argparse.Namespace, device: torch.device) -> list[driver.Plan]:
    """The calls to measure."""
    each = [] if arguments.first else [rivals.EACH]
    names = rivals.asked(",".join([*each, *(["compile"] if arguments.compile == "all" else []), arguments.vs]))
    found = []
    for function in arguments.ops or [*calls.CALLS, optimizer.NAME]:
        if function == optimizer.NAME:
            wanted = () if arguments.random or arguments.first else optimizer.SHAPES  # it is not compiled, and has no other choice
            found += [driver.Plan(function, shape, {}, "bf16", device, names) for shape in wanted]
            found += [driver.Plan(function, shape, {}, "fp32", device, names) for shape in wanted]
            continue
        entry = calls.CALLS[function]
        shapes = entry.shapes[:1] if arguments.first else entry.shapes
        if arguments.random:
            if not entry.takes_rows:
                continue
            most = driver.most_numbers(device, "bf16")
            shapes = tuple((shape, {}) for shape in calls.random_shapes(function, arguments.random, arguments.seed, most))
        found += [driver.Plan(function, shape, words, "bf16", device, names, bool(arguments.compile)) for shape, words in shapes]
    return found


def main() -> None:
    """Measure and print one line a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", choices=[[], *calls.CALLS, optimizer.NAME], metavar="OP")
    parser.add_argument(
        "--compile", nargs="?", const="all", choices=["all", "ours"], help="torch.compile of plain PyTorch and ours, or ours"
    )
    parser.add_argument("--first", action="store_true", help="the first standard shape of each alone, and the scheduler's choice alone")
    parser.add_argument("--vs", default="", help="liger, quack, fa4")
    parser.add_argument("--random", type=int, default=0, help="this many random shapes instead of the standard ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each phase")
    parser.add_argument("--results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU; on a CPU `ops-math bench` gives ratios")
    device = torch.device("cuda")
    print("; ".join(f"{key}: {value}" for key, value in {**live.facts(device), **live.surroundings(device)}.items()), flush=True)
    clock = clock_for(device)
    worst: tuple[float, str] = (float("inf"), "nothing of ours was measured")
    for plan in plans(arguments, device):
        measure = optimizer.measure if plan.function == optimizer.NAME else driver.measure
        outcome = measure(plan, clock, arguments.seconds, 1)
        found = driver.rows_of(outcome)
        for row in found:
            print(describe(row), flush=True)
            if row["variant"] == rivals.OURS and "share" in row:
                worst = min(worst, (row["share"], describe(row)))
        for name, why in {**outcome.missing, **outcome.failed}.items():
            print(f"{plan.label} {name}: {why}", flush=True)
        rows.append(arguments.results, found, "cuda")
    print(f"worst share: {worst[1]}")


if __name__ == "__main__":
    main()
