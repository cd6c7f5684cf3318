"""The optimizer against torch.optim.AdamW: steps, scalers, closures, clipping, precision, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

import ops_math as om
from ops_nn.optim import AdamW, clip_scale
from tests.optim.walks import EXACT, PEER, ROADS, feed, gap, in_groups, parameters, walk


@pytest.mark.parametrize("options", [{}, {"maximize": True, "weight_decay": 0.2}, {"amsgrad": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("road", ROADS)
def test_fifty_steps_with_groups_and_missing_gradients_are_those_of_pytorch(road, options):
    ours, theirs = parameters(), parameters()
    theirs_options = {k: v for k, v in options.items() if k != "capturable"}  # without a GPU PyTorch's unfused forms refuse it
    peer = torch.optim.AdamW(in_groups(theirs), **theirs_options, **PEER)
    walk(peer, theirs, sometimes=True)
    with ROADS[road]():
        optimizer = AdamW(in_groups(ours), **options)
        walk(optimizer, ours, sometimes=True)
    assert gap(ours, theirs) < EXACT
    assert [int(optimizer.state[p]["step"]) for p in ours] == [int(peer.state[p]["step"]) for p in theirs]


@pytest.mark.parametrize("road", ROADS)
def test_a_learning_rate_that_changes_is_followed_as_number_and_as_tensor(road):
    found = []
    for lr in (1e-2, torch.tensor(1e-2, dtype=torch.float64)):
        params = parameters()
        with ROADS[road]():
            optimizer = AdamW(params, lr=lr)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=7)
            for step in range(12):
                walk(optimizer, params, range(step, step + 1))
                schedule.step()
        found.append(params)
    theirs = parameters()
    peer = torch.optim.AdamW(theirs, lr=1e-2, **PEER)
    schedule = torch.optim.lr_scheduler.LinearLR(peer, 0.1, 1.0, total_iters=7)
    for step in range(12):
        walk(peer, theirs, range(step, step + 1))
        schedule.step()
    assert gap(found[0], theirs) < EXACT
    assert gap(found[1], theirs) < EXACT


@pytest.mark.parametrize("road", ROADS)
def test_a_loss_scaler_hands_its_scale_over_and_an_infinity_skips_the_step(road):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    peer = torch.optim.AdamW(theirs, lr=1e-2, **PEER)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    with ROADS[road]():
        optimizer = AdamW(ours, lr=1e-2)
        for step in range(8):
            spoiled = step == 4
            feed(theirs, step)
            feed(ours, step)
            scaler.scale(torch.zeros(()))  # makes the scale
            for p in ours:
                p.grad *= scaler.get_scale()
            if spoiled:
                ours[2].grad[0, 0] = math.inf
            before = [p.clone() for p in ours]
            scaler.step(optimizer)
            scaler.update()
            if spoiled:
                assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))
            else:
                peer.step()
    assert gap(ours, theirs) < 1e-6  # a scale is a power of two: the same numbers, rounded elsewhere; a wrong scale moves by 1e-2
    assert int(optimizer.state[ours[0]]["step"]) == 7


def test_a_closure_is_called_with_gradients_and_its_loss_comes_back():
    p = Parameter(torch.tensor([2.0]))
    optimizer = AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert p.item() < 2.0


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_folded_in_is_clipping_before_the_step(max_norm, norm_type):
    ours, theirs = parameters(), parameters()
    optimizer, peer = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, **PEER)
    for step in range(10):
        feed(ours, step)
        feed(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], max_norm, norm_type)
        peer.step()
        found = clip_scale([p for p in ours if p.numel()], max_norm, norm_type=norm_type)
        optimizer.step(clip=found.coefficient)
        assert abs(found.norm.item() - norm.item()) < 1e-6 * norm.item()
    assert gap(ours, theirs) < 1e-7  # the coefficient is fp32


def test_clipping_of_scaled_gradients_sees_the_unscaled_norm_and_none_at_all_is_no_clipping():
    params = parameters()
    feed(params, 0)
    plain = clip_scale(params[:4], 0.5)
    for p in params:
        p.grad *= 256
    scaled = clip_scale(params[:4], 0.5, grad_scale=torch.tensor(256.0))
    assert torch.allclose(scaled.norm, plain.norm, rtol=1e-6)
    assert torch.allclose(scaled.coefficient, plain.coefficient, rtol=1e-6)
    assert clip_scale([Parameter(torch.ones(3))], 1.0).coefficient.item() == 1.0


@pytest.mark.parametrize("road", ROADS)
def test_wide_averages_a_master_copy_and_stochastic_rounding_follow_a_float64_walk_where_bf16_stands_still(road):
    exact = Parameter(torch.ones(4096, dtype=torch.float64))
    peer = torch.optim.AdamW([exact], lr=2e-5, weight_decay=0.0, **PEER)
    options = {
        "nearest": {"state_dtype": torch.float32},
        "master": {"state_dtype": torch.float32, "master_weights": True},
        "stochastic": {"stochastic_rounding": om.Rng(7)},
    }
    with ROADS[road]():
        walks = {}
        for name, option in options.items():
            walks[name] = Parameter(torch.ones(4096, dtype=torch.bfloat16))
            walks[name].optimizer = AdamW([walks[name]], lr=2e-5, weight_decay=0.0, **option)
        for _ in range(400):
            for p in (exact, *walks.values()):
                p.grad = torch.ones_like(p)
            peer.step()
            for p in walks.values():
                p.optimizer.step()
    moved = 1 - exact.mean().item()
    assert abs(moved - 400 * 2e-5) < 1e-6
    assert (walks["nearest"] == 1).all()
    assert abs(1 - walks["master"].double().mean().item() - moved) < 2.0**-9  # its rounding
    # A step moves by 2^-8 with a chance of 2e-5 / 2^-8; the gap is 2^-8 all the way down to 0.992.
    sigma = 2.0**-8 * math.sqrt(400 * 2e-5 / 2.0**-8 / 4096)
    # exp_avg reaches 1 from below by bf16 steps: what it lacks in bf16 (its rounding, 2^-9) may bias the walk by as much.
    assert abs(1 - walks["stochastic"].double().mean().item() - moved) < 5 * sigma + 2.0**-8 * moved


def test_parameters_of_several_dtypes_step_together():
    params = [Parameter(torch.ones(5, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64, torch.float16)]
    optimizer = AdamW(params, lr=0.5, master_weights=True, state_dtype=torch.float32)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [float(p[0]) for p in params] == pytest.approx([0.495] * 4, rel=2e-3)  # bf16 rounds by 2e-3
    assert ["master" in optimizer.state[p] for p in params] == [False, True, False, True]
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.float64


def test_its_words_say_what_it_keeps_and_what_steps():
    params = parameters(torch.bfloat16)
    optimizer = AdamW(params, lr=0.25, state_dtype=torch.float32)
    assert repr(optimizer).endswith("Averages in float32, no master copies, bf16 rounded to nearest.\nSteps by om.adamw: no step taken yet")
    assert "lr: 0.25" in repr(optimizer)
    walk(optimizer, params, range(1))
    assert repr(optimizer).endswith("Steps by om.adamw: 5 tensors, 852 x bf16 by eager")
    with om.enabled(False):
        assert "Steps by torch.optim's functional AdamW, since ops_math is switched off" in repr(optimizer)


ONE = [Parameter(torch.ones(2))]
REFUSED = [
    (lambda: AdamW(ONE, foreach=True), "foreach must be None or False; got True. Use torch.optim.AdamW for that."),
    (lambda: AdamW(ONE, fused=False), "fused must be None or True; got False. Use torch.optim.AdamW for that."),
    (lambda: AdamW(ONE, differentiable=True), "differentiable must be False; got True. Use torch.optim.AdamW for that."),
    (
        lambda: AdamW(ONE, state_dtype=torch.float16),
        "state_dtype must be None, torch.float32 or torch.bfloat16; got torch.float16. Pick one of these.",
    ),
    (
        lambda: AdamW(ONE, betas=(torch.tensor(0.9), torch.tensor(0.99))),
        "betas must be two numbers; got tensors. Pass float(beta).",
    ),
    (
        lambda: AdamW(ONE, stochastic_rounding=3),
        "stochastic_rounding must be an ops_math.Rng or None; got int. Make one with ops_math.Rng(seed, device).",
    ),
    (
        lambda: AdamW(ONE, stochastic_rounding=om.Rng(3), master_weights=True),
        "stochastic_rounding must be None with master_weights; got both. A master copy loses nothing; drop one of them.",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_what_it_cannot_do_is_refused_in_words(make, sentence):
    with pytest.raises(om.ArgumentError) as error:
        make()
    assert str(error.value) == "AdamW: " + sentence


def refusal(**settings):
    return lambda kind: kind([Parameter(torch.ones(2))], **settings)


def of(params):
    return lambda kind: kind(params())


RATE = "lr must be a number or a tensor of one element; got "
BETA = "must be at least 0 and below 1; got "
LONG = "Near 1 is a long memory: 0.9 and 0.999 are usual."
LIST = "params must be a list of parameters or of groups; got "
TIED = "Leave it in one of them. Tied weights are one parameter: model.parameters() gives each once."
BOTH = "params must be all parameters or all groups (dictionaries); got "
NAMED = "params must be all with names or all without; got 1 names for 2 parameters. Pass model.named_parameters() or model.parameters()."
P = Parameter(torch.ones(2))
LIKE_PYTORCHS = [
    (refusal(lr=-1), "lr must be at least 0; got -1. Use maximize=True to ascend."),
    (refusal(lr=float("nan")), "lr must be at least 0; got nan. 1e-3 is usual."),
    (refusal(lr="1"), RATE + "'1'. 1e-3 is usual."),
    (refusal(lr=None), RATE + "None. 1e-3 is usual."),
    (refusal(lr=torch.ones(2)), RATE + "shape [2]. Use a group for each rate."),
    (refusal(lr=torch.tensor(-1.0)), "lr must be at least 0; got -1.0. Use maximize=True to ascend."),
    (refusal(eps=-1), "eps must be at least 0; got -1. 1e-8 is usual."),
    (refusal(eps="a"), "eps must be a number; got 'a'. 1e-8 is usual."),
    (refusal(weight_decay=-1), "weight_decay must be at least 0; got -1. 0.01 is usual."),
    (refusal(weight_decay=None), "weight_decay must be a number; got None. 0.01 is usual."),
    (refusal(betas=(1, 1)), f"betas[0] {BETA}1. {LONG}"),
    (refusal(betas=(0.9, 1.0)), f"betas[1] {BETA}1.0. {LONG}"),
    (refusal(betas=(float("nan"), 0.9)), f"betas[0] {BETA}nan. {LONG}"),
    (refusal(betas=(0, 0)), "betas[0] must be a float; got 0. Pass 0.0."),
    (refusal(betas=0.9), "betas must be two numbers; got float. Pass e.g. (0.9, 0.999)."),
    (refusal(betas=("a", 0.9)), "betas[0] must be a number; got 'a'. Pass e.g. (0.9, 0.999)."),
    (of(list), "params must be at least one parameter; got none. A generator is used up by its first reader: pass list(...)."),
    (of(lambda: P), LIST + "a single tensor. Put it into a list."),
    (of(lambda: None), LIST + "NoneType. Pass model.parameters()."),
    (of(lambda: torch.nn.Linear(2, 2)), LIST + "Linear. Pass model.parameters()."),
    (of(lambda: {"w": P}), LIST + "dict. Pass model.parameters(), or a list of groups {'params': [...], 'lr': ...}."),
    (of(lambda: [3]), "params must be tensors, or pairs of a name and a tensor; got int. Pass model.parameters()."),
    (of(lambda: [P, {"params": [P]}]), BOTH + "Parameter first and dict at 1. Put what stands alone into a group: {'params': [...]}."),
    (of(lambda: [{"params": [P]}, P]), BOTH + "dict first and Parameter at 1. Put what stands alone into a group: {'params': [...]}."),
    (of(lambda: [{"lr": 1.0}]), "a parameter group must be a dictionary with 'params'; got 'lr'. Add 'params': [...]."),
    (of(lambda: [{"params": {P}}]),
     "params must be in an order that repeats; got a set. Pass a list: the state of an optimizer is saved by position."),
    (of(lambda: [{"params": [P]}, {"params": P}]), f"params must be in one group each; got one of shape [2] in two. {TIED}"),
    (of(lambda: [P * 2]), "params must be leaves of the graph; got the result of MulBackward0. Pass what it was made from, or p.detach()."),
    (of(lambda: [("a", P), Parameter(torch.ones(1))]), NAMED),
]  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), LIKE_PYTORCHS, ids=[str(i) for i in range(len(LIKE_PYTORCHS))])
def test_what_pytorch_refuses_is_refused_in_words_and_caught_by_who_catches_its_errors(make, sentence):
    with pytest.raises(Exception) as theirs:
        make(torch.optim.AdamW)
    with pytest.raises(om.ArgumentError) as ours:
        make(AdamW)
    assert str(ours.value) == "AdamW: " + sentence
    assert isinstance(ours.value, type(theirs.value))


def test_settings_of_a_group_that_pytorch_lets_pass_are_looked_at():
    for entry, words in (
        ({"lr": -1.0}, "lr of a parameter group must be at least 0; got -1.0"),
        ({"lr": "a"}, "lr of a parameter group must be a number or a tensor of one element; got 'a'"),
        ({"betas": (2, 2)}, r"betas\[0\] of a parameter group must be at least 0 and below 1; got 2"),
        ({"betas": (0.9, 0.9, 0.9)}, r"betas of a parameter group must be two numbers; got \(0.9, 0.9, 0.9\)"),
        ({"eps": -1e-8}, "eps of a parameter group must be at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay of a parameter group must be at least 0; got nan"),
    ):
        torch.optim.AdamW([{"params": [Parameter(torch.ones(2))], **entry}])
        with pytest.raises(om.ArgumentError, match=r"^AdamW: " + words):
            AdamW([{"params": [Parameter(torch.ones(2))], **entry}])
    optimizer = AdamW([Parameter(torch.ones(2))])
    with pytest.raises(om.ArgumentError, match=r"^AdamW: lr of a parameter group must be at least 0"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "lr": -1.0})
    with pytest.raises(TypeError, match=r"^AdamW: param_group must be a dictionary; got list\. Pass \{'params': "):
        optimizer.add_param_group([P])
    assert len(optimizer.param_groups) == 1


def test_every_form_of_parameters_that_pytorch_takes_is_taken():
    layer = torch.nn.Linear(3, 2)
    for params in (
        lambda: layer.parameters(), lambda: layer.named_parameters(), lambda: [{"params": layer.parameters(), "lr": 1.0, "name": "all"}],
        lambda: [{"params": layer.weight}, {"params": (layer.bias,), "betas": (0, 0.9)}], lambda: set(layer.parameters()),
        lambda: ({"params": [p]} for p in layer.parameters()),
    ):  # fmt: skip
        ours, theirs = AdamW(params()), torch.optim.AdamW(params())
        sizes = [[[id(p) for p in group["params"]] for group in kind.param_groups] for kind in (ours, theirs)]
        assert sizes[0] == sizes[1] or isinstance(params(), set)
        layer(torch.ones(1, 3)).sum().backward()
        ours.step()


def test_a_state_dict_of_other_groups_is_refused_with_both_sizes():
    saved = AdamW([Parameter(torch.ones(2)), Parameter(torch.ones(3))]).state_dict()
    optimizer = AdamW([Parameter(torch.ones(2))])
    do = "Make the optimizer with the groups that it was saved with."
    with pytest.raises(ValueError, match=r"^AdamW: ") as error:
        optimizer.load_state_dict(saved)
    assert str(error.value) == f"AdamW: state_dict must be of groups of 1 parameters, as this optimizer; got groups of 2. {do}"
    with pytest.raises(KeyError) as error:
        optimizer.load_state_dict(torch.nn.Linear(2, 2).state_dict())
    needs = "AdamW: state_dict must be an optimizer's, with 'state' and 'param_groups'; got 'weight', 'bias'. "
    assert str(error.value) == needs + "Pass what optimizer.state_dict() returned."


def test_sparse_gradients_complex_parameters_and_unknown_tensors_are_refused_in_words():
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(om.ArgumentError, match=r"gradients must be dense; got torch\.sparse_coo\. Use torch\.optim\.SparseAdam"):
        AdamW([p]).step()
    p = Parameter(torch.ones(3))
    optimizer = AdamW([p])
    for g in (torch.ones(3), torch.ones(3).to_sparse()):  # after a dense one, by the kept road
        p.grad = g
        if g.is_sparse:
            with pytest.raises(om.ArgumentError, match="gradients must be dense"):
                optimizer.step()
        else:
            optimizer.step()
    p = Parameter(torch.ones(3, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(om.ArgumentError, match=r"params must be fp32, bf16, fp16 or fp64; got torch\.complex64"):
        AdamW([p]).step()

    class Own(torch.Tensor):
        pass

    p = Parameter(torch.ones(3).as_subclass(Own))
    p.grad = torch.ones(3).as_subclass(Own)
    with pytest.raises(om.ArgumentError, match=r"params must be torch\.Tensor or DTensor; got Own"):
        AdamW([p]).step()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_shards_of_dtensors_step_like_whole_tensors_and_their_state_is_sharded(placement, one_rank):
    whole, value = Parameter(torch.randn(6, 5)), None
    value = distribute_tensor(whole.detach().clone(), one_rank, [placement])
    shard = Parameter(value)
    one, other = AdamW([whole]), AdamW([shard])
    for step in range(5):
        whole.grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        shard.grad = distribute_tensor(whole.grad, one_rank, [Replicate()])
        clip = clip_scale([shard], 1.0)
        assert torch.allclose(clip.norm, clip_scale([whole], 1.0).norm)
        one.step(clip=clip.coefficient)
        other.step(clip=clip.coefficient)
    assert torch.equal(shard.full_tensor(), whole)
    assert isinstance(other.state[shard]["exp_avg"], DTensor)


@pytest.mark.slow
def test_a_compiled_step_is_pytorchs_own():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer, peer = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2, **PEER)
    compiled = torch.compile(optimizer.step)
    for step in range(3):
        feed(ours, step)
        feed(theirs, step)
        compiled()
        peer.step()
    assert gap(ours, theirs) < 1e-6  # a step moves by 1e-2
