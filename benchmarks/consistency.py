"""What the ConsistencyChecker costs, and, on small models and a CPU, what it finds and whom it accuses wrongly.

PYTHONPATH=src:. python benchmarks/consistency.py cost     # steps of llama-tiny with and without: on a GPU if there is one, else one thread
PYTHONPATH=src:. python benchmarks/consistency.py cost --model llama-1b --rounds 10
PYTHONPATH=src:. python benchmarks/consistency.py faults   # faults planted in Llama and BERT: exact module, elsewhere, or missed
PYTHONPATH=src:. python benchmarks/consistency.py alarms   # adopted against plain: nobody should be accused
"""

from __future__ import annotations

import argparse
import collections
import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker
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


class Stepper:
    """Forward and backward of an adopted model, with a checker or without; no optimizer, whose time would make the share smaller."""

    def __init__(self, name: str, device: torch.device) -> None:
        batch, length = (8, 2048) if name == "llama-1b" else (4, 256)
        dtype = torch.bfloat16 if name == "llama-1b" else torch.float32
        self.device = device
        self.model = build(name, device=device, dtype=dtype).train()
        adopt(self.model)
        vocabulary = self.model.get_parameter("model.embed_tokens.weight").shape[0]
        self.ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
        self.seen = 0
        self.looks: list[float] = []

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, checker: ConsistencyChecker | None) -> tuple[float, float, float]:
        """Time of a step, of the host until it returns, and of the processor for this thread [ms]; then, on its own, of looking at the
        trace, which waits for figures and makes records of them."""
        self.model.zero_grad()
        self.wait()
        start, worked = time.perf_counter(), time.thread_time()
        if checker is None:
            self.model(self.ids, labels=self.ids).loss.backward()
        else:
            with checker.trace(self.model) as trace:
                self.model(self.ids, labels=self.ids).loss.backward()
        host = time.perf_counter()
        worked = time.thread_time() - worked
        self.wait()
        end = time.perf_counter()
        if checker is not None:
            self.seen = len(trace.records)
            self.looks.append((time.perf_counter() - end) * 1e3)
        return (end - start) * 1e3, (host - start) * 1e3, worked * 1e3

    def kernels(self, checker: ConsistencyChecker) -> tuple[float, int]:
        """Time of the figures' kernels in one step [ms], and how many were started."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self(checker)
        mine = [event for event in profile.key_averages() if event.key in ("_chunk_kernel", "_fold_kernel")]
        return sum(event.self_device_time_total for event in mine) / 1e3, sum(event.count for event in mine)


def cost(name: str, rounds: int) -> None:
    """Interleaved steps A B B A; the median of the rounds' ratios with their quartiles, and the smallest time of each.

    On a CPU also of the processor's time for the thread, which others on the machine change less than the clock's.
    """
    torch.set_num_threads(1)
    step = Stepper(name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    where = torch.cuda.get_device_name() if step.device.type == "cuda" else "one thread of a CPU"
    print(f"{name}, {list(step.ids.shape)} tokens, {next(step.model.parameters()).dtype}, {where}, torch {torch.__version__}")
    for label, checker in {"light": ConsistencyChecker(), "light, every module": ConsistencyChecker(observe="all")}.items():
        for _ in range(3):
            step(None)
            step(checker)
        step.looks.clear()
        ratios, worked, without, traced = [], [], [], []
        for _ in range(rounds):
            a, b, c, d = step(None), step(checker), step(checker), step(None)
            ratios.append((b[0] + c[0]) / (a[0] + d[0]))
            worked.append((b[2] + c[2]) / (a[2] + d[2]))
            without += [a, d]
            traced += [b, c]
        low, middle, high = statistics.quantiles(ratios, n=4)
        times, host, processor = ([statistics.median(t[n] for t in found) for found in (without, traced)] for n in range(3))
        least = [min(t[0] for t in found) for found in (without, traced)]
        print(f"{label}: {middle:.3f} of a step without (quartiles {low:.3f} to {high:.3f}, {rounds} rounds), {step.seen} tensors seen")
        print(f"    step {times[0]:.2f} and {times[1]:.2f} ms; smallest {least[0]:.2f} and {least[1]:.2f} ms, {least[1] / least[0]:.3f}")
        print(f"    looking at the trace afterwards {statistics.median(step.looks):.2f} ms")
        if step.device.type == "cpu":
            low, middle, high = statistics.quantiles(worked, n=4)
            least = [min(t[2] for t in found) for found in (without, traced)]
            print(f"    the processor: {middle:.3f} of its time without (quartiles {low:.3f} to {high:.3f})", end="")
            print(
                f", {processor[0]:.2f} and {processor[1]:.2f} ms; smallest {least[0]:.2f} and {least[1]:.2f} ms, {least[1] / least[0]:.3f}"
            )
        else:
            spent, count = step.kernels(checker)
            print(f"    host until it returns {host[0]:.2f} and {host[1]:.2f} ms; {count} kernels of figures, {spent:.3f} ms")


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
    arguments = parser.parse_args()
    if arguments.what == "cost":
        cost(arguments.model, arguments.rounds)
    else:
        {"faults": faults, "alarms": alarms}[arguments.what]()


if __name__ == "__main__":
    main()
