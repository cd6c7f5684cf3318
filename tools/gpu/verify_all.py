"""Proves every operator of ours on one GPU, planted faults included: `ops-math verify` for each implementation and dtype, many at a time.

    PYTHONPATH=src:. python tools/gpu/verify_all.py --out build/proofs.jsonl [--only rms_norm,attention] [--dtypes bf16,fp32] [--jobs 14]

A process for each, with a limit, so that one that spoils the CUDA context or hangs costs one line, and with one thread, since many
processes of many threads take ten times as long. A line names what was tried, the largest
error as a share of its limit, the faults caught and those that lived; exit code 1 where something is wrong or could not be judged in time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ops_math import catalog

ROOT = Path(__file__).parents[2]
VERIFY = "from ops_math.cli import main; main()"


class Proof(NamedTuple):
    """One implementation of an operator in one dtype."""

    operator: str
    implementation: str
    dtype: str


def proofs(only: str, implementations: str, dtypes: str) -> list[Proof]:
    """What is asked for, the slowest operators first, so that they do not end alone."""
    wanted = [name for name in only.split(",") if name]
    found = []
    for name, operator in catalog.operators().items():
        for one in operator.implementations():
            if (not wanted or name in wanted) and one.name in implementations.split(","):
                found += [Proof(name, one.name, dtype) for dtype in dtypes.split(",")]
    return sorted(found, key=lambda p: p.operator not in ("attention", "linear_cross_entropy", "layer_norm", "cross_entropy"))


def asked(given: argparse.Namespace, proof: Proof) -> dict[str, Any]:
    """What the process of one proof answers, or why it does not."""
    words = ["verify", proof.operator, "--implementation", proof.implementation, "--dtypes", proof.dtype, "--device", given.device]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", VERIFY, *words, "--json", "--quiet"],
            capture_output=True, text=True, timeout=given.limit, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"not_judged": f"took more than {given.limit:.0f} s"}
    seconds = {"seconds": round(time.monotonic() - begun, 1)}
    try:
        report = json.loads(done.stdout)[0]
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"not_judged": last[0][:300], **seconds}
    kept = {key: report[key] for key in ("ok", "tried", "margins", "findings", "alive", "skipped")}
    return {**kept, "faults_caught": len(report["caught"]), **seconds}


def line(row: dict[str, Any]) -> str:
    """One proof on one line, with what is wrong below."""
    who = f"{row['operator']} ({row['implementation']}) {row['dtype']}"
    if "not_judged" in row:
        return f"{who}: NOT JUDGED, {row['not_judged']}"
    checks = sum(row["tried"].values())
    if not checks:
        return f"{who}: nothing to judge, {row['skipped'][0] if row['skipped'] else 'no case'} ({row['seconds']} s)"
    worst = max((m["share"] for m in row["margins"].values()), default=0.0)
    caught, planted = row["faults_caught"], row["faults_caught"] + len(row["alive"])
    told = f"{who}: {'right' if row['ok'] else 'WRONG'}, {checks} checks, largest error {worst:.2f} of its limit, "
    lines = [told + f"{caught} of {planted} faults caught ({row['seconds']} s)"]
    lines += [f"    {f['check']}: {f['output']} {f['words']}; smallest: {f['smallest']}" for f in row["findings"]]
    lines += [f"    alive: {name}" for name in row["alive"]]
    return "\n".join(lines)


def main() -> int:
    """Everything that was asked for, a line each as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--implementations", default="triton_gpu,vendor,eager")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for one proof")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="proofs at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "proofs.jsonl")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device,
        "torch": str(torch.__version__),
    }
    chosen, fine, begun = proofs(given.only, given.implementations, given.dtypes), True, time.monotonic()
    with given.out.open("a") as out, ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(asked, given, proof): proof for proof in chosen}
        for done in as_completed(running):
            answer = done.result()
            row = {**head, **running[done]._asdict(), **answer}
            fine = fine and answer.get("ok", not sum(answer.get("tried", {"": 1}).values()))
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(line(row), flush=True)
    print(f"{len(chosen)} proofs in {time.monotonic() - begun:.0f} s", flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
