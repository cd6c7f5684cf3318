"""Memory-bound operators at shapes drawn from a seed, against PyTorch and Liger: share of a copy of as many bytes, host time, who wins.

    python benchmarks/random_shapes.py --seed 3 --results benchmarks/results/h200.jsonl

Widths of 64 to 16,384 and 1 to 1,000,000 rows, each octave as likely, rows cut to the memory there is. Runs for --seconds and says how far
it came. On a CPU there are ratios only. Exit code 1 where ours fails or has wrong numbers.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks import rows
from ops_math.cli.bench import drawn, live, rivals
from ops_math.cli.bench.clock import clock_for

FEW_SECONDS, SECONDS = 60.0, 150.0


def describe(row: dict[str, Any]) -> str:
    """A result row in one line."""
    what = f"{row['op']:15s} {row['shape']:15s} {row['phase']:4s} {row['variant']:9s}"
    ratio = f"{row['ratio_to_torch']:6.2f} of torch's time" if "ratio_to_torch" in row else "no torch to compare with"
    wrong = f" WRONG: {row['wrong']}" if row["wrong"] else ""
    if "kernel_us" not in row:
        return f"{what} {ratio}{wrong}"
    return f"{what} {ratio} {row['kernel_us']:10.1f} us share {row['share']:.2f} host {row['host_us']:4.0f} us{wrong}"


def main() -> None:
    """Measure, print a line a row, and end with the worst share and every place where a rival wins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", choices=[[], *drawn.functions()], metavar="OP", help="by default all of rows and columns")
    parser.add_argument("--seed", type=int, required=True, help="of the shapes and of the order in which they are met")
    parser.add_argument("--count", type=int, default=20, help="shapes")
    parser.add_argument("--vs", default="torch,liger", help="rivals: " + ", ".join(rivals.NAMES))
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="by default bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--seconds", type=float, help=f"begin no call after this long; by default {SECONDS:g}, {FEW_SECONDS:g} on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", help="append rows to this JSON-lines file")
    parser.add_argument("--quiet", action="store_true", help="print the end alone")
    arguments = parser.parse_args()
    device, gpu = torch.device(arguments.device), arguments.device == "cuda"
    print("; ".join(f"{key}: {value}" for key, value in {**live.facts(device), **live.surroundings(device)}.items()), flush=True)
    dtype = arguments.dtype or ("bf16" if gpu else "fp32")
    wanted = arguments.ops or drawn.functions()
    posed = drawn.plans(arguments.count, arguments.seed, device, dtype, rivals.asked(arguments.vs), wanted)
    seconds = arguments.seconds or (SECONDS if gpu else FEW_SECONDS)
    found = drawn.run(posed, clock_for(device), seconds, lambda row: None if arguments.quiet else print(describe(row), flush=True))
    rows.append(arguments.results, found.rows, arguments.device)
    print("\n".join(drawn.words(found)), flush=True)
    sys.exit(drawn.ours_failed(found))


if __name__ == "__main__":
    main()
