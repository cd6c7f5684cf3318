"""The way of a call: below autograd, without import-time work, keyed by our sources."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math import ArgumentError, UnsupportedError, catalog
from ops_math.dispatch import count_tensors
from ops_math.stats import stats


def test_the_raw_operator_is_refused_where_a_gradient_would_be_lost():
    """PyTorch only warns, in the backward alone, and gives none."""
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(UnsupportedError) as error:
        torch.ops.ops_math.rms_norm_fwd(x, None, None, 1e-6, 0.0, torch.float32)
    do = "Call the function of ops_math; what runs in a graph of torch.jit.trace is called under torch.no_grad()."
    assert str(error.value) == f"ops_math::rms_norm_fwd: this is the operator below autograd, whose results have no gradient. {do}"
    with torch.no_grad():
        y, _, _ = torch.ops.ops_math.rms_norm_fwd(x, None, None, 1e-6, 0.0, torch.float32)
    assert not y.requires_grad


def test_tensors_must_come_first_in_a_schema():
    assert count_tensors("(Tensor x, Tensor? w, float eps) -> Tensor") == 2
    with pytest.raises(AssertionError, match="tensors come first"):
        count_tensors("(Tensor x, float eps, Tensor w) -> Tensor")


def test_the_compile_cache_is_keyed_by_our_sources():
    assert "ops_math-" in torch.compiler.config.cache_key_tag


def test_choices_are_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr("ops_math.dispatch._MEMO_LIMIT", 8)
    phase = catalog.operators()["rms_norm"].phases["fwd"]
    phase.forget()
    for rows in range(1, 40):
        om.rms_norm(torch.ones(rows, 4))
    assert len(phase.memo) <= 8


def test_statistics_do_not_grow_with_the_number_of_shapes():
    om.reset_stats()
    for rows in range(1, 40):
        om.rms_norm(torch.ones(rows, 4))
    assert len(stats().rows) == 1
    assert stats().rows[0].calls == 39


def test_products_are_counted_by_pytorchs_counter():
    om.dispatch.register_flop_formulas()
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(2, 8, 4, 16)
    with FlopCounterMode(display=False) as counter:
        om.attention(q, q, q)
    assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 8 * 8 * 16


def test_every_operator_names_functions_of_pytorch_that_it_stands_for():
    for name in catalog.operators():
        for function in om.stands_for(name):
            home, _, attribute = function.partition(".")
            assert callable(getattr({"F": torch.nn.functional, "torch": torch}[home], attribute)), (name, function)
    with pytest.raises(
        ArgumentError, match=r"^stands_for: operator must be one of 'cross_entropy', .*; got 'softmin'\. Did you mean 'softmax'\?$"
    ):
        om.stands_for("softmin")


X, TARGET = torch.randn(4, 8), torch.tensor([0, 3, 7, -100])
WRITTEN = {
    "rms_norm": lambda x: om.rms_norm(x, X[0]),
    "add_rms_norm": lambda x: om.add_rms_norm(x, X, X[0])[0],
    "layer_norm": lambda x: om.layer_norm(x),
    "add_layer_norm": lambda x: om.add_layer_norm(x, X)[0],
    "gelu": om.gelu,
    "swiglu": lambda x: om.swiglu(x, X),
    "geglu_packed": om.geglu_packed,
    "dropout": lambda x: om.dropout(x, 0.5, rng=om.Rng(3)),
    "cross_entropy": lambda x: om.cross_entropy(x, TARGET, reduction="none"),
    "linear_cross_entropy": lambda x: om.linear_cross_entropy(x, X, TARGET.clamp(max=3), reduction="none"),
    "linear": lambda x: om.linear(x, X),
    "rope": lambda x: om.rope(x.view(1, 4, 1, 8), X.view(1, 4, 1, 8), X[:, :4], X[:, 4:])[0],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_result_may_be_written_into_as_that_of_a_function_of_pytorch(name):
    x = torch.randn(4, 8, requires_grad=True)
    (want,) = torch.autograd.grad((WRITTEN[name](x) * 3.0).sum(), x)
    y = WRITTEN[name](x)
    (found,) = torch.autograd.grad(y.mul_(3.0).sum(), x)
    torch.testing.assert_close(found, want)
    with torch.no_grad():
        y = WRITTEN[name](x)
    assert y.mul_(x.sum()).requires_grad


def test_a_sum_that_the_backward_reads_is_not_written_into_unnoticed():
    x = torch.randn(4, 8, requires_grad=True)
    y, total = om.add_rms_norm(x, X)
    total.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
