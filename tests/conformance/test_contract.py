"""The operator contract on the CPU, for every catalogue entry."""

from __future__ import annotations

import pytest
import torch

from ops_math import UnsupportedError, catalog
from ops_math.testing import conformance
from ops_math.testing.inputs import Draw, as_leaves
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


def gradients_of_doubled(operator, case, in_place):
    """Gradients where results were doubled; a word where autograd refuses, None where no result has a gradient."""
    call, leaves = as_leaves(case.make(Draw(1, first_dtype(case))), case.frozen, lambda t: t)
    out = operator.public[case.fn](*call.args, **call.kwargs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor) and o.grad_fn is not None]
    if not outs:
        return None
    try:
        doubled = [o.mul_(2) if in_place else o * 2 for o in outs]
        given = [torch.arange(1, o.numel() + 1).reshape(o.shape).sin().to(o.dtype) for o in doubled]
        return torch.autograd.grad(doubled, list(leaves.values()), given, allow_unused=True)
    except RuntimeError as error:
        parts = operator.name == "rope" and "is a view and is being modified inplace" in str(error)  # q, k and v of one packed result
        if not parts and "modified by an inplace operation" not in str(error):
            raise
        return "refused"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_result_that_is_written_into_has_its_gradient_or_autograd_refuses(name, case):
    """Results are tensors of their own, each with its count of writes: what is saved for the backward must be the one that is returned."""
    operator = catalog.operators()[name]
    found = gradients_of_doubled(operator, case, in_place=True)
    if found not in (None, "refused"):
        want = gradients_of_doubled(operator, case, in_place=False)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


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
