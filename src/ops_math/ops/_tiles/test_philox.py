"""The tile's words against `ops_math.rng`. Triton decides at import whether it interprets, so the kernel runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")

import triton.language as tl  # noqa: E402

from ops_math.ops._tiles.philox import keep_flat, keep_tile, philox_tile  # noqa: E402
from ops_math.rng import Rng, keep_mask, philox, threshold  # noqa: E402
from ops_math.testing import interpreter  # noqa: E402

SOURCE = Path(__file__).parents[3]
HUGE = 2**32 - 3


@triton.jit
def _words_kernel(state_ptr, words_ptr, keep_ptr, first_row, head, first_col, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    seed, offset = tl.load(state_ptr), tl.load(state_ptr + 1)
    rows = first_row + tl.load(state_ptr + 2) + tl.arange(0, BLOCK_M)
    keep = keep_tile(seed, offset, rows, head, first_col, threshold, BLOCK_N)
    tl.store(keep_ptr + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], keep.to(tl.int8))
    zero = tl.zeros([BLOCK_M, BLOCK_N // 8], tl.uint32)
    groups = zero + (first_col // 8 + tl.arange(0, BLOCK_N // 8)).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = philox_tile(
        seed, groups, zero + rows.to(tl.uint32)[:, None], zero + tl.cast(head, tl.uint32), zero + tl.cast(offset, tl.uint32)
    )
    place = words_ptr + tl.arange(0, BLOCK_M)[:, None] * (BLOCK_N // 2) + 4 * tl.arange(0, BLOCK_N // 8)[None, :]
    tl.store(place, w0.to(tl.int64))
    tl.store(place + 1, w1.to(tl.int64))
    tl.store(place + 2, w2.to(tl.int64))
    tl.store(place + 3, w3.to(tl.int64))


@triton.jit
def _flat_kernel(
    state_ptr, keep_ptr, row, col, num_cols, threshold, ENDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    seed, offset = tl.load(state_ptr), tl.load(state_ptr + 1)
    keep = keep_flat(seed, offset, row + tl.load(state_ptr + 2), col, num_cols, threshold, ENDS, BLOCK)
    tl.store(keep_ptr + tl.arange(0, BLOCK), keep.to(tl.int8))


def flat_differences() -> list[str]:
    """The widths and places at which a tile of flat values differs from the matrix's mask."""
    found, block, row = [], 128, 6
    for width in (8, 9, 13, 15, 16, 23, 127, 128, 129, 255, 753, 2**31 - 5, 2**31 + 3):
        before_end = (1, 2, 7, 8, 9, 15, 16, 17, 127)
        for rng in (Rng(7), Rng(-5, first_row=2**32 - 9).child(HUGE)):
            for col in sorted({c % width for c in (0, 1, 7, 8, width // 2, *(width - n for n in before_end))}):
                flat = col + torch.arange(block)
                rows, cols = row + flat // width, flat % width
                words = torch.stack(philox(rng.state, rows, 0, cols // 8), -1)
                halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(1)
                want = halves.gather(1, cols[:, None] % 8)[:, 0] >= threshold(0.5)
                for ends in (8, 32) if block // width < 6 else (32,):
                    keep = torch.full((block,), -1, dtype=torch.int8)
                    _flat_kernel[(1,)](rng.state, keep, row, col, width, threshold(0.5), ENDS=ends, BLOCK=block)
                    if not torch.equal(keep.bool(), want):
                        found.append(f"flat: width {width} from column {col}, {ends} ends")
    return found


def differences() -> list[str]:
    """The cases in which the tile differs from `ops_math.rng`; to be called in an interpreting process."""
    found = []
    for seed, stream, base, first_row, head, first_col, p in (
        (1, 0, 0, 0, 0, 0, 0.1),
        (-5, 7, 3, 128, 31, 64, 0.5),
        (2**62 + 12345, HUGE, 2**31, 2**31 - 4, HUGE, 2**31 - 64, 0.9),
        (2**32, 1, 0, 5, 2, 8, 1e-12),
    ):
        for block_m, block_n in ((1, 8), (8, 32), (2, 128)):
            case = f"seed {seed} tile {block_m} x {block_n}"
            rng = Rng(seed, first_row=base).child(stream)
            words = torch.full((block_m, block_n // 2), -1, dtype=torch.int64)
            keep = torch.full((block_m, block_n), -1, dtype=torch.int8)
            _words_kernel[(1,)](rng.state, words, keep, first_row, head, first_col, threshold(p), BLOCK_M=block_m, BLOCK_N=block_n)
            rows = first_row + torch.arange(block_m)
            groups = first_col // 8 + torch.arange(block_n // 8)
            want = torch.stack(torch.broadcast_tensors(*philox(rng.state, rows[:, None], head, groups)), -1).flatten(1)
            if not torch.equal(words, want):
                found.append(f"words: {case}")
            halves = torch.stack((want & 0xFFFF, want >> 16), -1).flatten(1)
            if not torch.equal(keep.bool(), halves >= threshold(p)):
                found.append(f"mask: {case}")
            if first_col == 0 and not torch.equal(keep.bool(), keep_mask(rng.state, rows, head, block_n, p)):
                found.append(f"keep_mask: {case}")
    return [*found, *flat_differences(), "compared"]


@pytest.mark.interpreter
def test_the_tile_draws_the_words_of_rng_bit_for_bit() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert (ran.stdout, ran.returncode) == ("compared\n", 0), ran.stdout + ran.stderr


if __name__ == "__main__":
    interpreter.repair()
    sys.stdout.write("\n".join(differences()) + "\n")
