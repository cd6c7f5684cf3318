"""Rows that are cut at the 16-byte grid: the cut on the host, the kernels in the interpreter, faults planted in both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="missing capability: Triton")

from ops_math.layout import alignment
from ops_math.ops._tiles import ends

ROOT = Path(__file__).parents[2]
# Faults that wide rows do not show: their body is of whole blocks here, they have one row a tile, begin where `boundary` says, and are
# called with what starts together.
ELSEWHERE = [
    "a body that takes the neighbour's values",
    "rows of several leads in one tile",
    "a body from the second boundary on",
    "tensors that start elsewhere",
]


def covered(num_cols: int, head: int, body: int, width: int) -> bool:
    """Whether body and ends hold a row that has `head` values before the first boundary."""
    whole = min((num_cols - head) // 8 * 8, body)
    return num_cols - whole <= width and whole <= body


def test_body_and_ends_hold_every_row_whatever_its_head_and_a_narrower_cut_would_not():
    for num_cols in range(ends.LEAST, 16385):
        body, width = ends.widths(num_cols)
        assert body & (body - 1) == 0
        assert width & (width - 1) == 0
        assert all(covered(num_cols, head, body, width) for head in range(8)), num_cols
    assert not all(covered(2163, head, 2048, 64) for head in range(8))
    assert not all(covered(4001, head, 2048, 16) for head in range(8))


def test_a_width_little_above_a_power_of_two_has_a_body_without_idle_lanes():
    assert [ends.widths(n) for n in (1164, 2163, 4287)] == [(1024, 256), (2048, 128), (4096, 256)]
    assert [ends.widths(n) for n in (753, 3446, 15993)] == [(1024, 16), (4096, 16), (16384, 16)]


def test_tensors_have_the_same_cut_where_rows_and_first_values_start_together():
    wide = torch.zeros(6, 96)
    assert ends.same_cut(77, wide[:, :77].clone(), None, torch.zeros(6, 77 + 16)[:, :77])
    assert not ends.same_cut(77, wide[:, :77])
    assert not ends.same_cut(77, torch.zeros(6, 77 + 8)[:, 1:78])
    assert not ends.same_cut(77, torch.zeros(77).expand(6, 77))
    assert not ends.same_cut(ends.LEAST - 1, torch.zeros(6, ends.LEAST - 1))


def test_tiles_reach_every_row_once():
    for rows in (1, 7, 8, 9, 37, 64, 65):
        for block_m in (1, 2, 16):
            tiles = range(ends.num_tiles(rows, block_m))
            met = [t // 8 * 8 * block_m + t % 8 + 8 * i for t in tiles for i in range(block_m)]
            assert sorted(r for r in met if r < rows) == list(range(rows))


def test_alignment_is_the_greatest_common_power_of_two_up_to_sixteen():
    assert [alignment(n) for n in (0, 1, 2163, 3446, 1164, 6616, 4096)] == [16, 1, 1, 2, 4, 8, 16]
    assert alignment(4096, 6, 0) == 2


@pytest.mark.interpreter
@pytest.mark.timeout(1200)
def test_the_kernels_are_right_write_nothing_beside_their_rows_and_faults_are_caught():
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.conformance.ends"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["written"] == []
    assert found["on the way"] == []
    assert found["halves"] == []
    assert len(found["halves of one word"]) == 6
    assert len(found["caught"]) == 8
    assert all(caught["numbers"] or caught["wide"] for caught in found["caught"].values()), found["caught"]
    assert [title for title, caught in found["caught"].items() if not caught["wide"]] == ELSEWHERE
    assert found["caught"]["a body that takes the neighbour's values"]["neighbours"]
