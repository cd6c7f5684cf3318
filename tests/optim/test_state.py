"""What the optimizer keeps: state dicts to and from torch.optim.AdamW, copies, and changes behind its back."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.nn import Parameter

from ops_nn.optim import AdamW
from tests.optim.walks import EXACT, PEER, STEPS, gap, in_groups, parameters, walk


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
def test_a_state_dict_of_either_continues_in_the_other_as_if_nothing_had_happened(options):
    whole = parameters()
    walk(torch.optim.AdamW(in_groups(whole), **options, **PEER), whole)
    for first, second in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (AdamW, AdamW)):
        before, after = parameters(), parameters()
        one = first(in_groups(before), **options)
        walk(one, before, range(20))
        with torch.no_grad():
            for p, q in zip(after, before, strict=True):
                p.copy_(q)
        other = second([{"params": after[:2]}, {"params": after[2:]}])
        if second is AdamW:
            walk(other, after, range(1))  # it has state and tables already, which loading must replace
            with torch.no_grad():
                for p, q in zip(after, before, strict=True):
                    p.copy_(q)
        other.load_state_dict(through_a_file(one.state_dict()))
        walk(other, after, range(20, STEPS))
        assert gap(after, whole) < EXACT, (first, second)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("master", [False, True])
def test_resuming_gives_the_same_bits_whatever_is_kept_in_which_dtype(state_dtype, master):
    options = {"state_dtype": state_dtype, "master_weights": master}
    whole, before, after = (parameters(torch.bfloat16) for _ in range(3))
    walk(AdamW(whole, **options), whole)
    one, other = AdamW(before, **options), AdamW(after, **options)
    walk(one, before, range(20))
    with torch.no_grad():
        for p, q in zip(after, before, strict=True):
            p.copy_(q)
    other.load_state_dict(through_a_file(one.state_dict()))
    assert other.state[after[0]]["exp_avg"].dtype == (state_dtype or torch.bfloat16)
    walk(other, after, range(20, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(after, whole, strict=True))


def test_loading_takes_the_dict_that_the_users_hooks_leave():
    source, target = parameters(), parameters()
    one, other = AdamW(source), AdamW(target)
    walk(one, source, range(3))

    def doubled(_, state):
        changed = copy.deepcopy(state)
        for entry in changed["state"].values():
            entry["exp_avg"] *= 2
        return changed

    other.register_load_state_dict_pre_hook(doubled)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.state[target[0]]["exp_avg"], 2 * one.state[source[0]]["exp_avg"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_keeps_its_options_and_steps_on(copied):
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, state_dtype=torch.float32)
    walk(optimizer, params, range(3))
    twin = copied(optimizer)
    theirs = twin.param_groups[0]["params"]
    walk(twin, theirs, range(3, 6))
    walk(optimizer, params, range(3, 6))
    assert twin.state_dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))


def test_masters_are_taken_anew_after_weights_were_written():
    p = Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p.fill_(5.0)
    optimizer.resync_masters()
    optimizer.step()
    assert (p.float() - 5.0).abs().max() < 0.05


def _replace_entry(optimizer, p):
    optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.5)


def _replace_state(optimizer, p):
    optimizer.state[p] = {k: torch.full_like(v, 2.0) for k, v in optimizer.state[p].items()}


def _move_storage(optimizer, p):
    p.data = torch.full_like(p, 3.0)


def _move_state(optimizer, p):
    optimizer.state[p]["exp_avg_sq"].set_(torch.full_like(p, 0.25))


def _add_group(optimizer, p):
    fresh = Parameter(torch.ones(3, dtype=torch.float64))
    fresh.grad = torch.ones(3, dtype=torch.float64)
    optimizer.add_param_group({"params": [fresh], "lr": 0.5})


@pytest.mark.parametrize("change", [_replace_entry, _replace_state, _move_storage, _move_state, _add_group], ids=lambda f: f.__name__)
def test_what_changed_since_the_last_step_is_noticed(change):
    results = []
    for make in (AdamW, lambda p: torch.optim.AdamW(p, **PEER)):
        params = parameters()
        optimizer = make(params)
        walk(optimizer, params, range(3))
        change(optimizer, params[2])
        walk(optimizer, params, range(3, 6))
        results.append([p for group in optimizer.param_groups for p in group["params"]])
    assert gap(*results) < EXACT


def test_a_kept_gathering_is_used_as_long_as_nothing_changed():
    params = parameters()
    optimizer = AdamW(params)
    walk(optimizer, params, range(2))
    looks = []
    look = optimizer._gatherer._look
    optimizer._gatherer._look = lambda p, group: looks.append(p) or look(p, group)
    walk(optimizer, params, range(2, 5))
    assert looks == []
    walk(optimizer, params, range(5, 6), sometimes=True)
    assert looks
