"""Host time [us] of the GPU's way through the library, on a machine without a GPU, layer by layer.

    PYTHONPATH=src:. python tools/host_path.py [calls] [bert] [model] [forward] [backward] [driver]

`forward` and `backward` are profiles of a model. With `driver`, Triton's own launcher runs too, as far as the driver's call.

Tensors are small and on the CPU. Triton compiles for an H200 that is not there and its launcher computes nothing, so that what is left is
what the host does for a call: public function, autograd, dispatcher, choice, allocations, the key of the launch. Figures are not a GPU's:
an allocation costs less here and PyTorch's own products compute. What they are for is to be compared before and after a change.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stub_driver
import torch
import torch.nn.functional as F
from triton.runtime.driver import driver

import ops_math as om
from ops_math import backends, catalog, features
from ops_math.backends import launch as launching
from ops_math.backends import null
from ops_nn.adopt import adopt
from ops_nn.models import llama
from ops_nn.models.bert import BertConfig, BertForMaskedLM

BF16 = torch.bfloat16
CALLS = 3000
CLOCK = sorted(-time.perf_counter_ns() + time.perf_counter_ns() for _ in range(1000))[100]


@contextmanager
def pretended() -> Iterator[None]:
    """CPU tensors go the way of a GPU's: Triton's kernels are chosen, compiled for an H200 and started by their own launchers."""
    before = backends.device_of, features.raw_stream
    backends.device_of = lambda device: backends.NAMED["h200"]  # type: ignore[assignment]
    features.raw_stream = lambda index: 0
    launching.DIRECT.add("cpu")
    for operator in catalog.operators().values():
        operator.forget()
    try:
        with null.pretend(backends.NAMED["h200"]) as kernels, om.force(**dict.fromkeys(catalog.operators(), "triton_gpu")):
            try:
                yield
            finally:  # a kernel's destructor asks the driver that was active when it was compiled
                launching.forget()
                kernels.clear()
    finally:
        launching.DIRECT.discard("cpu")
        backends.device_of, features.raw_stream = before
        for operator in catalog.operators().values():
            operator.forget()


def cost(call: Callable[[], Any], calls: int = CALLS) -> float:
    """A call's time [us], the clock's own taken off: the tenth percentile of single calls, since others share the machine and only ever
    add."""
    for _ in range(20):
        call()
    clock = time.perf_counter_ns
    times = []
    for _ in range(calls):
        start = clock()
        call()
        times.append(clock() - start)
    return (sorted(times)[calls // 10] - CLOCK) / 1e3


def show(name: str, us: float, note: str = "") -> None:
    """One line."""
    print(f"{name:44s} {us:8.2f} us  {note}", flush=True)


class _Seen:
    """A function that keeps the arguments it is called with."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


def layers(name: str, operator: str, call: Callable[[], Any], which: str = "fwd") -> None:
    """A call, what is above the entrance of its operator, and the ways below it, each measured alone with all that it does."""
    op = catalog.operators()[operator]
    phase, implementation = op.phases[which], op.implementations()[0]
    module = implementation.module
    problems, launchers, starts = _Seen(phase.problem_of), _Seen(implementation.launcher(which)), _Seen(module.launch)
    phase.problem_of, implementation.replaced[which], module.launch = problems, launchers, starts  # type: ignore[attr-defined]
    op.forget()
    try:
        call()
    finally:
        phase.problem_of, module.launch = problems.function, starts.function  # type: ignore[attr-defined]
        del implementation.replaced[which]
        op.forget()
    args, launched = problems.calls[0][0], launchers.calls[0][0]
    enter = getattr(op, which)
    total, entered = cost(call), cost(lambda: enter(*args))
    ways = {"above": total - entered, "short way": entered, "by the dictionary": cost(lambda: phase.run(*phase.signature(args), args))}
    ways |= {"launcher": cost(lambda: launchers.function(*launched)), "by the dispatcher": cost(lambda: phase.overload(*args))}
    kernels = sum(cost(lambda a=a, k=k: launching.launch(*a, **k)) for a, k in starts.calls)
    show(name, total, ", ".join(f"{k} {v:.1f}" for k, v in ways.items()) + f"; {len(starts.calls)} launches {kernels:.1f}")


def both(name: str, call: Callable[[], torch.Tensor]) -> None:
    """Forward with gradients, and forward and backward."""
    y = call()
    dy = torch.ones_like(y)
    forward, whole = cost(call), cost(lambda: call().backward(dy))
    show(name + ", with grad", forward, f"forward and backward {whole:.1f}")


