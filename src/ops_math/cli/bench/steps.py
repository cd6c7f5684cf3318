"""Whole training steps: plain PyTorch, torch.compile and ops-math on one model, interleaved in one run.

Memory is the peak of each variant while it is alone; time is the median of interleaved steps (A B B A ...); gradients are those of one
step without dropout, each parameter's error against an fp32 run of the plain model, as a ratio to plain PyTorch's own error.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ops_math.cli.bench.clock import turns
from ops_math.cli.bench.spread import spread
from ops_math.graphs import graphed_step
from ops_math.schedule.ceilings import synchronize
from ops_math.schedule.trial import in_words
from ops_nn.models import PRESETS, build


class Setup(NamedTuple):
    """Batch [sequences], length [tokens], dtype of the parameters, and whether the forward runs under bf16 autocast."""

    batch: int
    seq: int
    dtype: torch.dtype
    autocast: bool


SETUPS = {
    "llama-1b": Setup(8, 2048, torch.bfloat16, False),
    "bert-large": Setup(32, 512, torch.float32, True),
    "llama-150m": Setup(8, 1024, torch.bfloat16, False),
    "llama-tiny": Setup(4, 256, torch.float32, False),
}
# packed: ours, with weights that share an input laid together; graphed: ours, with the whole step replayed as one CUDA graph
PLAIN, OURS, PACKED, GRAPHED = "plain", "ops", "packed", "graphed"
VARIANTS = (PLAIN, "compile", OURS, PACKED, GRAPHED)
WARM, MEASURED = 4, 12
FEW = 2  # warm steps on a CPU


class Runner:
    """One model with its optimizer, and a step."""

    def __init__(
        self, name: str, variant: str, batch: int, seq: int, dtype: torch.dtype, autocast: bool, device: str, seed: int = 0
    ) -> None:
        self.variant, self.device, self.autocast = variant, device, autocast
        self.model = build(name, seed=seed, device=device, dtype=dtype).train()
        if variant in (OURS, PACKED, GRAPHED):
            from ops_nn.adopt import adopt  # plain runs must not need it

            self.adopted = adopt(self.model, pack=variant == PACKED)
        self.call: Callable[..., Any] = torch.compile(self.model) if variant == "compile" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator(device=device).manual_seed(seed)
        self.ids = torch.randint(0, PRESETS[name].config.vocab_size, (batch, seq), device=device, generator=generator)
        self.labels = self.ids if PRESETS[name].masked else torch.cat([self.ids[:, 1:], self.ids.new_full((batch, 1), -100)], 1)
        self.graphed = graphed_step(self.train, optimizer=self.optimizer) if variant == GRAPHED else None

    def loss(self) -> torch.Tensor:
        """The loss of one forward."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.autocast):
            return self.call(self.ids, labels=self.labels).loss

    def step(self) -> torch.Tensor:
        """Forward, backward, optimizer, as the variant does it."""
        return self.train() if self.graphed is None else self.graphed()

    def train(self) -> torch.Tensor:
        """Forward, backward, optimizer."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def free() -> None:
    """Give memory back before the next variant is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_gib(make: Callable[[], Runner]) -> float:
    """Peak memory [GiB] of a step on a GPU while nothing else is on the device."""
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


def kernels(runner: Runner, tell: Callable[[str], None] | None = None) -> tuple[int, float]:
    """Kernels a step on a GPU, and their time [ms]; `tell` is given the table of them."""
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        runner.step()
        torch.cuda.synchronize()
    events = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if tell is not None:
        tell(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=72))
    return len(events), sum(e.device_time for e in events) / 1e3


def interleaved(runners: list[Runner], warm: int = WARM, measured: int = MEASURED) -> dict[str, list[float]]:
    """Step times [ms] in the order A B C C B A ..., `measured` of each after `warm` steps that do not count."""
    times: dict[str, list[float]] = {r.variant: [] for r in runners}
    for r in runners:
        for _ in range(warm):
            r.step()
    named = {r.variant: r for r in runners}
    for name in turns(list(named), measured):
        device = torch.device(named[name].device)
        synchronize(device)
        start = time.perf_counter()
        named[name].step()
        synchronize(device)
        times[name].append((time.perf_counter() - start) * 1e3)
    return times


def gradients(name: str, variant: str, setup: Setup, device: str) -> dict[str, torch.Tensor]:
    """Gradients of one step without dropout, on the CPU in fp32."""
    runner = Runner(name, variant, setup.batch, setup.seq, torch.float32, setup.autocast, device)
    for module in runner.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_p"):
            setattr(module, "dropout_p", 0.0)  # noqa: B010 (a type checker takes it for a tensor)
    with torch.no_grad():  # the same weights in every dtype
        for p in runner.model.parameters():
            p.copy_(p.to(torch.bfloat16))
    runner.model.to(setup.dtype)
    runner.loss().backward()
    found = {n: p.grad.float().cpu() for n, p in runner.model.named_parameters() if p.grad is not None}
    del runner
    free()
    return found


