"""What the ConsistencyChecker costs, and, on small models and a CPU, what it finds and whom it accuses wrongly.

PYTHONPATH=src:. python benchmarks/consistency.py cost     # steps of llama-tiny with and without: on a GPU if there is one, else one thread
PYTHONPATH=src:. python benchmarks/consistency.py cost --model llama-1b --rounds 10
PYTHONPATH=src:. python benchmarks/consistency.py faults   # faults planted in Llama and BERT: exact module, elsewhere, or missed
PYTHONPATH=src:. python benchmarks/consistency.py alarms   # adopted against plain: nobody should be accused
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import itertools
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker, Trace
from ops_nn.debug.figures import step_of
from ops_nn.debug.trace import PARAMETER
from ops_nn.debug.verdict import DIFFERENT
from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, build

AUTOCAST = "bfloat16 autocast"
AMOUNTS: dict[torch.dtype | str, tuple[float, ...]] = {
    torch.float32: (1e-5, 1e-3),
    torch.bfloat16: (0.01, 0.03, 0.1),
    AUTOCAST: (0.01, 0.03, 0.1),
}
KINDS = ("value", "noise", "row", "gradient", "weight")
PARTS = ("Linear", "LlamaRMSNorm", "LayerNorm", "LlamaMLP")
IDS = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(5))


def small(which: str, seed: int = 7, scale: float = 0.2) -> nn.Module:
    """A model of two layers with drawn weights, in training mode, without dropout."""
    made: nn.Module
    if which == "llama":
        made = LlamaForCausalLM(LlamaConfig(61, 32, 128, 2, 4, 2, 8, tie_word_embeddings=False))
    else:
        made = BertForMaskedLM(BertConfig(61, 32, 128, 2, 4, max_position_embeddings=24, hidden_dropout=0.0, attention_dropout=0.0))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(0.0, scale, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                p.add_(1.0)
    return made.train()


def stored(model: nn.Module, dtype: torch.dtype | str) -> nn.Module:
    """The model in a dtype; under autocast its weights stay in fp32."""
    return model if isinstance(dtype, str) else model.to(dtype)


def traced(checker: ConsistencyChecker, model: nn.Module, dtype: torch.dtype | str) -> Any:
    """The trace of one step."""
    model.zero_grad()
    with checker.trace(model) as trace:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == AUTOCAST):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
    return trace


class Times(NamedTuple):
    """Of one step [ms]: until the device is done; of the host until it returns; of the processor for this thread; and of the host for
    entering the trace, forward, backward and leaving it."""

    step: float
    host: float
    processor: float
    phases: tuple[float, float, float, float]


class Stepper:
    """Steps of an adopted model, with a checker or without: forward and backward, or with fused AdamW after them, as in training."""

    def __init__(self, name: str, device: torch.device) -> None:
        batch, length = (8, 2048) if name == "llama-1b" else (4, 256)
        dtype = torch.bfloat16 if name == "llama-1b" else torch.float32
        self.device = device
        self.model = build(name, device=device, dtype=dtype).train()
        adopt(self.model)
        vocabulary = self.model.get_parameter("model.embed_tokens.weight").shape[0]
        self.ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)  # weights stay what they are
        self.seen = self.bytes = 0
        self.looks: list[float] = []

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, checker: ConsistencyChecker | None) -> tuple[Trace | None, tuple[float, float, float, float]]:
        """Forward and backward; what was seen, and times of the host."""
        times = [time.perf_counter()]
        watching = contextlib.nullcontext() if checker is None else checker.trace(self.model)
        with watching as trace:
            times.append(time.perf_counter())
            loss = self.model(self.ids, labels=self.ids).loss
            times.append(time.perf_counter())
            loss.backward()
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        first, second, third, fourth = ((b - a) * 1e3 for a, b in itertools.pairwise(times))
        return trace, (first, second, third, fourth)

    def __call__(self, checker: ConsistencyChecker | None, whole: bool = False) -> Times:
        """A step that is waited for before and after, with the optimizer where it is `whole`; then, on its own, looking at the trace, which
        waits for figures and makes records of them."""
        self.model.zero_grad()
        self.wait()
        start, worked = time.perf_counter(), time.thread_time()
        trace, phases = self.run(checker)
        if whole:
            self.optimizer.step()
        host, worked = time.perf_counter(), time.thread_time() - worked
        self.wait()
        end = time.perf_counter()
        if trace is not None:
            self.seen, self.bytes = len(trace.records), bytes_read(trace)
            self.looks.append((time.perf_counter() - end) * 1e3)
        return Times((end - start) * 1e3, (host - start) * 1e3, worked * 1e3, phases)

    def in_a_row(self, checker: ConsistencyChecker | None, count: int) -> float:
        """Time of each of some whole steps of which none is waited for [ms]; a trace is looked at when the step after it was started."""
        self.wait()
        start, before = time.perf_counter(), None
        for _ in range(count):
            self.model.zero_grad()
            trace, _ = self.run(checker)
            self.optimizer.step()
            if before is not None:
                self.seen = len(before.records)
            before = trace
        self.wait()
        return (time.perf_counter() - start) * 1e3 / count

    def kernels(self, checker: ConsistencyChecker | None) -> tuple[float, float, int]:
        """Time of all that the device does in one step [ms]; of that the figures' kernels, and how many were started."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self(checker)
        events = profile.key_averages()
        mine = [event for event in events if event.key in ("_chunk_kernel", "_fold_kernel", "_gather_kernel")]
        busy, spent = (sum(event.self_device_time_total for event in found) / 1e3 for found in (events, mine))
        return busy, spent, sum(event.count for event in mine)

    def copy_rate(self) -> float:
        """Bytes that a copy reads and writes a second."""
        x = torch.empty(2**29, dtype=torch.uint8, device=self.device)
        y, start, end = torch.empty_like(x), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        y.copy_(x)
        start.record()
        for _ in range(8):
            y.copy_(x)
        end.record()
        self.wait()
        return 16 * x.numel() / (start.elapsed_time(end) / 1e3)


