"""The operator contract on a GPU: every implementation that runs there, on every case and dtype."""

from __future__ import annotations

import pytest
import torch

from ops_math import catalog, dispatch
from ops_math.backends import launch as launch_module
from ops_math.testing import conformance
from tests.conformance.cases import every_case, every_case_and_dtype, first_dtype

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA or ROCm device"),
]


COMPUTES = "linear_cross_entropy"  # whose launchers call PyTorch's products between kernels, and so have no plan


@pytest.fixture(autouse=True)
def planned_early(monkeypatch):
    """Repeated calls play their plans from the third on, so that what follows holds plans to the same budgets and bits."""
    monkeypatch.setattr(dispatch, "RECORD_AT", 2)


def able_implementations(name, case, dtype):
    operator = catalog.operators()[name]
    return operator, [i.name for i in operator.implementations() if conformance.able(operator, case, dtype, i.name, "cuda") is None]


@pytest.mark.parametrize(("name", "case", "dtype"), every_case_and_dtype())
def test_every_implementation_is_within_the_error_budget_on_the_gpu(name, case, dtype):
    operator, able = able_implementations(name, case, dtype)
    assert "eager" in able
    for implementation in able:
        assert conformance.check_budget(operator, case, dtype, implementation, "cuda") == [], implementation


@pytest.mark.parametrize(("name", "case"), every_case())
def test_strides_buffers_and_autograd_hold_on_the_gpu(name, case):
    dtype = "bf16" if "bf16" in case.dtypes else first_dtype(case)
    operator, able = able_implementations(name, case, dtype)
    for implementation in able:
        assert conformance.check_layouts(operator, case, dtype, implementation, "cuda") == [], implementation
        assert conformance.check_poison(operator, case, dtype, implementation, "cuda") == [], implementation
        assert conformance.check_autograd(operator, case, dtype, implementation, "cuda") == [], implementation
        if implementation == "triton_gpu":
            assert conformance.check_twice(operator, case, dtype, implementation, "cuda") == []
            assert conformance.check_repeats(operator, case, dtype, implementation, "cuda", times=5) == []


@pytest.mark.parametrize("name", list(catalog.operators()))
def test_compiled_by_inductor_the_gpu_gives_the_same_bits(name):
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    assert conformance.check_compiled(operator, case, "bf16", "cuda", backend="inductor") == []


@pytest.mark.skipif(torch.version.hip is not None, reason="missing capability: the direct launcher is NVIDIA's")
@pytest.mark.parametrize("name", list(catalog.operators()))
def test_a_repeated_call_starts_its_kernels_directly(name, monkeypatch):
    operator, case = catalog.operators()[name], catalog.operators()[name].file("problem").CASES[0]
    judge = conformance.judge_for(operator, case, "bf16", "cuda")
    for _ in range(2):
        judge.run(1, "triton_gpu")
    started = []
    monkeypatch.setattr(launch_module, "_start", lambda kernel, *a: started.append(kernel))
    judge.run(1, "triton_gpu")
    assert started == []


@pytest.mark.skipif(torch.version.hip is not None, reason="missing capability: the direct launcher is NVIDIA's")
@pytest.mark.parametrize("name", [n for n in catalog.operators() if n != COMPUTES])
def test_a_repeated_call_plays_a_plan_and_gives_the_same_bits(name):
    operator, case = catalog.operators()[name], catalog.operators()[name].file("problem").CASES[0]
    operator.forget()
    assert conformance.check_repeats(operator, case, "bf16", "triton_gpu", "cuda", times=5) == []
    known = [k for k in operator.phases["fwd"].memo.values() if isinstance(k, dispatch._Known)]
    assert any(k.play is not None for k in known), [k.why for k in known]
    assert operator.phases["fwd"].short
