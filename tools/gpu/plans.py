"""Plans on a GPU: whether a planned call gives the bits of its launcher, and what calls and a small model's step cost the host.

    PYTHONPATH=src:. python tools/gpu/plans.py [bits] [calls] [step]     (all three where none is named)

bits: every case of every operator, forward and backward: the first calls go by the launcher, later ones by its plan; all must agree, and
what has no plan is listed with the reason. calls: host time [us] of single calls by plan, by launcher and by PyTorch's dispatcher, with
PyTorch's own beside them. step: llama-tiny, 4 x 256, plain and adopted, interleaved [ms].
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import ops_math as om
from benchmarks.steps import SETUPS, Runner
from ops_math import catalog, dispatch, features
from ops_math.cli.bench.steps import interleaved
from ops_math.schedule.collect import laid_out_like
from ops_math.testing.crosscompile import calls_of

GPU = torch.device("cuda")
BF16 = torch.bfloat16


def on_gpu(value: Any) -> Any:
    """A tensor with the same values and strides on the GPU; other values as they are."""
    return laid_out_like(value, value, GPU) if isinstance(value, torch.Tensor) else value


def same(a: Any, b: Any) -> bool:
    """Bit for bit, NaN for NaN."""
    one, two = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(one, two, strict=True))


def bits() -> None:
    """Compare, and list what has no plan."""
    wrong, planned, shortened, unplanned = [], 0, 0, Counter()
    for name, operator in catalog.operators().items():
        for case in operator.file("problem").CASES:
            for dtype in ("bf16", "fp32"):
                for call in calls_of(operator, case, dtype) if dtype in case.dtypes else []:
                    phase = operator.phases[call.phase]
                    args = tuple(on_gpu(a) for a in call.args)
                    phase.forget()
                    results = [getattr(operator, call.phase)(*args) for _ in range(dispatch.RECORD_AT + 4)]  # by launcher, plan, short way
                    found = [k for k in phase.memo.values() if isinstance(k, dispatch._Known)]
                    if not all(same(results[0], r) for r in results[1:]):
                        wrong.append(f"{name} {case.name} {dtype} {call.phase}")
                    shortened += bool(phase.short)
                    planned += sum(k.play is not None for k in found)
                    unplanned.update(f"{name}_{call.phase}: {k.why or 'not asked'}" for k in found if k.play is None)
    good = f"bits: {planned} planned calls, {shortened} of them with a short way, agree with their launchers"
    print(good if not wrong else f"bits: WRONG: {wrong}")
    for reason, count in sorted(unplanned.items()):
        print(f"  no plan, {count} calls: {reason}")


def cost(call: Callable[[], Any], calls: int = 2000) -> float:
    """Host time [us]: the tenth percentile of single calls."""
    times = []
    for n in range(calls + 50):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
        if n % 100 == 99:
            torch.cuda.synchronize()
    return sorted(times[50:])[calls // 10] / 1e3


def ways(name: str, call: Callable[[], Any], own: Callable[[], Any] | None = None) -> None:
    """One line: by plan, by launcher, through the dispatcher."""
    plan = cost(call)
    record, quiet = dispatch.planning.record, features.quiet
    dispatch.planning.record = lambda run, tensors: (run(), None, "switched off")
    for operator in catalog.operators().values():
        operator.forget()
    launcher = cost(call)
    dispatch.planning.record = record
    for operator in catalog.operators().values():
        operator.forget()
    with torch.overrides.BaseTorchFunctionMode():  # a watcher that does nothing, and sends calls through the dispatcher
        watched = cost(call)
    assert features.quiet is quiet
    beside = "" if own is None else f", PyTorch's own {cost(own):.1f}"
    print(f"{name:34s} {plan:7.1f} us by plan, {launcher:.1f} by launcher, {watched:.1f} watched{beside}", flush=True)


def calls() -> None:
    """Small tensors, so that the device never holds the host back."""
    x, r = (torch.randn(2, 64, 256, device=GPU, dtype=BF16) for _ in range(2))
    w, b, c = (torch.randn(256, device=GPU, dtype=BF16) for _ in range(3))
    q = torch.randn(2, 128, 4, 64, device=GPU, dtype=BF16)
    k, v = (torch.randn(2, 128, 2, 64, device=GPU, dtype=BF16) for _ in range(2))
    cos, sin = (torch.randn(128, 64, device=GPU, dtype=BF16) for _ in range(2))
    xg, wg, bg = (t.clone().requires_grad_() for t in (x, w, b))
    qg, kg, vg = (t.clone().requires_grad_() for t in (q, k, v))
    rng, dy = om.Rng(3, GPU), torch.ones_like(x)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    ways("rms_norm", lambda: om.rms_norm(x, w), lambda: F.rms_norm(x, (256,), w))
    ways("rms_norm, grad", lambda: om.rms_norm(xg, wg), lambda: F.rms_norm(xg, (256,), wg))
    ways(
        "rms_norm, forward and backward",
        lambda: torch.autograd.grad(om.rms_norm(xg, wg), [xg, wg], dy),
        lambda: torch.autograd.grad(F.rms_norm(xg, (256,), wg), [xg, wg], dy),
    )
    ways("add_layer_norm, dropout, grad", lambda: om.add_layer_norm(xg, r, wg, bg, dropout_p=0.1, rng=rng, x_bias=c))
    ways("gelu, bias", lambda: om.gelu(x, b), lambda: F.gelu(x + b))
    ways("swiglu", lambda: om.swiglu(x, r), lambda: F.silu(x) * r)
    ways("rope", lambda: om.rope(q, k, cos, sin))
    with om.force(attention="triton_gpu"):
        ways(
            "attention, ours",
            lambda: om.attention(q, k, v, causal=True),
            lambda: F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            ),
        )
        ways(
            "attention, ours, both ways",
            lambda: torch.autograd.grad(om.attention(qg, kg, vg, causal=True), [qg, kg, vg], q),
        )


def step() -> None:
    """Medians of interleaved steps, and the time in which the host has queued a forward."""
    batch, seq, dtype, autocast = SETUPS["llama-tiny"]
    runners = [Runner("llama-tiny", variant, batch, seq, dtype, autocast, "cuda") for variant in ("plain", "ops")]
    for variant, times in interleaved(runners, 6, 20).items():
        print(f"llama-tiny {variant:6s} {sorted(times)[len(times) // 2]:7.2f} ms a step")
    for runner in runners:
        queued = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = runner.loss()
            middle = time.perf_counter()
            loss.backward()
            queued.append((middle - start, time.perf_counter() - middle))
        forward, backward = (sorted(t[i] for t in queued)[4] * 1e3 for i in (0, 1))
        print(f"llama-tiny {runner.variant:6s} queued: forward {forward:.2f} ms, backward {backward:.2f} ms")


def main() -> None:
    """Run what was asked for."""
    asked = sys.argv[1:] or ["bits", "calls", "step"]
    for name, run in (("bits", bits), ("calls", calls), ("step", step)):
        if name in asked:
            run()


if __name__ == "__main__":
    main()
