"""What is passed by of Triton's launcher changes nothing of what the driver is given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="missing capability: Triton")
ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from pathlib import Path

sys.path[:0] = ["src", "tools", "."]
import stub_driver

library = stub_driver.install(Path(sys.argv[1]))
import torch
from triton.runtime.driver import driver

import ops_math as om
from ops_math.backends import launch as launching
import host_path

x, weight = torch.randn(64, 256).bfloat16().requires_grad_(), torch.randn(256).bfloat16().requires_grad_()
dy = torch.ones(64, 256).bfloat16()
q = torch.randn(1, 64, 2, 64).bfloat16()
with host_path.pretended():
    stub_driver.launcher(driver.active)
    library.expect(0)
    torch.autograd.grad(om.rms_norm(x, weight), (x, weight), dy)
    om.gelu(x.detach(), weight.detach())
    om.attention(q, q.clone(), q.clone(), causal=True)  # with tensor descriptors, which stay with the launcher's own wrapper
    kept = list(launching._COMPILED.values())
    passed_by = 0
    for k in kept:
        passed_by += launching.innermost(k)[0] is not k.run
    print("kernels", len(kept), "passed by", passed_by)

    starts = []
    with launching.taped() as tape:
        torch.autograd.grad(om.rms_norm(x, weight), (x, weight), dy)
        om.gelu(x.detach(), weight.detach())
        starts += [(found, grid, args) for found, grid, args in tape]
    for found, grid, args in starts:
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args] + list(found.tail)
        pointers = sum(isinstance(a, torch.Tensor) for a in args)
        x_, y_, z_ = (*grid, 1, 1)[:3]
        library.expect(pointers)
        found.run(x_, y_, z_, 777, found.function, found.metadata, None, None, None, *values)
        usual = stub_driver.last(pointers)
        library.expect(0)
        found.run(1, 1, 1, 1, found.function, found.metadata, None, None, None, *values)
        assert stub_driver.last(0) != usual[:10]
        library.expect(pointers)
        start, before, together = launching.innermost(found)
        start(x_, y_, z_, 777, *before, *((tuple(values),) if together else values))
        assert stub_driver.last(pointers) == usual, (stub_driver.last(pointers), usual)
        assert usual[7] == 777
        library.expect(0)
    print("compared", len(starts))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="missing capability: a C compiler")
def test_the_driver_gets_the_same_from_the_innermost_function_as_from_the_launcher(tmp_path):
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    kernels, compared = found.stdout.strip().splitlines()
    counts = [int(word) for word in kernels.split() if word.isdigit()]
    assert counts[0] == counts[1] >= 5, kernels
    assert compared == "compared 4"
