"""Whole training steps: plain PyTorch, torch.compile and ops-math on one model, interleaved in one run.

    python benchmarks/steps.py --model llama-1b --variants plain,ops --results benchmarks/results/h200.jsonl

llama-1b: 8 x 2048 random tokens, bf16 parameters, fused AdamW. bert-large: 32 x 512, fp32 parameters under bf16 autocast, dropout 0.1.
Memory is the peak of each variant while it is alone; time is the median of interleaved steps (A B B A ...); gradients are those of one
step without dropout, each parameter's error against an fp32 run of the plain model, as a ratio to plain PyTorch's own error.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import rows
from ops_nn.models import PRESETS, build

SETUPS = {
    "llama-1b": (8, 2048, torch.bfloat16, False),
    "bert-large": (32, 512, torch.float32, True),
    "llama-150m": (8, 1024, torch.bfloat16, False),
}
WARM, MEASURED = 4, 12


class Runner:
    """One model with its optimizer, and a step."""

    def __init__(
        self, name: str, variant: str, batch: int, seq: int, dtype: torch.dtype, autocast: bool, device: str, seed: int = 0
    ) -> None:
        self.variant, self.device, self.autocast = variant, device, autocast
        self.model = build(name, seed=seed, device=device, dtype=dtype).train()
        if variant in ("ops", "packed"):
            from ops_nn.adopt import adopt  # plain runs must not need it

            self.adopted = adopt(self.model, pack=variant == "packed")
        self.call: Callable[..., Any] = torch.compile(self.model) if variant == "compile" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator(device=device).manual_seed(seed)
        self.ids = torch.randint(0, PRESETS[name].config.vocab_size, (batch, seq), device=device, generator=generator)
        self.labels = self.ids if PRESETS[name].masked else torch.cat([self.ids[:, 1:], self.ids.new_full((batch, 1), -100)], 1)

    def loss(self) -> torch.Tensor:
        """The loss of one forward."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return self.call(self.ids, labels=self.labels).loss

    def step(self) -> torch.Tensor:
        """Forward, backward, optimizer."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def free() -> None:
    """Give memory back before the next variant is built."""
    gc.collect()
    torch.cuda.empty_cache()


def peak_gib(make: Callable[[], Runner]) -> float:
    """Peak memory [GiB] of a step while nothing else is on the device."""
    free()
    base = torch.cuda.memory_allocated()
    runner = make()
    for _ in range(2):
        runner.step()
    torch.cuda.reset_peak_memory_stats()
    runner.step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    del runner
    free()
    return peak


def kernels(runner: Runner, table: bool) -> tuple[int, float]:
    """Kernels a step and their time [ms]."""
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        runner.step()
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if table:
        print(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=72))
    return len(events), sum(e.device_time for e in events) / 1e3


def interleaved(runners: list[Runner]) -> dict[str, list[float]]:
    """Step times [ms] in the order A B C C B A ..."""
    times: dict[str, list[float]] = {r.variant: [] for r in runners}
    for r in runners:
        for _ in range(WARM):
            r.step()
    torch.cuda.synchronize()
    orders = itertools.cycle([runners, runners[::-1]])
    for order in itertools.islice(orders, MEASURED):
        for r in order:
            torch.cuda.synchronize()
            start = time.perf_counter()
            r.step()
            torch.cuda.synchronize()
            times[r.variant].append((time.perf_counter() - start) * 1e3)
    return times


def gradients(name: str, variant: str, batch: int, seq: int, dtype: torch.dtype, autocast: bool) -> dict[str, torch.Tensor]:
    """Gradients of one step without dropout, on the CPU in fp32."""
    runner = Runner(name, variant, batch, seq, torch.float32, autocast, "cuda")
    for module in runner.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_p"):
            module.dropout_p = 0.0
    with torch.no_grad():  # the same weights in every dtype
        for p in runner.model.parameters():
            p.copy_(p.to(torch.bfloat16))
    runner.model.to(dtype)
    runner.loss().backward()
    found = {n: p.grad.float().cpu() for n, p in runner.model.named_parameters() if p.grad is not None}
    del runner
    free()
    return found


def compare_gradients(name: str, batch: int, seq: int, dtype: torch.dtype, autocast: bool) -> dict[str, Any]:
    """The largest ratio over parameters of our gradient error to plain PyTorch's, both against fp32."""
    torch.set_float32_matmul_precision("highest")
    exact = gradients(name, "plain", batch, seq, torch.float32, False)
    plain = gradients(name, "plain", batch, seq, dtype, autocast)
    ours = gradients(name, "ops", batch, seq, dtype, autocast)
    assert exact.keys() == plain.keys() == ours.keys()
    ratios = {}
    for n, r in exact.items():
        scale = r.norm().item() or 1e-30
        ratios[n] = ((ours[n] - r).norm().item() / scale, (plain[n] - r).norm().item() / scale)
    worst = max(ratios, key=lambda n: ratios[n][0] / max(ratios[n][1], 1e-30))
    return {
        "parameters": len(ratios),
        "worst_ratio": ratios[worst][0] / max(ratios[worst][1], 1e-30),
        "worst_parameter": worst,
        "median_ratio": statistics.median(a / max(b, 1e-30) for a, b in ratios.values()),
        "largest_error_ours": max(a for a, _ in ratios.values()),
        "largest_error_plain": max(b for _, b in ratios.values()),
    }


