"""Whole training steps from a clone, without installing: what `ops-math bench step` runs, with the options of the recorded results.

    python benchmarks/steps.py --model llama-1b --variants plain,ops --results benchmarks/results/h200.jsonl

llama-1b: 8 x 2048 random tokens, bf16 parameters, fused AdamW. bert-large: 32 x 512, fp32 parameters under bf16 autocast, dropout 0.1.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import rows
from ops_math.cli.bench import steps
from ops_math.cli.bench.steps import SETUPS, Runner

__all__ = ["SETUPS", "Runner", "main"]


def main() -> None:
    """Run and print one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETUPS), default="llama-1b")
    parser.add_argument("--variants", default="plain,ops")
    parser.add_argument("--results")
    parser.add_argument("--table", action="store_true", help="print the kernels of one step")
    parser.add_argument("--no-gradients", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, rows.environment(device)["device"], flush=True)
    variants = arguments.variants.split(",")
    if set(variants) - set(steps.VARIANTS):
        parser.error(f"--variants: any of {', '.join(steps.VARIANTS)}")
    found = steps.measure(arguments.model, variants, device, table=print if arguments.table else None)
    for row in found.rows:
        print(steps.describe(row), flush=True)
    for variant, why in found.failed.items():
        print(f"{arguments.model} {variant}: {why}", flush=True)
    if not arguments.no_gradients:
        found.rows.append(steps.gradients_row(arguments.model, SETUPS[arguments.model], device))
        print({k: v for k, v in found.rows[-1].items() if k != "benchmark"}, flush=True)
    rows.append(arguments.results, found.rows, device)


if __name__ == "__main__":
    main()