def compare_gradients(name: str, setup: Setup, device: str) -> dict[str, Any]:
    """The largest ratio over parameters of our gradient error to plain PyTorch's, both against fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(name, PLAIN, setup._replace(dtype=torch.float32, autocast=False), device)
    plain = gradients(name, PLAIN, setup, device)
    ours = gradients(name, OURS, setup, device)
    torch.set_float32_matmul_precision(before)
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


def gradients_row(name: str, setup: Setup, device: str) -> dict[str, Any]:
    """A result row of the gradients' errors, of a quarter of the batch."""
    small = setup._replace(batch=max(1, setup.batch // 4))
    return {"benchmark": "gradients", "model": name, "batch": small.batch, "seq": small.seq, **compare_gradients(name, small, device)}


class Stepped(NamedTuple):
    """What was found: rows, step times [ms] by session and variant, and why a variant dropped out."""

    rows: list[dict[str, Any]]
    sessions: list[dict[str, list[float]]]
    failed: dict[str, str]


def measure(
    name: str,
    variants: Sequence[str],
    device: str,
    *,
    setup: Setup | None = None,
    sessions: int = 1,
    tell: Callable[[str], None] = lambda words: None,
    table: Callable[[str], None] | None = None,
) -> Stepped:
    """Measure whole steps of a model.

    Args:
        name: of a preset.
        variants: of `VARIANTS`; without plain there are no ratios.
        device: `cpu` or `cuda`.
        setup: by default that of `SETUPS`.
        sessions: how often models are built anew and timed.
        tell: is told in a few words what is being done.
        table: is given the table of each variant's kernels, on a GPU.

    Returns: a row for each variant that ran. On a CPU it has ratios to plain PyTorch and no times, and no memory or kernels.
    """
    setup, gpu = setup or SETUPS[name], torch.device(device).type == "cuda"

    def make(variant: str) -> Runner:
        return Runner(name, variant, setup.batch, setup.seq, setup.dtype, setup.autocast, device)

    failed: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for variant in variants:
        tell(f"{name}: {variant}, alone")
        try:
            if gpu:
                peaks[variant] = peak_gib(lambda v=variant: make(v))  # type: ignore[misc]
            else:
                make(variant).step()
        except Exception as error:
            if variant != "compile":
                raise
            failed[variant] = in_words(error)  # the compiler may fail on a model or for want of a C++ compiler; it is named
            free()
    found, times = [], []
    for session in range(sessions):
        tell(f"{name}: in turns, {session + 1}/{sessions}")
        runners = [make(v) for v in variants if v not in failed]
        first = {r.variant: r.step().item() for r in runners}
        times.append(interleaved(runners, *((WARM, MEASURED) if gpu else (FEW, MEASURED))))
        if session + 1 == sessions:
            found = [_row(name, setup, r, times, first[r.variant], peaks.get(r.variant), table) for r in runners]
        del runners
        free()
    return Stepped(found, times, failed)


def _row(
    name: str,
    setup: Setup,
    runner: Runner,
    sessions: list[dict[str, list[float]]],
    first: float,
    peak: float | None,
    table: Callable[[str], None] | None,
) -> dict[str, Any]:
    taken = [ms for one in sessions for ms in one[runner.variant]]
    row: dict[str, Any] = {
        "benchmark": "step", "model": name, "variant": runner.variant, "batch": setup.batch, "seq": setup.seq,
        "visits": len(taken), "sessions": len(sessions),
    }  # fmt: skip
    if PLAIN in sessions[0]:
        ratio = spread(list(itertools.chain.from_iterable(ratios(sessions, runner.variant))))
        row |= {"ratio_to_plain": round(ratio.middle, 4), "noise": round(ratio.noise, 4)}
    if torch.device(runner.device).type == "cuda":
        count, busy = kernels(runner, table)
        middle = statistics.median(taken)
        row |= {"step_ms": middle, "step_ms_all": taken, "tokens_per_s": setup.batch * setup.seq / middle * 1e3}
        row |= {"samples_per_s": setup.batch / middle * 1e3, "peak_gib": peak, "kernels": count, "busy": busy / middle}
    return row | {"first_loss": first, "last_loss": runner.step().item()}


def ratios(sessions: list[dict[str, list[float]]], variant: str) -> list[list[float]]:
    """Step times over plain PyTorch's, step by step, of each session."""
    return [[a / b for a, b in zip(one[variant], one[PLAIN], strict=True)] for one in sessions]


def describe(row: dict[str, Any]) -> str:
    """A result row in one line."""
    what = f"{row['model']} {row['variant']}:"
    if "ratio_to_plain" in row:
        what += f" {row['ratio_to_plain']:.3f} of plain PyTorch's time ±{row['noise']:.1%}"
    losses = f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
    if "step_ms" not in row:
        return f"{what} {losses}"
    return (
        f"{what} {row['tokens_per_s']:.0f} tokens/s {row['samples_per_s']:.1f} samples/s "
        f"{row['step_ms']:.1f} ms (busy {row['busy']:.2f}) peak {row['peak_gib']:.1f} GiB {row['kernels']} kernels {losses}"
    )
