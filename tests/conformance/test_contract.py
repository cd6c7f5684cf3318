"""The operator contract on the CPU, for every catalogue entry."""

from __future__ import annotations

import pytest
import torch

from ops_math import UnsupportedError, catalog
from ops_math.testing import conformance
from tests.conformance.cases import CPU_IMPLEMENTATIONS, every_case, every_case_and_dtype, first_dtype, sampled

CASES = every_case()
CASES_AND_DTYPES = every_case_and_dtype()


def able_implementations(name, case, dtype):
    """Implementations that run the case on the CPU; eager always must."""
    operator = catalog.operators()[name]
    present = [i.name for i in operator.implementations() if i.name in CPU_IMPLEMENTATIONS]
    able = [i for i in present if conformance.able(operator, case, dtype, i, "cpu") is None]
    assert "eager" in able
    return operator, able


@pytest.mark.parametrize(("name", "case"), CASES)
def test_eager_in_float64_reproduces_the_reference_and_its_gradients(name, case):
    assert conformance.check_formula(catalog.operators()[name], case) == []


@pytest.mark.parametrize(("name", "case"), CASES)
def test_plain_pytorch_agrees_with_the_reference_in_float64(name, case):
    assert conformance.check_plain(catalog.operators()[name], case) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "dtype"), CASES_AND_DTYPES)
def test_every_cpu_implementation_is_within_the_error_budget(name, case, dtype):
    operator, able = able_implementations(name, case, dtype)
    for implementation in able:
        assert conformance.check_budget(operator, case, dtype, implementation) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES)
def test_other_strides_and_unwritten_buffers_change_nothing(name, case):
    dtype = first_dtype(case)
    operator, able = able_implementations(name, case, dtype)
    for implementation in able:
        assert conformance.check_layouts(operator, case, dtype, implementation) == []
        assert conformance.check_poison(operator, case, dtype, implementation) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES)
def test_no_grad_second_backward_single_gradients_and_repeats_agree(name, case):
    dtype = first_dtype(case)
    operator, able = able_implementations(name, case, dtype)
    for implementation in able:
        assert conformance.check_autograd(operator, case, dtype, implementation) == []
        assert conformance.check_twice(operator, case, dtype, implementation) == []
        assert conformance.check_repeats(operator, case, dtype, implementation, times=2) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), sampled(CASES))
def test_compiled_without_graph_breaks_it_gives_the_same_bits(name, case):
    assert conformance.check_compiled(catalog.operators()[name], case, first_dtype(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(catalog.operators()))
def test_one_tensor_passed_as_several_inputs_gets_the_sum_of_their_gradients(name):
    operator = catalog.operators()[name]
    first = {case.fn: case for case in reversed(operator.file("problem").CASES)}
    for case in first.values():
        assert conformance.check_shared(operator, case, first_dtype(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", list(catalog.operators()))
def test_compiled_by_inductor_it_gives_the_same_bits(name):
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    for dtype in ("fp32", "bf16"):
        assert conformance.check_compiled(operator, case, dtype, backend="inductor") == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), sampled(CASES))
def test_opcheck_finds_nothing(name, case):
    assert conformance.check_opcheck(catalog.operators()[name], case, first_dtype(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", list(catalog.operators()))
def test_every_planted_fault_is_caught(name, dtype):
    alive, caught = conformance.surviving_faults(catalog.operators()[name], dtype)
    assert alive == []
    assert len(caught) >= 12


@pytest.mark.parametrize("constant", [False, True], ids=["of a square", "of a sum"])
@pytest.mark.parametrize("name", list(catalog.operators()))
def test_a_double_backward_is_refused_in_words(name, constant):
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    call = case.make(conformance.Draw(1, "fp32"))
    x = call.args[0].requires_grad_()
    out = operator.public[case.fn](*call.args, **call.kwargs)
    out = out[0] if isinstance(out, tuple) else out
    (dx,) = torch.autograd.grad(out.sum() if constant else out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (out.sum() + dx.square().sum()).backward()  # a penalty on gradients, which must not be lost


@pytest.mark.parametrize("name", list(catalog.operators()))
def test_vmap_is_refused_in_words(name):
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    call = case.make(conformance.Draw(1, "fp32"))
    x = torch.stack([call.args[0]] * 2)
    with pytest.raises(UnsupportedError, match=r"vmap is not supported\. Give the operator the batch as a leading dimension instead"):
        torch.vmap(lambda t: operator.public[case.fn](t, *call.args[1:], **call.kwargs))(x)
