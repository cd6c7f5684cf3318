"""Is every configuration of every kernel right, each time, on this device?

    PYTHONPATH=src:. python tools/gpu/configurations.py [OP ...] [--case WORDS] [--dtypes bf16,fp32] [--repeats 30] [--jobs 16]

Each configuration of the Triton implementation runs every conformance case's forward and backward over and over: each time the bits must be
those of the first time, and the first must pass the gate that calibration uses, against eager in float64. Processes share the work and are
each other's load. A line for each configuration that fails, with where the elements that differ lie; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from typing import Any, NamedTuple

import torch

from ops_math import backends, catalog
from ops_math.dispatch import Operator
from ops_math.schedule import accuracy
from ops_math.schedule.choose import configurations
from ops_math.spec import Case
from ops_math.testing.capture import OpCall
from ops_math.testing.crosscompile import calls_of

KERNELS, ORACLE = "triton_gpu", "eager"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in fp32 with TRITON_INTERPRET=1, to try the script


class Task(NamedTuple):
    """A case of an operator in one dtype."""

    operator: str
    case: int
    dtype: str
    repeats: int


class Outcome(NamedTuple):
    """How many configurations were run, and what is to be said of those that failed."""

    count: int
    failed: list[str]


def launched(operator: Operator, name: str, call: OpCall, config: Any, args: list[Any]) -> tuple[torch.Tensor, ...]:
    """Results of one launch; what an operator writes in place is a copy."""
    candidate = next(i for i in operator.implementations() if i.name == name)
    phase = operator.phases[call.phase]
    given = [args[0].clone(), *args[1:]] if call.phase == "inplace" else args
    return accuracy.as_results(candidate.launcher(call.phase)(phase.problem_of(*given), config, *given[: phase.num_tensors]), given)


def oracle_of(operator: Operator, call: OpCall, args: list[Any]) -> accuracy.Oracle:
    """Eager in float64, with room for what eager in the same dtype does and for the problem's conditioning."""
    eager = next(i for i in operator.implementations() if i.name == ORACLE)

    def run(given: list[Any]) -> tuple[torch.Tensor, ...]:
        problem = operator.phases[call.phase].problem_of(*given)
        config = configurations(eager, problem, backends.device_of(args[0].device), call.phase, 0)[0]
        return launched(operator, ORACLE, call, config, given)

    wide = run(accuracy.widened(args, torch.float64))
    oracle = accuracy.oracle_of(wide, run(args), "eager in fp64", accuracy.is_narrow(args))
    return accuracy.conditioned(oracle, run(accuracy.nudged(args)))


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its elements."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def where(first: torch.Tensor, again: torch.Tensor) -> str:
    """The corners of the box of elements that differ, and how many they are."""
    differ = (first != again) & ~(torch.isnan(first) & torch.isnan(again))
    places = differ.nonzero()
    if not len(places):
        return "none by value"
    low, high = places.amin(0).tolist(), places.amax(0).tolist()
    return f"{len(places)} of {first.numel()} elements, {low} to {high}"


def examined(operator: Operator, case: Case, dtype: str, repeats: int) -> Outcome:
    """Every configuration of a case."""
    count, failed = 0, []
    kernels = next(i for i in operator.implementations() if i.name == KERNELS)
    for call in calls_of(operator, case, dtype):
        args = [a.detach().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in call.args]
        problem, device = operator.phases[call.phase].problem_of(*args), backends.device_of(args[0].device)
        if kernels.optional("supports", lambda *_: None)(problem, device, call.phase):
            continue
        oracle = oracle_of(operator, call, args)
        for config in dict.fromkeys(configurations(kernels, problem, device, call.phase, 0)):
            count += 1
            first = [r.clone() for r in launched(operator, KERNELS, call, config, args)]
            said = [accuracy.verdict(first, oracle)]
            for place in range(len(first)):
                parted = [launched(operator, KERNELS, call, config, args)[place] for _ in range(repeats)]
                unlike = [again for again in parted if (bits(again) != bits(first[place])).any()]
                if unlike:
                    said.append(f"result {place} has other bits {len(unlike)} of {repeats} times: {where(first[place], unlike[0])}")
            failed += [f"{operator.name} {case.name} {dtype} {call.phase} {config}: {words}" for words in said if words]
    return Outcome(count, failed)


def work(task: Task) -> Outcome:
    """In a process of its own kind."""
    operator = catalog.operators()[task.operator]
    case = operator.file("problem").CASES[task.case]
    try:
        return examined(operator, case, task.dtype, task.repeats)
    except Exception as error:  # noqa: BLE001 (whatever a kernel raises is what is looked for)
        return Outcome(1, [f"{task.operator} {case.name} {task.dtype}: {type(error).__name__}: {error}"])


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OP", help="by default all")
    parser.add_argument("--case", default="", help="only cases with these words in their name")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=16)
    arguments = parser.parse_args()
    known = catalog.operators()
    tasks = [
        Task(name, i, dtype, arguments.repeats)
        for name in arguments.operators or known
        for i, case in enumerate(known[name].file("problem").CASES)
        for dtype in arguments.dtypes.split(",")
        if arguments.case in case.name and dtype in case.dtypes
    ]
    count, failed = 0, 0
    with multiprocessing.get_context("spawn").Pool(min(arguments.jobs, len(tasks))) as pool:
        for found in pool.imap_unordered(work, tasks):
            count, failed = count + found.count, failed + len(found.failed)
            for words in found.failed:
                print(words, flush=True)
    print(f"{len(tasks)} cases, {count} configurations, {arguments.repeats} times each: {failed} findings")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
