"""Dropout decisions drawn ahead: their layout in memory, how tiles read them, and that each way of getting them wrong is caught.

Triton decides at import whether it interprets, so the kernels run in a process of its own: `python test_drop.py NAME`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ops_math as om
from ops_math import catalog
from ops_math.ops.attention.problem import AttentionProblem, Rule, problem_of
from ops_math.ops.attention.reference import visible
from ops_math.rng import Rng, keep_mask
from ops_math.spec import Call, Case
from ops_math.testing import conformance, interpreter

triton = pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl  # noqa: E402

from ops_math.ops.attention import triton_gpu  # noqa: E402
from ops_math.ops.attention.triton_gpu_drop import (  # noqa: E402
    MASK_TILES,
    MOST_BYTES,
    Bits,
    MaskTile,
    bits_view,
    by_bits,
    draw_bits,
    keep_keys,
    keep_queries,
    load_words,
    num_bytes,
)

SOURCE = Path(__file__).parents[3]


def problem(batch: int, q_len: int, k_len: int, heads: int, p: float, left: int = -1, right: int = -1) -> AttentionProblem:
    q, k = torch.empty(batch, q_len, heads, 16), torch.empty(batch, k_len, heads, 16)
    return problem_of(q, k, None, None, None, Rule(0.25, True, left, right, 0.0, 0, 0, p))


def mask_of(p: AttentionProblem, state: torch.Tensor) -> torch.Tensor:
    """What the kernels must read: bool [B, H, Sq, Sk]."""
    rows = torch.arange(p.batch * p.q_len).view(p.batch, 1, p.q_len)
    return keep_mask(state, rows, torch.arange(p.heads).view(1, p.heads, 1), p.k_len, p.dropout_p)


def packed(mask: torch.Tensor) -> torch.Tensor:
    """bool [B, H, Sq, Sk] as words [B H, words, rows], written bit by bit from the layout's description."""
    batch, heads, q_len, k_len = mask.shape
    words = torch.zeros(batch * heads, -(-k_len // 32), -(-q_len // 4) * 4, dtype=torch.int64)
    for key in range(k_len):
        j, h, q, e = key % 32 // 8, key // 4 % 2, key // 2 % 2, key % 2
        words[:, key // 32, :q_len] |= mask[..., key].flatten(0, 1).long() << (2 * j + h + 8 * q + 16 * e)
    return ((words + 2**31) % 2**32 - 2**31).int()


@triton.jit
def _read_kernel(bits_ptr, keys_ptr, queries_ptr, sequence, num_words, num_rows, key, query, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    words = load_words(None, bits_ptr, sequence, num_words, num_rows, key, query, BLOCK_N, BLOCK_M)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    tl.store(keys_ptr + rows[:, None] * BLOCK_N + cols[None, :], keep_keys(words, BLOCK_N))
    tl.store(queries_ptr + cols[:, None] * BLOCK_M + rows[None, :], keep_queries(words, BLOCK_N))


def drawn_differently() -> Iterator[str]:
    """Cases in which a drawn bit that some query sees is not that of the mask."""
    for i, p in enumerate(
        (
            problem(2, 40, 50, 3, 0.1),
            problem(1, 1, 1, 1, 0.5),
            problem(1, 130, 257, 1, 0.9),
            problem(2, 200, 200, 1, 0.3, right=0),
            problem(1, 150, 290, 1, 0.3, left=20, right=9),
            problem(1, 290, 150, 2, 0.7, right=0),
            problem(1, 33, 64, 1, 1e-9),
            problem(1, 33, 64, 1, 1 - 1e-9),
        )
    ):
        rng = Rng(5, first_row=2**32 - 20).child(7)
        seen = visible(p.q_len, p.k_len, False, (p.left, p.right), rng.state.device).expand(p.batch, p.heads, -1, -1)
        mask = mask_of(p, rng.state)
        for tile in (MASK_TILES[i % len(MASK_TILES)], MaskTile(2, 32, 1)):
            bits = draw_bits(p, rng.state, rng.state, tile)
            assert bits.words is not None
            care = packed(seen)
            if not torch.equal(bits.words & care, packed(mask) & care):
                yield f"{p} {tile}"


def read_differently() -> Iterator[str]:
    """Tiles in which the two ways of reading differ from the mask."""
    p, state = problem(2, 70, 133, 2, 0.5), Rng(3).state
    mask = mask_of(p, state)
    words = packed(mask)
    for block_n in (16, 32, 64, 128):
        for block_m in (16, 64):
            for sequence, key, query in ((0, 0, 0), (3, block_n, 16), (1, 128, 64)):
                by_keys, by_queries = torch.empty(block_m, block_n), torch.empty(block_n, block_m)
                sizes = (sequence, words.shape[1], words.shape[2], key, query)
                _read_kernel[(1,)](words, by_keys, by_queries, *sizes, BLOCK_N=block_n, BLOCK_M=block_m)
                want = mask.flatten(0, 1)[sequence, query : query + block_m, key : key + block_n]
                for got in (by_keys, by_queries.T):
                    if not torch.equal(got[: want.shape[0], : want.shape[1]], want.float()):
                        yield f"{block_m} x {block_n} at {query}, {key}"


def _with_mask(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Bits]:
    """`draw_bits` with a changed mask, given also how many times it was called before."""
    calls = [0]

    def draw(p: AttentionProblem, like: torch.Tensor, state: torch.Tensor) -> Bits:
        honest = draw_bits(p, like, state)
        if honest.words is None:
            return honest
        calls[0] += 1
        return honest._replace(words=packed(change(mask_of(p, state), calls[0] - 1)))

    return draw


def _scaled(by: float) -> Callable[..., Bits]:
    def draw(p: AttentionProblem, like: torch.Tensor, state: torch.Tensor) -> Bits:
        honest = draw_bits(p, like, state)
        return honest._replace(raised=honest.raised * by)

    return draw


def _partial_word(mask: torch.Tensor, call: int) -> torch.Tensor:
    mask = mask.clone()
    mask[..., mask.shape[-1] // 32 * 32 :] = True
    return mask


def _transposed(mask: torch.Tensor, call: int) -> torch.Tensor:
    side = min(mask.shape[-2:])
    mask = mask.clone()
    mask[..., :side, :side] = mask[..., :side, :side].mT.clone()
    return mask


FAULTS: dict[str, Callable[..., Bits]] = {
    "off by one column": _with_mask(lambda mask, call: mask.roll(1, -1)),
    "off by one row": _with_mask(lambda mask, call: mask.roll(1, -2)),
    "transposed": _with_mask(_transposed),
    "the backward has another mask": _with_mask(lambda mask, call: mask if call % 2 == 0 else mask.flip(-1)),
    "heads exchanged": _with_mask(lambda mask, call: mask.flip(1)),
    "the last word is not read": _with_mask(_partial_word),
    "nothing is dropped": _with_mask(lambda mask, call: torch.ones_like(mask)),
    "what is kept grows by too little": _scaled(0.99),
}


def faults_that_live() -> Iterator[str]:
    """Planted faults that the budget does not catch, and honest bits that it finds guilty, in two heads of two tiles each way."""
    operator = catalog.operators()["attention"]
    lengths = (36, 50, 50)
    make = lambda d: Call(tuple(d.normal(1, n, 2, 8) for n in lengths), {"dropout_p": 0.2, "rng": d.rng(3)})  # noqa: E731
    case = Case("dropout, two heads", "attention", make)
    for name, fault in {"": draw_bits, **FAULTS}.items():
        triton_gpu.draw_bits = fault
        found = conformance.check_budget(operator, case, "fp32", "triton_gpu")
        if bool(found) != bool(name):
            yield f"{name or 'honest'}: {found[:1]}"
    triton_gpu.draw_bits = draw_bits


def different_through_descriptors() -> Iterator[str]:
    """Results that differ where every tile, the words among them, comes through a descriptor."""
    made = []

    def view(*args: Any) -> Any:
        made.append(bits_view(*args))
        return made[-1]

    triton_gpu.bits_view = view
    triton_gpu.INTERPRETER = {name: t._replace(view=True, vectors=name == "dkdv") for name, t in triton_gpu.INTERPRETER.items()}
    case = Case("dropout through descriptors", "attention", lambda d: Call(_tiled(d), {"causal": True, "dropout_p": 0.3, "rng": d.rng(5)}))
    yield from conformance.check_budget(catalog.operators()["attention"], case, "fp32", "triton_gpu")
    if not made or None in made:
        yield f"descriptors {made}"


def _tiled(d: Any) -> tuple[torch.Tensor, ...]:
    return d.normal(2, 64, 2, 64), d.normal(2, 64, 1, 64), d.normal(2, 64, 1, 64)


CHECKS = {f.__name__: f for f in (drawn_differently, read_differently, faults_that_live, different_through_descriptors)}


@pytest.mark.interpreter
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHECKS)
def test_interpreted_bits_are_those_of_the_mask_and_faults_in_them_are_caught(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-W", "ignore", __file__, name], capture_output=True, text=True, env=environment, check=False)
    assert (ran.stdout, ran.returncode) == ("compared\n", 0), ran.stdout + ran.stderr[-3000:]


def test_a_call_that_would_need_too_many_bits_draws_inside_its_loops() -> None:
    small, large = problem(1, 4096, 4096, 16, 0.1), problem(1, 65536, 65536, 16, 0.1)
    assert (by_bits(small), by_bits(large)) == (True, False)
    assert num_bytes(small) == 16 * 4096 * 4096 // 8
    assert num_bytes(large) > MOST_BYTES
    assert not by_bits(problem(1, 64, 64, 1, 0.0))
    assert not by_bits(small._replace(key_padding=True))
    assert not by_bits(small._replace(documents=3))


def test_the_bits_of_a_call_live_no_longer_than_the_call(monkeypatch: Any) -> None:
    assert "bits" not in str(torch.ops.ops_math.attention_fwd.default._schema)  # nothing is handed from the forward to the backward
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    with om.force(attention="eager"):
        out = om.attention(q, k, v, dropout_p=0.5, rng=om.Rng(1))
    saved = [t for t in out.grad_fn.saved_tensors if t is not None]
    assert sum(t.numel() for t in saved) <= 4 * q.numel() + q.shape[1] * q.shape[2] + 3  # q, k, v, out, lse and the state


if __name__ == "__main__":
    interpreter.repair()
    sys.stdout.write("\n".join([*CHECKS[sys.argv[1]](), "compared"]) + "\n")
