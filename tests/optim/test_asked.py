"""What a hurried user gives an AdamW that PyTorch's own would take, or answer in no words."""

import pytest
import torch
from torch.nn import Parameter

import ops_math as om
from ops_nn.optim import AdamW

P = Parameter(torch.ones(2))


def test_a_parameter_twice_in_a_group_is_refused_since_both_would_be_stepped_at_once():
    p = Parameter(torch.ones(2))
    for params in ([p, p], [{"params": [p, p]}], [("a", p), ("b", p)]):
        with pytest.raises(om.ArgumentError, match=r"^AdamW: params must be in their group once each; got one of shape \[2\] twice\."):
            AdamW(params)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_an_infinite_setting_is_refused(name):
    with pytest.raises(om.ArgumentError, match=rf"^AdamW: {name} must be finite; got inf\."):
        AdamW([P], **{name: float("inf")})


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("entry", "value"), [("lr", "1e-3"), ("lr", None), ("betas", ("a", 0.9)), ("eps", "x"), ("weight_decay", None)])
def test_a_setting_that_became_no_number_is_named_and_its_step_is_not_counted(entry, value, state_dtype):
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = AdamW([p], state_dtype=state_dtype)
    optimizer.step()
    kept, before = optimizer.param_groups[0][entry], p.detach().clone()
    optimizer.param_groups[0][entry] = value
    name, wrong = ("beta1", value[0]) if entry == "betas" else (entry, value)
    with pytest.raises(om.ArgumentError, match=rf"^adamw: {name} of a group must be a number.*; got {wrong!r}\."):
        optimizer.step()
    assert (optimizer.state[p]["step"].item(), p.tolist()) == (1.0, before.tolist())
    optimizer.param_groups[0][entry] = kept
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2.0


def test_the_operator_names_what_is_no_group():
    group = om.AdamWGroup([P], [P], [P], [P], [torch.zeros(())])
    with pytest.raises(
        om.ArgumentError, match=r"^adamw: groups must be a list of ops_math\.AdamWGroup; got one of Parameter\. ops_nn\.optim"
    ):
        om.adamw([P])
    with pytest.raises(om.ArgumentError, match=r"^adamw: groups must be a list of ops_math\.AdamWGroup; got Group\. Put it into a list\."):
        om.adamw(group)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_state_dict_of_another_optimizer_is_refused(momentum):
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    other, optimizer = torch.optim.SGD([p], lr=0.1, momentum=momentum), AdamW([p])
    other.step()
    with pytest.raises(KeyError, match=r"^AdamW: state_dict must be an AdamW's, with 'betas' in the settings of a group; got 'lr', 'mom"):
        optimizer.load_state_dict(other.state_dict())
    wrong = optimizer.state_dict()
    wrong["state"] = {0: {"momentum_buffer": torch.ones(2)}}
    with pytest.raises(om.ArgumentError, match="with 'step' in the state of a parameter; got 'momentum_buffer'"):
        optimizer.load_state_dict(wrong)
    optimizer.step()
