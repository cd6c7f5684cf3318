"""Attention over packed documents on one GPU: how fast is each configuration, and the way through pointers, beside equal lengths.

Usage: PYTHONPATH=src:. python3 tools/gpu/attention_documents.py

16,384 tokens in documents of 128 to 2,048 (each octave as likely), 32 heads on 8, causal, bf16, widths 64 and 128. Times are kernel times
from the profiler; rates count the products of what is visible, two forward and five backward, so that they compare with equal lengths of
2,048, whose first configuration stands at the end. PyTorch's own kernel for documents is there where this PyTorch has one.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from tools.gpu.attention_sweep import attempt, kernel_ms, say

from ops_math import backends
from ops_math.cli.bench.workloads import lengths
from ops_math.ops.attention import triton_gpu
from ops_math.ops.attention.problem import AttentionProblem, Rule, problem_of

TOKENS, LONGEST, HEADS, KV_HEADS = 16384, 2048, 32, 8
WIDTHS, KERNELS, WORKERS = (64, 128), ("fwd", "dkdv", "dq"), 12
SHARE = {"fwd": 2.0, "dkdv": 3.0, "dq": 2.0}  # products that count


class Posed:
    """A problem with its tensors: documents, or equal lengths."""

    def __init__(self, width: int, equal: bool) -> None:
        sizes = [LONGEST] * (TOKENS // LONGEST) if equal else lengths(LONGEST, random.Random(0), total=TOKENS)
        self.pairs = sum(n * (n + 1) // 2 for n in sizes)
        g = torch.Generator("cuda").manual_seed(0)
        shape = (TOKENS // LONGEST, LONGEST) if equal else (TOKENS,)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        self.tensors = [torch.randn(*shape, h, width, device="cuda", dtype=torch.bfloat16, generator=g) for h in heads]
        self.ends = None if equal else torch.tensor([0, *accumulate(sizes)], device="cuda", dtype=torch.int32)
        q, k = self.tensors[:2]
        rule = Rule(width**-0.5, True, -1, 0, 0.0, 0 if equal else LONGEST, 0 if equal else LONGEST, 0.0)
        self.problem: AttentionProblem = problem_of(q, k, None, None, self.ends, rule)

    def call(self, kernel: str, tile: Any) -> Callable[[], Any]:
        """A launch of one kernel in one configuration."""
        q, k, v, dout = self.tensors
        lookups = (None, None, self.ends, self.ends, None)
        first = triton_gpu.configs(self.problem, backends.device_of(q.device), "fwd")[0]
        if kernel == "fwd":
            return lambda: triton_gpu.launch_fwd(self.problem, tile, q, k, v, *lookups)
        only = self.problem._replace(need_dq=kernel == "dq", need_dk=kernel == "dkdv", need_dv=kernel == "dkdv")
        out, lse = triton_gpu.launch_fwd(self.problem, first, q, k, v, *lookups)
        return lambda: triton_gpu.launch_bwd(only, triton_gpu.Backward(tile, tile), dout, q, k, v, out, lse, *lookups)

    def tiles(self, kernel: str) -> list[Any]:
        """Through descriptors, then the first through pointers."""
        device = backends.device_of(self.tensors[0].device)
        own = list(triton_gpu._tiles(self.problem, device, kernel))
        return own if self.ends is None else [*own, triton_gpu.POINTERS[kernel, max(64, self.tensors[0].shape[-1])][0]]

    def rate(self, kernel: str, ms: float) -> float:
        """TFLOP/s of the products that count."""
        return 2.0 * SHARE[kernel] * self.pairs * HEADS * self.tensors[0].shape[-1] / ms / 1e9


def listed() -> list[tuple[int, bool, str, int]]:
    """(width, equal lengths, kernel, tile) of everything."""
    found = []
    for width in WIDTHS:
        for equal in (False, True):
            posed = Posed(width, equal)
            found += [(width, equal, kernel, i) for kernel in KERNELS for i in range(1 if equal else len(posed.tiles(kernel)))]
    return found


def warm(part: int) -> None:
    """One process's share of the compilation; Triton keeps the results on disk."""
    for number, (width, equal, kernel, i) in enumerate(listed()):
        if number % WORKERS == part:
            posed = Posed(width, equal)
            attempt(f"{width} {kernel} {i}", posed.call(kernel, posed.tiles(kernel)[i]))
    torch.cuda.synchronize()


def main() -> None:
    """Compile in several processes, then time one after the other."""
    if len(sys.argv) > 1:
        return warm(int(sys.argv[1]))
    say(torch.__version__, torch.cuda.get_device_name())
    workers = [subprocess.Popen([sys.executable, __file__, str(i)], stdout=subprocess.DEVNULL) for i in range(WORKERS)]
    for worker in workers:
        worker.wait()
    for width, equal, kernel, i in listed():
        posed = Posed(width, equal)
        tile = posed.tiles(kernel)[i]
        label = f"D{width} {'equal lengths' if equal else 'documents'} {kernel:5s} {tuple(tile)!s}"
        times = attempt(label, partial(kernel_ms, posed.call(kernel, tile), 5))
        if times:
            own = next(ms for name, ms in times.items() if kernel in name)
            say(f"{label:75s} {own:8.4f} ms {posed.rate(kernel, own):7.1f} TFLOP/s")
    return None


if __name__ == "__main__":
    main()
