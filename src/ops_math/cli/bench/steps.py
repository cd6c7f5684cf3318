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

from ops_math import checks, features
from ops_math.cli.bench import floor
from ops_math.cli.bench.clock import clock_for, turns
from ops_math.cli.bench.contenders import ADAMW, COMPILE, GRAPHED, LIGER, OURS, PACKED, PLAIN, Runner, Setup, variant_of
from ops_math.cli.bench.rivals import AbsentError
from ops_math.cli.bench.spread import spread
from ops_math.cli.bench.workloads import DOCUMENTS, FIXED, TRIMMED
from ops_math.schedule.ceilings import synchronize
from ops_math.schedule.trial import in_words

SETUPS = {
    "llama-1b": Setup(8, 2048, torch.bfloat16, False),
    "bert-large": Setup(32, 512, torch.float32, True),
    "llama-150m": Setup(8, 1024, torch.bfloat16, False),
    "llama-tiny": Setup(4, 256, torch.float32, False),
}
# Some that are of use; any that `contenders.variant_of` reads will do.
VARIANTS = (PLAIN, COMPILE, LIGER, OURS, PACKED, GRAPHED, f"{PACKED}+{GRAPHED}", f"{PACKED}+{GRAPHED}+{ADAMW}", DOCUMENTS, TRIMMED)
WARM, MEASURED = 4, 12
FEW = 2  # warm steps on a CPU


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
    graphed = runner.graphed is not None  # a replay allocates nothing: what counts is its recording, behind the steps before it
    for _ in range(0 if graphed else 2):
        runner.step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM if graphed else 1):
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


def without_dropout(model: torch.nn.Module) -> None:
    """Let a model, adopted or not, drop nothing."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_p"):
            setattr(module, "dropout_p", 0.0)  # noqa: B010 (a type checker takes it for a tensor)


def gradients(name: str, variant: str, setup: Setup, device: str) -> dict[str, torch.Tensor]:
    """Gradients of one step without dropout, on the CPU in fp32."""
    runner = Runner(name, variant, setup.batch, setup.seq, torch.float32, setup.autocast, device)
    without_dropout(runner.model)
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
    before = features.products()
    torch.set_float32_matmul_precision("highest")
    exact = gradients(name, PLAIN, setup._replace(dtype=torch.float32, autocast=False), device)
    plain = gradients(name, PLAIN, setup, device)
    ours = gradients(name, OURS, setup, device)
    features.set_products(before)
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
    with_floor: bool = False,
) -> Stepped:
    """Measure whole steps of a model.

    Args:
        name: of a preset.
        variants: names that `contenders.variant_of` reads, `VARIANTS` among them; without plain there are no ratios.
        device: `cpu` or `cuda`.
        setup: by default that of `SETUPS`.
        sessions: how often models are built anew and timed.
        tell: is told in a few words what is being done.
        table: is given the table of each variant's kernels, on a GPU.
        with_floor: whether the least time of a step is worked out too, part by part (see `floor`), and every variant's share of it.

    Returns: a row for each variant that ran, and one of the floor. On a CPU rows have ratios to plain PyTorch and no times, and no memory
        or kernels.
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
            if not may_drop_out(variant, error):
                raise
            failed[variant] = str(error) if isinstance(error, AbsentError | checks.UnsupportedError) else in_words(error)
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
    if with_floor:
        tell(f"{name}: the floor")
        least = floor.of(name, setup, lambda: make(PACKED), clock_for(torch.device(device)), free)
        same_work = [row["variant"] for row in found if variant_of(row["variant"]).work == FIXED]
        middles = {variant: statistics.median(ms for one in times for ms in one[variant]) for variant in same_work}
        found.append(floor.row(name, setup, least, middles, gpu))
    return Stepped(found, times, failed)


def may_drop_out(variant: str, error: Exception) -> bool:
    """Whether a variant that fails is named and left out. The compiler may fail on a model or for want of a C++ compiler, a rival for any
    reason, and a graph may be refused; what of ours fails otherwise fails the command."""
    kind = variant_of(variant)
    return kind.base in (COMPILE, LIGER) or (kind.graph and isinstance(error, checks.UnsupportedError))


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
        "visits": len(taken), "sessions": len(sessions), "tokens": runner.tokens,
    }  # fmt: skip
    if PLAIN in sessions[0]:
        each = setup.batch * setup.seq / runner.tokens  # plain PyTorch's work is full sequences: times are compared a token
        ratio = spread([r * each for r in itertools.chain.from_iterable(ratios(sessions, runner.variant))])
        row |= {"ratio_to_plain": round(ratio.middle, 4), "noise": round(ratio.noise, 4)}
    if torch.device(runner.device).type == "cuda":
        count, busy = kernels(runner, table)
        middle = statistics.median(taken)
        row |= {"step_ms": middle, "step_ms_all": taken, "tokens_per_s": runner.tokens / middle * 1e3}
        row |= {"samples_per_s": setup.batch / middle * 1e3, "peak_gib": peak, "kernels": count, "busy": busy / middle}
    return row | {"first_loss": first, "last_loss": runner.step().item()}


def ratios(sessions: list[dict[str, list[float]]], variant: str) -> list[list[float]]:
    """Step times over plain PyTorch's, step by step, of each session; not by token."""
    return [[a / b for a, b in zip(one[variant], one[PLAIN], strict=True)] for one in sessions]


def describe(row: dict[str, Any]) -> str:
    """A result row in one line."""
    if row["benchmark"] == floor.NAME:
        return floor.describe(row)
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
