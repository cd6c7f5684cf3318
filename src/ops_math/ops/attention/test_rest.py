"""Sequences that fill no whole number of tiles, where tiles come through descriptors, which read on into the next sequence.

In Triton's interpreter, in a process of its own, with tiles as Hopper has them but smaller.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ops_math as om
from ops_math import catalog
from ops_math.spec import Call, Case
from ops_math.testing import conformance, interpreter

pytest.importorskip("triton", reason="missing capability: Triton")

from ops_math.ops.attention import triton_gpu

SOURCE = Path(__file__).parents[3]
ENDS = (0, 37, 37, 38, 102)  # tiles of 32: one and a rest, nothing, a rest alone, two
CASES = {
    "documents": lambda d: Call(_three(d, 102, 4, 1), {"causal": True, "cu_seqlens_q": torch.tensor(ENDS)}),
    "documents in a window": lambda d: Call(_three(d, 102, 2, 2), {"causal": True, "window": (20, 0), "cu_seqlens_q": torch.tensor(ENDS)}),
    "documents, seen whole": lambda d: Call(_three(d, 102, 2, 1), {"cu_seqlens_q": torch.tensor(ENDS)}),
    "odd lengths": lambda d: Call(_batched(d, 70, 45), {"causal": "top_left"}),
    "odd lengths, bottom right": lambda d: Call(_batched(d, 33, 97), {"causal": True, "softcap": 20.0}),
    "odd lengths, a window": lambda d: Call(_batched(d, 75, 75), {"causal": True, "window": (9, 0)}),
    "odd lengths, seen whole": lambda d: Call(_batched(d, 31, 65), {}),
    "odd lengths, dropout": lambda d: Call(_batched(d, 45, 70), {"dropout_p": 0.3, "rng": d.rng(5)}),
}


def _three(d: Any, tokens: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    return d.normal(tokens, heads, 64), d.normal(tokens, kv_heads, 64), d.normal(tokens, kv_heads, 64)


def _batched(d: Any, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    return d.normal(2, queries, 2, 64), d.normal(2, keys, 1, 64), d.normal(2, keys, 1, 64)


def through_descriptors() -> None:
    """Let the interpreter's tiles come as Hopper's do."""
    triton_gpu.INTERPRETER = {name: t._replace(view=True, vectors=name == "dkdv") for name, t in triton_gpu.INTERPRETER.items()}
    triton_gpu.REST = 16


def outside_the_budget() -> Iterator[str]:
    """Results that are wrong."""
    asked = []
    features = triton_gpu._features

    def watched(*args: Any) -> Any:
        asked.append(features(*args))
        return asked[-1]

    triton_gpu._features = watched
    for name, make in CASES.items():
        asked.clear()
        yield from conformance.check_budget(catalog.operators()["attention"], Case(name, "attention", make), "fp32", "triton_gpu")
        if not asked or not all(f["VIEW"] and f["REST"] for f in asked):
            yield f"{name}: {asked}"


def _step(poison: float) -> tuple[torch.Tensor, ...]:
    """Output and gradients of the first of two documents, the second of which holds `poison`."""
    g = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(90, 2, 64, generator=g) for _ in range(4))
    for t in (q, k, v, dout):
        t[45:] = poison
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with om.force(attention="triton_gpu"):
        out = om.attention(*leaves, causal=True, cu_seqlens_q=torch.tensor([0, 45, 90]))
        grads = torch.autograd.grad(out, leaves, dout)
    return tuple(t[:45].detach() for t in (out, *grads))


def _leaks() -> bool:
    return not all(torch.equal(a, b) for a, b in zip(_step(0.5), _step(float("nan")), strict=True))


def taken_from_the_neighbour() -> Iterator[str]:
    """What a document takes from the next one; and the fault of a last tile like any other, where it is not caught."""
    if _leaks():
        yield "a document's NaN reaches its neighbour"
    honest = triton_gpu._features
    triton_gpu._features = lambda *args: {**honest(*args), "REST": 0}
    if not _leaks():
        yield "the fault lives"
    triton_gpu._features = honest


CHECKS = {f.__name__: f for f in (outside_the_budget, taken_from_the_neighbour)}


@pytest.mark.interpreter
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted_tiles_stay_within_their_sequence(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-W", "ignore", __file__, name], capture_output=True, text=True, env=environment, check=False)
    assert (ran.stdout, ran.returncode) == ("compared\n", 0), ran.stdout + ran.stderr[-3000:]


if __name__ == "__main__":
    interpreter.repair()
    through_descriptors()
    sys.stdout.write("\n".join([*CHECKS[sys.argv[1]](), "compared"]) + "\n")
