"""Triton kernels without a GPU: their arithmetic in the interpreter, their resources for four devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops_math import catalog
from ops_math.backends import NAMED, null
from ops_math.spec import Case
from ops_math.testing.capture import like_on
from ops_math.testing.crosscompile import calls_of, compile_case

triton = pytest.importorskip("triton", reason="missing capability: Triton")
DEVICES = ("a100", "h100", "b200", "mi300x")
WITH_KERNELS = [n for n, op in catalog.operators().items() if any(i.name == "triton_gpu" for i in op.implementations())]
# Bytes a thread that the default configurations may keep on the stack: of the norms backward, at rows whose sums take all registers (16 at
# 8,001 columns in fp32 on sm_90 and at 16,001 in bf16 on sm_100, Triton 3.9). Attention's are of dk/dv at width 128 where a sequence
# ends inside a tile: the fastest of five on an H200 all the same.
ALLOWED_SPILLS = {"layer_norm": 16, "rms_norm": 16, "attention": 160, "linear_cross_entropy": 8}
SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.interpreter
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("which", [[], pytest.param(["--every"], marks=pytest.mark.long)], ids=["second", "all"])
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_interpreted_kernels_are_within_the_budget_on_every_second_small_case_or_all(name, which):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ops_math.testing.interpreted", name, *which], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["broken"] == []
    assert len(result["ran"]) > 2 * len(result["skipped"])


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_every_kernel_compiles_within_the_device_without_spills(name, device):
    operator = catalog.operators()[name]
    compiled = []
    for case in operator.file("problem").CASES:
        for dtype in ({"fp32", "bf16"} if device == "h100" else {"bf16"}) & set(case.dtypes):  # fp32 once: the time of four is minutes
            compiled += compile_case(operator, case, dtype, device)
    assert compiled
    for kernel in compiled:
        assert kernel.resources.spilled <= ALLOWED_SPILLS.get(name, 0), kernel
        assert kernel.resources.registers <= (512 if NAMED[device].kind == "hip" else 255), kernel
        assert kernel.resources.shared <= NAMED[device].shared_bytes, kernel


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cols"), [("layer_norm", 8192), ("layer_norm", 5120), ("layer_norm", 16384), ("rms_norm", 8192)])
@pytest.mark.parametrize("device", ["h100", "b200"])
def test_a_limit_of_registers_is_kept_and_comes_first_where_nothing_spills(name, cols, device):
    operator = catalog.operators()[name]
    kernels = next(i for i in operator.implementations() if i.name == "triton_gpu").module
    case = Case(f"[64, {cols}]", name, operator.file("problem")._norm(64, cols))
    (forward, *_) = calls_of(operator, case, "bf16")
    phase = operator.phases["fwd"]
    problem, facts = phase.problem_of(*forward.args), NAMED[device]
    tensors = [like_on(t, "meta") for t in forward.args[: phase.num_tensors]]
    offered = kernels.configs(problem, facts, "fwd")
    limited = next(c for c in offered if c.registers)
    taken = {}
    for config in (limited, limited._replace(registers=0)):
        with null.pretend(facts) as compiled:
            kernels.launch_fwd(problem, config, *tensors)
            (found,) = [null.resources(kernel) for _, kernel in compiled]
            compiled.clear()
        assert found.spilled == 0 or (config is limited and config is not offered[0]), found
        taken[config.registers] = found.registers
    assert taken[limited.registers] <= limited.registers < taken[0]
