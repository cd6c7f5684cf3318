"""What `om.layout.report()` says of whole models: nothing where nothing is copied, and each copy with its reason where something is."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math import features
from ops_math.layout import as_rows
from ops_nn.adopt import adopt
from tests.adopt.models import JOBS, Job, bert, tokens

SUMS = "attention's sums"  # one number a row and head, which PyTorch's CPU kernel writes heads last


@pytest.fixture(autouse=True)
def nothing_seen():
    om.layout.reset()
    yield
    om.layout.reset()


def reasons(job, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = job.loss(job.model)
    loss.backward()
    return {row.what for row in om.layout.report().rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["our Llama, tied", "our BERT"])
def test_a_model_in_one_dtype_copies_nothing_but_the_sums_that_pytorchs_attention_lays_otherwise(name, dtype):
    job = JOBS[name]()
    job.model.to(dtype)
    adopt(job.model)
    assert reasons(job) <= {SUMS}


def test_under_autocast_weights_are_cast_at_once_and_the_stream_only_where_it_enters(monkeypatch):
    monkeypatch.setattr(features, "copies_together", lambda device: True)
    job = JOBS["our BERT"]()
    job.model.float()
    adopt(job.model)
    found = reasons(job, autocast=True)
    assert "all weights of a model" in found
    assert "weights of one block" not in found
    assert "one weight" not in found
    (cast,) = [row for row in om.layout.report().rows if row.reason == "fp32 to bf16" and row.what == "an operand or gradient of a product"]
    assert (cast.calls, cast.bytes) == (1, 2 * 32 * 2 * 24)  # the stream as it enters the first layer: width, batch, length


def test_where_pytorch_writes_gradients_apart_packing_them_is_a_copy_and_said():
    job = JOBS["our Llama, tied"]()
    job.model.float()
    adopt(job.model, pack=True)
    with om.force(attention="vendor"):
        assert reasons(job) == {"gradient of q, k and v as one", SUMS}


def test_inputs_that_have_no_rows_are_copies_in_one_line_whatever_their_shapes():
    as_rows(torch.zeros(4, 6).t())
    as_rows(torch.zeros(5, 7).t())
    as_rows(torch.zeros(4, 6)[:, :3])  # rows with a stride: a view
    (row,) = om.layout.report().rows
    assert (row.what, row.calls, row.bytes) == ("rows of an operator's input", 2, 236)


@pytest.mark.parametrize(
    ("who", "copies"),
    [("eager", set()), ("vendor", {"attention's output", "gradients of q, k and v"})],
)
def test_dropout_by_key_writes_the_gradient_of_a_packed_projection_as_one_and_pytorchs_is_joined_by_a_copy(who, copies):
    ids, labels = tokens()
    job = Job(bert(dropout=0.25).model, lambda m: m(ids, labels).loss, 4)
    job.model.float()
    adopt(job.model, pack=True)
    with om.force(attention=who):
        assert reasons(job) == copies
