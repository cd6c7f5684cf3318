"""What is special to softmax: infinities, the dimension, and how it relates to PyTorch's."""

from __future__ import annotations

import pytest
import torch

import ops_math as om


@pytest.mark.parametrize("implementation", ["eager", "vendor"])
def test_rows_of_minus_infinity_give_nan_as_pytorch_does_and_leave_other_rows_alone(implementation: str) -> None:
    x = torch.randn(4, 33)
    x[1] = float("-inf")
    x[2, 5] = float("inf")
    x[3, 5] = float("-inf")
    with om.force(softmax=implementation):
        y = om.softmax(x)
    torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)
    assert y[1].isnan().all()
    assert y[3, 5] == 0


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_every_dimension_agrees_with_pytorch_forward_and_backward(dim: int) -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(3, 4, 5, dtype=torch.float64)
    y, want = om.softmax(x, dim), torch.softmax(x, dim)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(want, x, dy))


def test_a_common_offset_of_ten_thousand_changes_nothing() -> None:
    x = torch.randint(-8, 8, (7, 65)).float()
    assert torch.equal(om.softmax(x + 10000), om.softmax(x))


def test_under_autocast_the_result_is_stored_in_its_dtype() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = om.softmax(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_bad_arguments_are_refused_in_words() -> None:
    with pytest.raises(om.ArgumentError) as error:
        om.softmax(torch.ones(3, 4), 2)
    assert str(error.value) == "softmax: dim must be one of -2, -1, 0, 1; got 2. Pick one of these."
    with pytest.raises(om.ArgumentError) as error:
        om.softmax(torch.ones(3, dtype=torch.int32))
    assert str(error.value).startswith("softmax: x must be floating point (fp32, bf16, fp16 or fp64); got int32.")
