"""Whole training steps from a clone, without installing: what `ops-math bench step` runs, with the options of the recorded results.

    python benchmarks/steps.py --model llama-1b --variants plain,ops --results benchmarks/results/h200.jsonl
    python benchmarks/steps.py --model llama-1b --variants plain,liger,packed,packed+graphed --floor --no-gradients
    python benchmarks/steps.py --model llama-1b --variants plain,ops,documents,padded,trimmed --no-gradients
    python benchmarks/steps.py --model llama-tiny --dtype bf16 --variants plain,ops,inductor,compile --no-gradients

llama-1b: 8 x 2048 random tokens, bf16 parameters, fused AdamW. bert-large: 32 x 512, fp32 parameters under bf16 autocast, dropout 0.1.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks import rows
from ops_math.checks import ArgumentError
from ops_math.cli.bench import steps
from ops_math.cli.bench.contenders import HOW, variant_of
from ops_math.cli.bench.steps import SETUPS, Runner
from ops_math.spec import DTYPE_OF

__all__ = ["SETUPS", "Runner", "main"]


def main() -> None:
    """Run and print one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETUPS), default="llama-1b")
    parser.add_argument("--variants", default="plain,ops", help=f"separated by commas; each {HOW}")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the parameters, instead of the model's usual one")
    parser.add_argument("--sessions", type=int, default=1, help="times that everything is set up anew")
    parser.add_argument("--floor", action="store_true", help="work out the least time of a step, part by part, and each variant's share")
    parser.add_argument("--results")
    parser.add_argument("--table", action="store_true", help="print the kernels of one step")
    parser.add_argument("--no-gradients", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, rows.environment(device)["device"], flush=True)
    variants = arguments.variants.split(",")
    try:
        for variant in variants:
            variant_of(variant)
    except ArgumentError as error:
        parser.error(f"--variants: {error}")
    table = print if arguments.table else None
    setup = SETUPS[arguments.model]
    if arguments.dtype:
        setup = setup._replace(dtype=DTYPE_OF[arguments.dtype])
    options = {"sessions": arguments.sessions, "table": table, "with_floor": arguments.floor}
    found = steps.measure(arguments.model, variants, device, setup=setup, **options)
    for row in found.rows:
        row.update({"dtype": arguments.dtype} if arguments.dtype else {}, threads=torch.get_num_threads())
        print(steps.describe(row), flush=True)
    for variant, why in found.failed.items():
        print(f"{arguments.model} {variant}: {why}", flush=True)
    if not arguments.no_gradients:
        found.rows.append(steps.gradients_row(arguments.model, setup, device))
        print({k: v for k, v in found.rows[-1].items() if k != "benchmark"}, flush=True)
    rows.append(arguments.results, found.rows, device)


if __name__ == "__main__":
    main()