def bytes_read(trace: Trace) -> int:
    """How many bytes figures were made of: a tensor that stands at several places once, of a weight what is read of it."""
    seen = {id(r.figures): (key, r) for key, r in trace.records.items()}
    return sum(
        -(-math.prod(r.shape) // (step_of(r.shape) if key.direction == PARAMETER else 1)) * r.torch_dtype.itemsize
        for key, r in seen.values()
    )


def cost(name: str, rounds: int, row: int) -> None:
    """Interleaved steps A B B A; the median of the rounds' ratios with their quartiles, and the smallest time of each.

    Forward and backward alone first, then the whole step with fused AdamW, both waited for; then whole steps in a row.
    """
    torch.set_num_threads(1)
    step = Stepper(name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = step.device.type == "cuda"
    where = torch.cuda.get_device_name() if gpu else "one thread of a CPU"
    print(f"{name}, {list(step.ids.shape)} tokens, {next(step.model.parameters()).dtype}, {where}, torch {torch.__version__}")
    for label, checker in {"light": ConsistencyChecker(), "light, every module": ConsistencyChecker(observe="all")}.items():
        for _ in range(3):
            step(None, whole=True)
            step(checker, whole=True)
        step.looks.clear()
        without, traced = alternated(step, checker, rounds)
        print(f"{label}, {step.seen} tensors seen, {step.bytes / 1e6:.0f} MB; forward and backward:")
        told([t.step for t in without], [t.step for t in traced])
        host = [statistics.median(t.host for t in found) for found in (without, traced)]
        phases = [[statistics.median(t.phases[n] for t in found) for n in range(4)] for found in (without, traced)]
        print(f"    host until it returns {host[0]:.2f} and {host[1]:.2f} ms: entering the trace {phases[1][0]:.2f},", end=" ")
        print(f"forward {phases[0][1]:.2f} and {phases[1][1]:.2f}, backward {phases[0][2]:.2f} and {phases[1][2]:.2f},", end=" ")
        print(f"leaving it {phases[1][3]:.2f}; looking at it afterwards {statistics.median(step.looks):.2f}")
        if gpu:
            (busy, _, _), (traced_busy, spent, count) = step.kernels(None), step.kernels(checker)
            rate = step.bytes / spent * 1e3
            print(f"    the device is busy for {busy:.2f} and {traced_busy:.2f} ms;", end=" ")
            print(f"{count} kernels of figures, {spent:.3f} ms, {rate / 1e12:.2f} TB/s, {rate / step.copy_rate():.2f} of a copy's")
        else:
            print("    the processor's time for the thread:")
            told([t.processor for t in without], [t.processor for t in traced])
        few = max(2, rounds // 2)
        print("    the whole step, with fused AdamW:")
        told(*([t.step for t in found] for found in alternated(step, checker, few, whole=True)))
        if row and gpu:  # on a CPU every step is waited for
            print(f"    {row} whole steps in a row, none waited for, each trace looked at a step later:")
            step.in_a_row(checker, 2)
            runs = [[step.in_a_row(each, row) for each in (None, checker, checker, None)] for _ in range(max(2, rounds // 4))]
            told([t for run in runs for t in run[::3]], [t for run in runs for t in run[1:3]])


def alternated(step: Stepper, checker: ConsistencyChecker, rounds: int, whole: bool = False) -> tuple[list[Times], list[Times]]:
    """Times without and with."""
    without, traced = [], []
    for _ in range(rounds):
        a, b, c, d = step(None, whole), step(checker, whole), step(checker, whole), step(None, whole)
        without += [a, d]
        traced += [b, c]
    return without, traced


def told(without: list[float], traced: list[float]) -> None:
    """A line: two of each belong to a round."""
    ratios = [(traced[n] + traced[n + 1]) / (without[n] + without[n + 1]) for n in range(0, len(without), 2)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    times, least = [statistics.median(found) for found in (without, traced)], [min(found) for found in (without, traced)]
    print(f"    {middle:.3f} of that without (quartiles {low:.3f} to {high:.3f}, {len(ratios)} rounds);", end=" ")
    print(f"{times[0]:.2f} and {times[1]:.2f} ms; smallest {least[0]:.2f} and {least[1]:.2f} ms, {least[1] / least[0]:.3f}", flush=True)


def plant(module: Any, kind: str, amount: float) -> None:
    """Make one module wrong: a result scaled or noisy, its last row, its input's gradient, or its weight's gradient."""

    def value(m: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * (1 + amount)

    def noise(m: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result + amount * result.std() * torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result)

    def row(m: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        result = result.clone()
        result[-1, -1] *= 1 + 5 * amount
        return result

    hooks: dict[str, Callable[..., Any]] = {"value": value, "noise": noise, "row": row}
    if kind in hooks:
        module.register_forward_hook(hooks[kind])
    elif kind == "gradient":
        module.register_full_backward_hook(lambda m, grads, _: tuple(g if g is None else g * (1 + amount) for g in grads))
    else:

        def weight(p: torch.Tensor) -> None:
            p.grad.mul_(1 + amount)  # type: ignore[union-attr]

        module.weight.register_post_accumulate_grad_hook(weight)


def faults() -> None:
    """Plant each kind of fault in modules drawn at random; count where the report puts it."""
    drawn, found = random.Random(1), collections.Counter[tuple[Any, ...]]()
    for which in ("llama", "bert"):
        for dtype, amounts in AMOUNTS.items():
            model = stored(small(which), dtype)
            names = [n for n, m in model.named_modules() if n and type(m).__name__ in PARTS and "decoder" not in n]
            checker = ConsistencyChecker(mode="full", dump_on_failure=False)
            right = traced(checker, model, dtype)
            for amount in amounts:
                for kind in KINDS:
                    for name in drawn.sample(names, 6):
                        wrong = copy.deepcopy(model)
                        module = wrong.get_submodule(name)
                        if kind == "weight" and not hasattr(module, "weight"):
                            continue
                        plant(module, kind, amount)
                        first = checker.compare(traced(checker, wrong, dtype), trace=right).first
                        place = "missed" if first is None else "exact" if name == first.module or name in first.tied else "elsewhere"
                        found[str(dtype).removeprefix("torch."), amount, place] += 1
    for key in sorted({key[:2] for key in found}):
        print(*key, {place: found[(*key, place)] for place in ("exact", "elsewhere", "missed")})


def alarms() -> None:
    """Adopted models against plain ones: how many comparisons accuse anybody."""
    found = collections.Counter[tuple[str, str]]()
    for which in ("llama", "bert"):
        for dtype in AMOUNTS:
            for seed in range(6):
                for mode in ("light", "full"):
                    plain, ours = (stored(small(which, seed), dtype) for _ in range(2))
                    adopt(ours)
                    checker = ConsistencyChecker(mode=mode, dump_on_failure=False)
                    report = checker.compare(traced(checker, ours, dtype), trace=traced(checker, plain, dtype))
                    found[str(dtype).removeprefix("torch."), "nobody" if report.verdict != DIFFERENT else "accused"] += 1
    for key, count in sorted(found.items()):
        print(*key, count)


def main() -> None:
    """Run what was asked for."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "faults", "alarms"))
    parser.add_argument("--model", choices=("llama-tiny", "llama-1b"), default="llama-tiny", help="for cost")
    parser.add_argument("--rounds", type=int, default=8, help="for cost: of four steps, two with the checker and two without")
    parser.add_argument("--in-a-row", type=int, default=4, help="for cost on a GPU: steps that are not waited for; 0 leaves them out")
    arguments = parser.parse_args()
    if arguments.what == "cost":
        cost(arguments.model, arguments.rounds, arguments.in_a_row)
    else:
        {"faults": faults, "alarms": alarms}[arguments.what]()


if __name__ == "__main__":
    main()
