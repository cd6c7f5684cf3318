"""What is done to an adopted model from outside: pickling, forwards of the user's own, transforms."""

from __future__ import annotations

import pickle

import pytest
import torch

import ops_math as om
from ops_nn.adopt import adopt
from tests.adopt.models import JOBS, gradients, llama


@pytest.mark.parametrize("name", JOBS)
def test_a_pickled_adopted_model_is_adopted_again_and_reverted(name):
    job = JOBS[name]()
    first = adopt(job.model)
    twin = pickle.loads(pickle.dumps(job.model))
    second = adopt(twin)
    assert str(second) == str(first)
    after = gradients(job, twin)
    assert all(torch.equal(after[key], value) for key, value in gradients(job).items())
    second.revert()
    assert not any("forward" in m.__dict__ for m in twin.modules())


def test_a_forward_of_the_users_own_is_left_alone():
    job, other = llama(), llama()
    layer = job.model.model.layers[0]
    layer.forward = other.model.model.layers[0].forward  # bound to another module
    assert "a forward of its own is set on the instance" in str(adopt(job.model))
    assert layer.forward.__self__ is other.model.model.layers[0]


@pytest.mark.parametrize("name", JOBS)
def test_torch_func_is_refused_in_words(name):
    job = JOBS[name]()
    adopt(job.model)

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = job.model

        def forward(self):
            return job.loss(self.model)

    loss = Loss()
    values = {n: p.detach() for n, p in loss.named_parameters()}
    with pytest.raises(om.UnsupportedError, match="grad, jvp and their kind are not supported"):
        torch.func.grad(lambda values: torch.func.functional_call(loss, values, ()))(values)
