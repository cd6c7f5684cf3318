"""What the ConsistencyChecker costs, what it finds, and whom it accuses wrongly, on small models and a CPU.

PYTHONPATH=src:. python benchmarks/consistency.py cost     # a step of llama-tiny on one thread, with and without
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
from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, build

AMOUNTS = {torch.float32: (1e-5, 1e-3), torch.bfloat16: (0.01, 0.03, 0.1)}
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


def traced(checker: ConsistencyChecker, model: nn.Module) -> Any:
    """The trace of one step."""
    model.zero_grad()
    with checker.trace(model) as trace:
        model(IDS, labels=IDS).loss.backward()
    return trace


def cost() -> None:
    """Medians [ms] of interleaved steps; absolute only to show the ratio."""
    torch.set_num_threads(1)
    model = build("llama-tiny").train()
    adopt(model)
    ids = torch.randint(8192, (4, 256))
    checkers = {"none": None, "light": ConsistencyChecker(), "light, every module": ConsistencyChecker(observe="all")}
    times: dict[str, list[float]] = {name: [] for name in checkers}
    for _ in range(7):
        for name, checker in checkers.items():
            model.zero_grad()
            start = time.perf_counter()
            if checker is None:
                model(ids, labels=ids).loss.backward()
            else:
                with checker.trace(model):
                    model(ids, labels=ids).loss.backward()
            times[name].append((time.perf_counter() - start) * 1e3)
    base = statistics.median(times["none"][1:])
    for name, found in times.items():
        middle = statistics.median(found[1:])
        print(f"{name:22} {middle:8.1f} ms  {middle / base:5.2f} of a step without")


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
            model = small(which).to(dtype)
            names = [n for n, m in model.named_modules() if n and type(m).__name__ in PARTS and "decoder" not in n]
            checker = ConsistencyChecker(mode="full", dump_on_failure=False)
            right = traced(checker, model)
            for amount in amounts:
                for kind in KINDS:
                    for name in drawn.sample(names, 6):
                        wrong = copy.deepcopy(model)
                        module = wrong.get_submodule(name)
                        if kind == "weight" and not hasattr(module, "weight"):
                            continue
                        plant(module, kind, amount)
                        first = checker.compare(traced(checker, wrong), trace=right).first
                        place = "missed" if first is None else "exact" if name == first.module or name in first.tied else "elsewhere"
                        found[str(dtype)[6:], amount, place] += 1
    for key in sorted({key[:2] for key in found}):
        print(*key, {place: found[(*key, place)] for place in ("exact", "elsewhere", "missed")})


def alarms() -> None:
    """Adopted models against plain ones: the share of comparisons that accuse anybody."""
    found = collections.Counter[str]()
    for which in ("llama", "bert"):
        for dtype in AMOUNTS:
            for seed in range(6):
                for mode in ("light", "full"):
                    plain, ours = small(which, seed).to(dtype), small(which, seed).to(dtype)
                    adopt(ours)
                    checker = ConsistencyChecker(mode=mode, dump_on_failure=False)
                    report = checker.compare(traced(checker, ours), trace=traced(checker, plain))
                    found["accused" if report.first is not None else "nobody"] += 1
    print(dict(found))


def main() -> None:
    """Run what was asked for."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "faults", "alarms"))
    {"cost": cost, "faults": faults, "alarms": alarms}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
