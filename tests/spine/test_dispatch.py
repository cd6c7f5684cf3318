"""The way of a call: below autograd, without import-time work, keyed by our sources."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math import ArgumentError, catalog
from ops_math.dispatch import count_tensors
from ops_math.stats import stats


def test_the_raw_operator_records_no_graph_through_its_launcher():
    x = torch.randn(4, 16, requires_grad=True)
    y, _, _ = torch.ops.ops_math.rms_norm_fwd(x, None, None, 1e-6, 0.0, torch.float32)
    assert y.grad_fn.name() == "torch::autograd::WarnNotImplemented"  # PyTorch's word for: below autograd


def test_tensors_must_come_first_in_a_schema():
    assert count_tensors("(Tensor x, Tensor? w, float eps) -> Tensor") == 2
    with pytest.raises(AssertionError, match="tensors come first"):
        count_tensors("(Tensor x, float eps, Tensor w) -> Tensor")


def test_the_compile_cache_is_keyed_by_our_sources():
    assert "ops_math-" in torch.compiler.config.cache_key_tag


def test_choices_are_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr("ops_math.dispatch._MEMO_LIMIT", 8)
    phase = catalog.operators()["rms_norm"].phases["fwd"]
    phase.memo.clear()
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