def tensors() -> dict[str, torch.Tensor]:
    """Small ones, of a width that a norm's kernel takes in one tile."""
    made = {"x": torch.randn(2, 8, 256, dtype=BF16), "w": torch.randn(256, dtype=BF16), "b": torch.randn(256, dtype=BF16)}
    made["q"] = torch.randn(2, 64, 4, 64, dtype=BF16)
    made["k"] = torch.randn(2, 64, 2, 64, dtype=BF16)
    made["v"] = torch.randn(2, 64, 2, 64, dtype=BF16)
    made["r"] = torch.randn(2, 8, 256, dtype=BF16)
    return made


def calls() -> None:
    """Single operators."""
    t = tensors()
    g = {name: value.clone().requires_grad_() for name, value in t.items()}
    x, r, w, b, q, k, v = (t[name] for name in ("x", "r", "w", "b", "q", "k", "v"))
    xb, cos, sin = torch.randn(256, dtype=BF16), torch.randn(64, 64, dtype=BF16), torch.randn(64, 64, dtype=BF16)
    rng = om.Rng(3)
    layers("rms_norm", "rms_norm", lambda: om.rms_norm(x, w))
    layers("add_rms_norm", "rms_norm", lambda: om.add_rms_norm(x, r, w))
    layers("add_layer_norm, dropout", "layer_norm", lambda: om.add_layer_norm(x, r, w, b, dropout_p=0.1, rng=rng, x_bias=xb))
    layers("gelu, bias", "gelu", lambda: om.gelu(x, b))
    layers("swiglu", "glu", lambda: om.swiglu(x, r))
    layers("rope", "rope", lambda: om.rope(q, k, cos, sin))
    layers("attention", "attention", lambda: om.attention(q, k, v, causal=True))
    both("rms_norm", lambda: om.rms_norm(g["x"], g["w"]))
    both("add_rms_norm", lambda: om.add_rms_norm(g["x"], r, g["w"])[0])
    both("add_layer_norm, dropout", lambda: om.add_layer_norm(g["x"], r, g["w"], g["b"], dropout_p=0.1, rng=rng, x_bias=xb)[0])
    both("gelu, bias", lambda: om.gelu(g["x"], g["b"]))
    both("swiglu", lambda: om.swiglu(g["x"], g["r"]))
    both("rope", lambda: om.rope(g["q"], k, cos, sin)[0])
    both("attention", lambda: om.attention(g["q"], g["k"], g["v"], causal=True))
    both("F.rms_norm", lambda: F.rms_norm(g["x"], (256,), g["w"]))


def _llama() -> tuple[Any, torch.Tensor]:
    config = llama.LlamaConfig(64, 64, 64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16)
    return llama.LlamaModel(config), torch.randint(0, 64, (1, 8))


def _nodes(root: Any) -> int:
    seen, left = set(), [root]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [n for n, _ in node.next_functions]
    return len(seen)


def model(profile: str = "") -> None:
    """Four layers of a Llama without its head, 8 tokens: plain, and adopted. `profile` is `forward` or `backward`."""
    net, ids = _llama()
    dy = torch.ones_like(net(ids))

    def step() -> None:
        net(ids).backward(dy)
        for p in net.parameters():
            p.grad = None

    for variant in ("plain", "ops"):
        adoption = adopt(net) if variant == "ops" else None
        forward, whole = cost(lambda: net(ids), 200), cost(step, 200)
        show(f"llama, 4 layers, {variant}: forward", forward, f"with backward {whole:.1f}, {_nodes(net(ids).grad_fn)} nodes")
        if profile and adoption is not None:
            measured = cProfile.Profile()
            for _ in range(100):
                if profile == "forward":
                    measured.enable()
                y = net(ids)
                measured.disable()
                if profile == "backward":
                    measured.enable()
                y.backward(dy)
                measured.disable()
            pstats.Stats(measured).sort_stats("tottime").print_stats(45)


def bert() -> None:
    """One BERT layer with dropout, 8 tokens: the module, and its two blocks, whose attention draws by key here."""
    layer = BertForMaskedLM(BertConfig(64, 64, 128, num_layers=1, num_heads=4)).train().bert.encoder.layer[0]
    x, rng = torch.randn(1, 8, 64, requires_grad=True), om.Rng(1)

    def blocks() -> torch.Tensor:
        y = om.residual_attention(x, None, layer.attention, norm_first=False, rng=rng)
        return om.residual_mlp(y, None, layer, norm_first=False, rng=rng)

    both("BERT layer, plain", lambda: layer(x))
    both("BERT layer, blocks", blocks)


def main() -> None:
    """Run what was asked for."""
    asked = sys.argv[1:]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, pretended():
        if "driver" in asked:
            stub_driver.install(Path(folder))
            stub_driver.launcher(driver.active)
        asked = [part for part in asked if part != "driver"] or ["calls", "bert", "model"]
        if "calls" in asked:
            calls()
        if "bert" in asked:
            bert()
        if "model" in asked:
            model()
        for part in ("forward", "backward"):
            if part in asked:
                model(part)


if __name__ == "__main__":
    main()
