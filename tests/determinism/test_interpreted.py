"""How calls of our kernels are cut at level 2, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("triton", reason="missing capability: Triton")


@pytest.mark.interpreter
def test_our_kernels_keep_level_two_in_the_interpreter():
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.determinism.interpreted"]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["calls"]) == 12
    for name, result in found["calls"].items():
        assert result == {"ran": ["triton_gpu"], "outputs": [], "inputs": [], "sums": []}, name
    assert found["ranks"]
    assert len(found["degrees"]) == 11
    for name, result in found["degrees"].items():
        assert result == [["triton_gpu"], [], [], [], []], name
