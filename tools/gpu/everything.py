"""Everything that is measured on a GPU, one command after the other, each with a limit; the outputs go to a folder.

    PYTHONPATH=src:. python tools/gpu/everything.py --out build/gpu [--only suite,steps,optimizer,...] [--list]

A command that fails or runs out of time is named, and the next one goes on; the output of one that was stopped ends with where it was.
Rows are appended to `OUT/rows.jsonl`, to be looked at and then moved to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Job(NamedTuple):
    """A command by its group; `limit` in seconds; `tail` lines of its output are shown."""

    group: str
    name: str
    command: str
    limit: int
    tail: int = 4


CLI = "-c 'from ops_math.cli import main; main()'"


def jobs(rows: Path, out: Path) -> list[Job]:
    """In the order in which they should run: what must be right first."""
    workers = min(16, os.cpu_count() or 1)
    steps, alone = f"benchmarks/steps.py --results {rows}", "benchmarks/steps.py --table --no-gradients"
    lengths, curves = f"{steps} --no-gradients", f"benchmarks/curves.py --results {rows}"
    floor, unequal = f"{lengths} --floor", "ops,documents,padded,trimmed"
    calibrate = f"{CLI} calibrate --dtype bf16 --seconds 100"
    suite = "-m pytest tests src/ops_math -v -p no:cacheprovider --timeout 100 --tb=short"  # each test's name: a run may be stopped
    return [
        Job("suite", "suite", f"{suite} -m 'gpu and not alone' -n {workers}", 400, 12),
        Job("suite", "suite alone", f"{suite} -m 'gpu and alone'", 150, 6),
        Job("steps", "bert-large", f"{steps} --model bert-large --variants plain,ops", 150, 6),
        Job("steps", "llama-1b", f"{steps} --model llama-1b --variants plain,ops,packed", 150, 6),
        Job("steps", "llama-tiny", f"{steps} --model llama-tiny --variants plain,ops,packed,graphed --no-gradients", 90, 6),
        Job("floor", "floor of llama-1b", f"{floor} --model llama-1b --variants packed+adamw", 150, 8),
        Job("floor", "floor of bert-large", f"{floor} --model bert-large --variants plain,liger,packed,packed+graphed", 150, 8),
        Job("floor", "with our optimizer", f"{floor} --model llama-1b --variants plain,packed+adamw,packed+graphed+adamw", 150, 8),
        Job("lengths", "llama-1b lengths", f"{lengths} --model llama-1b --variants plain,{unequal}", 150, 8),
        Job("lengths", "bert-large lengths", f"{lengths} --model bert-large --variants plain,{unequal}", 150, 8),
        Job("curves", "curves of llama-1b", f"{curves} --model llama-1b --variants packed+adamw", 300, 12),
        Job("curves", "curves of bert-large", f"{curves} --model bert-large --variants ops,packed+graphed", 150, 12),
        Job("curves", "without dropout", f"{curves} --model bert-large --variants ops,packed+adamw --no-dropout", 150, 12),
        Job("accumulate", "accumulate", f"tools/gpu/accumulate.py --results {rows}", 100, 4),
        Job("random", "random shapes", f"benchmarks/random_shapes.py --seed 3 --results {rows}", 200, 60),
        Job("kernels", "bert-large alone", f"{alone} --model bert-large --variants ops", 90, 45),
        Job("kernels", "llama-1b alone", f"{alone} --model llama-1b --variants packed+adamw", 90, 45),
        Job("host", "host costs", "tools/gpu/host_costs.py", 60, 26),
        Job("host", "host of bert-large", "tools/gpu/host_profile.py bert-large ops", 60, 3),
        Job("configurations", "configurations", "tools/gpu/configurations.py --dtypes bf16,fp32", 300, 20),
        Job("consistency", "checker on llama-1b", "benchmarks/consistency.py cost --model llama-1b --rounds 10", 120, 20),
        Job("consistency", "checker on llama-tiny", "benchmarks/consistency.py cost --rounds 30", 90, 20),
        Job("consistency", "figures sweep", "tools/gpu/figures_sweep.py", 60, 40),
        Job("optimizer", "optimizer sweep", f"benchmarks/optimizer.py --sweep --results {rows}", 150, 30),
        Job("attention", "attention sweep", "tools/gpu/attention_sweep.py vendor fwd bwd", 120, 60),
        Job("attention", "documents", "tools/gpu/attention_documents.py", 100, 45),
        Job("elementwise", "elementwise sweep", "tools/gpu/elementwise_sweep.py", 90, 60),
        Job("norms", "norm sweep", "tools/gpu/norm_sweep.py", 150, 60),
        Job("norms", "norm sweep of odd widths", "tools/gpu/norm_sweep.py --odd", 130, 60),
        Job("losses", "loss sweep", "tools/gpu/cross_entropy_sweep.py", 150, 60),
        Job("calibrate", "calibrate llama-1b", f"{calibrate} --model llama-1b --export {out / 'llama.json'}", 150, 20),
        Job("calibrate", "calibrate bert-large", f"{calibrate} --model bert-large --export {out / 'bert.json'}", 150, 20),
    ]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """An abort makes Python write where it is; a process that is deep in a call that never returns is killed."""
    process.send_signal(signal.SIGABRT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def run(job: Job, folder: Path) -> str:
    """Run a job; returns what became of it."""
    path, start = folder / f"{job.name.replace(' ', '_')}.txt", time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-X", "faulthandler", *shlex.split(job.command)]
    with path.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT) as process:
        try:
            code = process.wait(job.limit)
            outcome = "done" if code == 0 else f"FAILED with {code}"
        except subprocess.TimeoutExpired:
            outcome = f"STOPPED after {job.limit} s"
            _stop(process)
    lines = [line for line in path.read_text(errors="replace").splitlines() if "Warning" not in line and "_warn_once" not in line]
    failed = [line for line in lines[: -job.tail] if " FAILED " in line]
    shown = "\n".join(line[:220] for line in [*failed, *lines[-job.tail :]])
    return f"== {job.group}: {job.name}: {outcome}, {time.perf_counter() - start:.0f} s\n{shown}"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", default="", help="groups or names, separated by commas")
    parser.add_argument("--list", action="store_true", help="show the jobs and run nothing")
    arguments = parser.parse_args()
    asked = {name.strip() for name in arguments.only.split(",") if name.strip()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = [job for job in jobs(arguments.out / "rows.jsonl", arguments.out) if not asked or asked & {job.group, job.name}]
    if asked - {word for job in found for word in (job.group, job.name)}:
        parser.error(f"--only: unknown among {', '.join(sorted(asked))}; --list shows what there is")
    for job in found:
        told = f"{job.group:10} {job.name:22} {job.limit:4} s  python {job.command}" if arguments.list else run(job, arguments.out)
        print(told, flush=True)


if __name__ == "__main__":
    main()
