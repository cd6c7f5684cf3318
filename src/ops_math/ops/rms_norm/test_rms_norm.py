"""What is special to RMSNorm: its sum, its offset, its extremes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ops_math as om


def test_gemmas_offset_is_the_weight_plus_one() -> None:
    x, weight = torch.randn(5, 64), torch.randn(64)
    torch.testing.assert_close(om.rms_norm(x, weight, weight_offset=1.0), om.rms_norm(x, weight + 1))


def test_the_norm_of_the_sum_is_that_of_the_rounded_sum_which_is_returned() -> None:
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((7, 96), (7, 96), (96,)))
    y, total = om.add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, om.rms_norm(total, weight))


def test_a_wider_residual_keeps_its_dtype_and_every_gradient_that_of_its_tensor() -> None:
    x, residual = torch.randn(4, 32).bfloat16().requires_grad_(), torch.randn(4, 32, requires_grad=True)
    y, total = om.add_rms_norm(x, residual)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    dx, dresidual = torch.autograd.grad([y, total], [x, residual], [torch.randn_like(y), torch.randn_like(total)])
    assert (dx.dtype, dresidual.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(dx, dresidual.bfloat16())


def test_a_sum_that_nobody_uses_and_a_norm_that_nobody_uses_get_no_gradient() -> None:
    x, residual, weight = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32), torch.randn(32, requires_grad=True)
    y, total = om.add_rms_norm(x, residual, weight)
    torch.testing.assert_close(torch.autograd.grad(total.sum(), x, retain_graph=True)[0], torch.ones(4, 32))
    plain = F.rms_norm(x + residual, (32,), weight, 1e-6)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), [x, weight]), torch.autograd.grad(plain.sum(), [x, weight]))


def test_rows_of_zeros_give_zeros_and_finite_gradients() -> None:
    x = torch.zeros(3, 64, requires_grad=True)
    y = om.rms_norm(x, torch.ones(64))
    (dx,) = torch.autograd.grad(y, x, torch.ones(3, 64))
    assert torch.equal(y, torch.zeros(3, 64))
    torch.testing.assert_close(dx, torch.full((3, 64), 1e3))


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_very_small_and_very_large_rows_agree_with_float64(scale: float) -> None:
    x = torch.randn(4, 128) * scale
    torch.testing.assert_close(om.rms_norm(x, eps=1e-40).double(), F.rms_norm(x.double(), (128,), None, 1e-40))


def test_under_autocast_the_result_is_stored_in_its_dtype_and_the_parameters_keep_theirs() -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = om.rms_norm(x, weight)
    assert y.dtype == torch.bfloat16
    dx, dw = torch.autograd.grad(y.sum(), [x, weight])
    assert (dx.dtype, dw.dtype) == (torch.float32, torch.float32)


def test_bad_arguments_are_refused_in_words() -> None:
    with pytest.raises(om.ArgumentError) as error:
        om.rms_norm(torch.ones(3, 8), torch.ones(7))
    assert str(error.value) == (
        "rms_norm: weight must be of shape [8] (the last dimension of x); got shape [7]. Check that both come from the same layer."
    )
    with pytest.raises(om.ArgumentError) as error:
        om.add_rms_norm(torch.ones(3, 8), torch.ones(1, 8))
    assert (
        str(error.value)
        == "add_rms_norm: residual must be of shape [3, 8], as x is; got shape [1, 8]. Expand it first if you mean broadcasting."
    )
    with pytest.raises(om.ArgumentError) as error:
        om.rms_norm(torch.ones(3, 8, dtype=torch.int64))
    assert str(error.value).startswith("rms_norm: x must be floating point (fp32, bf16, fp16 or fp64); got int64.")
