"""Dropout whose mask PyTorch draws inside a vendor kernel: the backward must see the mask of the forward."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math.ops.attention import op_drawn

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA device")


def inputs(width=64, seq=64):
    torch.manual_seed(1)
    return [torch.randn(2, seq, 4, width, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def test_a_call_with_a_key_is_never_left_to_the_generator():
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    rng = om.Rng(3)
    assert torch.equal(om.attention(q, q, q, dropout_p=0.5, rng=rng), om.attention(q, q, q, dropout_p=0.5, rng=rng))


def test_on_the_cpu_pytorch_draws_where_no_key_is_given():
    q = torch.randn(1, 8, 2, 16)
    assert op_drawn.can_draw(q, q, False, 0.25, 0.1)
    torch.manual_seed(3)
    ours = om.attention(q, q, q, dropout_p=0.3)
    torch.manual_seed(3)
    plain = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3, dropout_p=0.3).transpose(1, 2)
    assert torch.equal(ours, plain)


@pytest.fixture
def drawn_by_pytorch():
    with om.force(attention="vendor"):
        yield


def test_on_a_gpu_a_table_says_who_draws_and_force_or_determinism_overrule_it(monkeypatch):
    monkeypatch.setattr(op_drawn, "_can", lambda *_: 1)
    monkeypatch.setattr(op_drawn.backends, "device_of", lambda _: None)
    form = op_drawn.Form(2, 64, 4, 4, 64, torch.bfloat16)

    def left_to_pytorch(causal):
        return op_drawn.can_draw_form(form, torch.device("cuda"), causal, 0.125, 0.1)

    monkeypatch.setitem(op_drawn.DRAWS_ITSELF, (False, False), False)
    monkeypatch.setitem(op_drawn.DRAWS_ITSELF, (False, True), True)
    assert (left_to_pytorch(False), left_to_pytorch(True)) == (False, True)
    with om.force(attention="vendor"):
        assert (left_to_pytorch(False), left_to_pytorch(True)) == (True, True)
    with om.force(attention="triton_gpu"):
        assert (left_to_pytorch(False), left_to_pytorch(True)) == (False, False)
    with om.determinism(1):
        assert (left_to_pytorch(False), left_to_pytorch(True)) == (False, False)


@pytest.mark.gpu
@GPU
@pytest.mark.usefixtures("drawn_by_pytorch")
def test_gradients_are_those_of_the_mask_that_the_forward_drew():
    q, k, v = inputs()
    eye = torch.eye(64, device="cuda", dtype=torch.bfloat16)[None, :, None].expand(2, 64, 4, 64).contiguous()
    torch.manual_seed(5)
    keep = (om.attention(q, k, eye, dropout_p=0.25) != 0).double().permute(0, 2, 1, 3)  # probabilities that were kept, [B, H, Sq, Sk]
    assert abs(keep.mean().item() - 0.75) < 0.02
    torch.manual_seed(5)
    om.reset_stats()
    out = om.attention(q, k, v, dropout_p=0.25)
    assert {row.implementation for row in om.stats().rows} == {"vendor:sdpa"}
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wide = [t.detach().double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    exact = ((wide[0] @ wide[1].mT / 8).softmax(-1) * keep / 0.75) @ wide[2]
    expected = torch.autograd.grad(exact, wide, dout.double().transpose(1, 2))
    for ours, r in zip((out, *grads), (exact, *expected), strict=True):
        assert (ours.double().transpose(1, 2) - r).norm() < 0.005 * r.norm()


@pytest.mark.gpu
@GPU
@pytest.mark.usefixtures("drawn_by_pytorch")
def test_two_calls_draw_two_masks_and_the_generators_state_repeats_one():
    q, k, v = inputs()
    torch.manual_seed(7)
    first, second = om.attention(q, k, v, dropout_p=0.5), om.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(7)
    assert torch.equal(first, om.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


@pytest.mark.gpu
@GPU
@pytest.mark.usefixtures("drawn_by_pytorch")
def test_checkpointing_recomputes_with_the_same_mask():
    q, k, v = inputs()

    def call(q):
        return om.attention(q, k, v, dropout_p=0.5).float().square().sum()

    torch.manual_seed(9)
    (plain,) = torch.autograd.grad(call(q), q)
    torch.manual_seed(9)
    (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False), q)
    assert (plain - again).abs().max() <= 0.01 * plain.abs().max()


@pytest.mark.gpu
@GPU
def test_at_determinism_level_one_our_own_kernel_draws_by_key():
    q, k, v = inputs()
    om.reset_stats()
    with om.determinism(1):
        om.attention(q, k, v, dropout_p=0.5)
    assert {row.implementation for row in om.stats().rows} == {"triton_gpu"}