def describe(row: dict[str, Any]) -> str:
    """A result row in one line."""
    return (
        f"{row['model']} {row['variant']}: {row['tokens_per_s']:.0f} tokens/s {row['samples_per_s']:.1f} samples/s "
        f"{row['step_ms']:.1f} ms (busy {row['busy']:.2f}) peak {row['peak_gib']:.1f} GiB {row['kernels']} kernels "
        f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
    )


def main() -> None:
    """Run and print one line a variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(SETUPS), default="llama-1b")
    parser.add_argument("--variants", default="plain,ops")
    parser.add_argument("--results")
    parser.add_argument("--table", action="store_true", help="print the kernels of one step")
    parser.add_argument("--no-gradients", action="store_true")
    arguments = parser.parse_args()
    batch, seq, dtype, autocast = SETUPS[arguments.model]
    variants = arguments.variants.split(",")

    def make(variant: str) -> Runner:
        return Runner(arguments.model, variant, batch, seq, dtype, autocast, "cuda")

    torch.set_float32_matmul_precision("high")
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    peaks = {v: peak_gib(lambda v=v: make(v)) for v in variants}
    runners = [make(v) for v in variants]
    first = {r.variant: r.step().item() for r in runners}
    times = interleaved(runners)
    found = []
    for r in runners:
        count, busy = kernels(r, arguments.table)
        middle = statistics.median(times[r.variant])
        found.append(
            {
                "benchmark": "step",
                "model": arguments.model,
                "variant": r.variant,
                "batch": batch,
                "seq": seq,
                "step_ms": middle,
                "step_ms_all": times[r.variant],
                "tokens_per_s": batch * seq / middle * 1e3,
                "samples_per_s": batch / middle * 1e3,
                "peak_gib": peaks[r.variant],
                "kernels": count,
                "busy": busy / middle,
                "first_loss": first[r.variant],
                "last_loss": r.step().item(),
            }
        )
        print(describe(found[-1]), flush=True)
    del runners
    free()
    if not arguments.no_gradients:
        small = max(1, batch // 4)
        compared = {
            "benchmark": "gradients",
            "model": arguments.model,
            "batch": small,
            "seq": seq,
            **compare_gradients(arguments.model, small, seq, dtype, autocast),
        }
        found.append(compared)
        print({k: v for k, v in compared.items() if k != "benchmark"}, flush=True)
    rows.append(arguments.results, found, "cuda")


if __name__ == "__main__":
    main()
