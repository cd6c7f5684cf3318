"""The numbers of tiles, groups and tails. Triton decides at import whether it interprets, so the kernel runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="missing capability: Triton")

import triton.language as tl  # noqa: E402

from ops_math.ops._tiles.walk import multiple_of, num_tiles, tail, tail_of_pairs, whole_groups  # noqa: E402

SOURCE = Path(__file__).parents[3]


@triton.jit
def _kernel(out_ptr, n, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.cast(num_tiles(n, BLOCK), tl.int64))
    tl.store(out_ptr + 1, tl.cast(multiple_of(n, ALIGN), tl.int64))
    tl.store(out_ptr + 2, tl.cast(whole_groups(n), tl.int64))
    tl.store(out_ptr + 3 + tl.arange(0, 16), tl.cast(tail(n), tl.int64))
    tl.store(out_ptr + 19 + tl.arange(0, 32), tail_of_pairs(n))


def differences() -> list[str]:
    """The sizes at which a number is wrong; to be called in an interpreting process."""
    found = []
    # None between 2^31 and 2^32: there the interpreter holds an int64 argument as uint32 and gives it back with a sign.
    for n in (1, 15, 16, 17, 1000, 2**20 + 4, 2**31 - 1024, 2**31 - 8, 2**31 - 1, 2**32, 2**32 + 5, 2**33 + 24):
        for align in (a for a in (1, 2, 4, 8, 16) if n % a == 0):
            out, whole = torch.full((51,), -1, dtype=torch.int64), n - n % 16
            _kernel[(1,)](out, n, ALIGN=align, BLOCK=1024)
            want = [-(-n // 1024), n, whole, *range(whole, whole + 16), *range(2 * whole, 2 * whole + 32)]
            found += [f"{n} by {align}: {out.tolist()}"] if out.tolist() != want else []
    return [*found, "compared"]


@pytest.mark.interpreter
def test_sizes_up_to_and_past_2_to_the_31_make_the_right_numbers_of_tiles_and_groups() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE)}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert (ran.stdout, ran.returncode) == ("compared\n", 0), ran.stdout + ran.stderr


if __name__ == "__main__":
    sys.stdout.write("\n".join(differences()) + "\n")
