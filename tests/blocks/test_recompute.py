"""`om.recompute_norms`: the same gradients bit for bit, less that is kept, and no change of a kept tensor goes unseen."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ops_math as om
from ops_math import recompute
from ops_nn.adopt import adopt
from ops_nn.models.presets import build


def a_step(name, autocast=False):
    model = build(name, vocab_size=128, seed=1).eval()  # no dropout: both runs see the same numbers
    adopt(model)
    ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(2))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(ids, labels=ids).loss

    return model, forward


def gradients(model, forward, lean):
    for p in model.parameters():
        p.grad = None
    if lean:
        with om.recompute_norms() as found:
            loss = forward()
    else:
        loss, found = forward(), None
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], found


@pytest.mark.parametrize(("name", "autocast"), [("llama-tiny", False), ("llama-tiny", True), ("bert-tiny", False), ("bert-tiny", True)])
def test_gradients_keep_their_bits_and_norm_outputs_are_not_kept(name, autocast):
    model, forward = a_step(name, autocast)
    plain, _ = gradients(model, forward, False)
    ours, found = gradients(model, forward, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    layers = model.config.num_layers
    assert found.tensors >= 2 * layers - 1  # of BERT's last norm a plain module saves a copy of its own
    assert f"{found.tensors} norm outputs" in repr(found)


def kept_bytes(forward, lean):
    """Bytes of the distinct storages that autograd holds after a forward."""
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    if not lean:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            forward()
        return sum(seen.values())
    scopes = []
    original = recompute._Scope.pack

    def spy(self, t):
        found = original(self, t)
        scopes.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute._Scope, "pack", spy)
        with om.recompute_norms():
            forward()
    for found in scopes:
        sources = found.recipe.sources if hasattr(found, "recipe") else (found,)
        for source in sources:
            pack(source.tensor)
    return sum(seen.values())


@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny"])
def test_less_is_kept_recipes_included(name):
    model, forward = a_step(name)
    before, after = kept_bytes(forward, False), kept_bytes(forward, True)
    _, found = gradients(model, forward, True)
    assert 0.95 * found.bytes <= before - after <= found.bytes  # a recipe may hold statistics, or a stream that nothing else keeps


def a_norm_and_a_product(width=32):
    x = torch.randn(8, width, requires_grad=True)
    weight, w = torch.ones(width, requires_grad=True), torch.randn(width, width, requires_grad=True)
    return x, weight, w


def test_the_product_s_gradient_is_that_of_the_output_made_again():
    x, weight, w = a_norm_and_a_product()
    with om.recompute_norms() as found:
        z = om.rms_norm(x, weight) @ w
    z.sum().backward()
    assert found.tensors == 1
    again = om.rms_norm(x.detach(), weight.detach())
    assert torch.equal(w.grad, again.t() @ torch.ones_like(z))


@pytest.mark.parametrize("which", ["weight", "x"])
def test_a_source_written_to_before_the_backward_is_an_error(which):
    x, weight, w = a_norm_and_a_product()
    source = x.clone()
    with om.recompute_norms():
        z = om.rms_norm(source, weight) @ w
    with torch.no_grad():
        (weight if which == "weight" else source).mul_(2.0)
    with pytest.raises(om.ArgumentError, match="recompute_norms: saved tensor must be unchanged until the backward has run"):
        z.sum().backward()


def test_any_other_saved_tensor_written_to_is_an_error_too():
    x, weight, w = a_norm_and_a_product()
    with om.recompute_norms():
        z = om.rms_norm(x, weight) @ w
    with torch.no_grad():
        w.mul_(2.0)
    with pytest.raises(om.ArgumentError, match="saved for the backward"):
        z.sum().backward()


def test_an_output_written_to_in_the_forward_is_kept_as_it_is():
    y, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with om.recompute_norms() as found:
        recompute.offer(y, torch.zeros_like, y.clone())
        y.mul_(3.0)
        z = y @ w
    assert found.tensors == 0
    z.sum().backward()
    assert torch.equal(w.grad, y.t() @ torch.ones_like(z))


def test_a_dead_output_whose_memory_is_used_again_is_not_taken_for_it():
    x, weight, w = a_norm_and_a_product()
    with om.recompute_norms() as found:
        om.rms_norm(x, weight)
        others = [torch.randn(8, 32) for _ in range(64)]  # one of them lies where the norm's output lay, mostly
        total = sum((o @ w).sum() for o in others)
    assert found.tensors == 0
    total.backward()
    torch.testing.assert_close(w.grad, sum(o.t() @ torch.ones(8, 32) for o in others))


def test_two_backwards_and_a_backward_outside_give_the_same():
    x, weight, w = a_norm_and_a_product()
    with om.recompute_norms():
        z = om.rms_norm(x, weight) @ w
    first = torch.autograd.grad(z.sum(), w, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(z.sum(), w)[0])


def test_an_inner_context_counts_its_own_and_gives_the_outer_one_back():
    x, weight, w = a_norm_and_a_product()
    with om.recompute_norms() as outer:
        with om.recompute_norms() as inner:
            om.rms_norm(x, weight) @ w
        om.rms_norm(x, weight) @ w
    assert (outer.tensors, inner.tensors) == (1, 1)
    om.rms_norm(x, weight) @ w
    assert outer.tensors == 1


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_run_in_the_recomputation_what_they_ran_before(reentrant, inside):
    model, forward = a_step("llama-tiny")
    plain, _ = gradients(model, forward, False)
    model.zero_grad()
    with om.recompute_norms():
        loss = checkpoint(lambda _: forward(), torch.zeros(1, requires_grad=True), use_reentrant=reentrant)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(plain, [loss.detach(), *(p.grad for p in model.parameters())], strict=True))


def test_a_graph_that_is_never_run_back_is_freed():
    with om.recompute_norms():
        y = torch.randn(4, requires_grad=True).exp()  # its node saves its own output
    seen = weakref.ref(y)
    del y
    gc.collect()
    assert seen() is None
