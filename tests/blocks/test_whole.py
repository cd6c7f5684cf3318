"""An attention block as one autograd node gives the bits of its steps one by one, whatever learns, and is left where it cannot be one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math.blocks import whole
from ops_math.blocks.streams import Unsummed
from ops_nn.models.llama import LlamaAttention, LlamaConfig, LlamaRMSNorm, LlamaRotaryEmbedding

B, S, C = 2, 6, 32
CONFIG = LlamaConfig(16, C, 48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)


class Holder(nn.Module):
    """The parts around one attention."""

    def __init__(self, dtype, biased):
        super().__init__()
        self.attn, self.before, self.after = LlamaAttention(CONFIG), LlamaRMSNorm(C, 1e-5), LlamaRMSNorm(C, 1e-6)
        if biased:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                old = getattr(self.attn, name)
                setattr(self.attn, name, nn.Linear(old.in_features, old.out_features))
        self.to(dtype)
        for p in self.parameters():
            nn.init.normal_(p, 0.1 if p.dim() == 1 else 0.0, 0.3)


def inputs(dtype, unsummed):
    torch.manual_seed(1)
    x, branch = (torch.randn(B, S, C, dtype=dtype, requires_grad=True) for _ in range(2))
    return (Unsummed(x, branch), [x, branch]) if unsummed else (x, [x])


def run(holder, x, tables, **options):
    return om.residual_attention(x, holder.before, holder.attn, next_norm=holder.after, position_embeddings=tables, **options)


def gradients(outs, learning, used=(True, True)):
    total = sum(o.double().square().sum() * (i + 1) for i, (o, use) in enumerate(zip(outs, used, strict=True)) if use)
    return torch.autograd.grad(total, learning, allow_unused=True)


def both_ways(monkeypatch, holder, made, tables, learning, **options):
    """(outputs, gradients) as one node and step by step; the first is seen to be one node."""
    found = []
    for one in (True, False):
        x, leaves = made()
        with monkeypatch.context() as patch:
            if not one:
                patch.setattr(whole, "takes", lambda *args: False)
            outs = run(holder, x, tables, **options)
        assert (type(outs[0].grad_fn).__name__ == "_BlockBackward") == one
        found.append((outs, [*leaves, *learning]))
    return found


def assert_same_bits(found, used=(True, True)):
    (outs, learning), (steps, step_learning) = found
    assert all(torch.equal(a, b) for a, b in zip(outs, steps, strict=True))
    for a, b in zip(gradients(outs, learning, used), gradients(steps, step_learning, used), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unsummed", [True, False], ids=["unsummed", "tensor"])
@pytest.mark.parametrize("biased", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("turned", [True, False], ids=["rotary", "no rotary"])
def test_one_node_gives_the_bits_of_the_steps(dtype, unsummed, biased, turned, monkeypatch):
    holder = Holder(dtype, biased)
    tables = LlamaRotaryEmbedding(CONFIG)(torch.empty(B, S, C, dtype=dtype)) if turned else None
    assert_same_bits(both_ways(monkeypatch, holder, lambda: inputs(dtype, unsummed), tables, list(holder.parameters())))


@pytest.mark.parametrize("used", [(True, False), (False, True)], ids=["the sum alone", "the norm alone"])
def test_a_result_that_nobody_uses_sends_nothing_back(used, monkeypatch):
    holder = Holder(torch.float32, False)
    assert_same_bits(both_ways(monkeypatch, holder, lambda: inputs(torch.float32, True), None, list(holder.parameters())), used)


@pytest.mark.parametrize("only", ["before", "attn.q_proj", "attn.o_proj", "after", "nothing of the module"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(only, monkeypatch):
    holder = Holder(torch.float32, True)
    for name, p in holder.named_parameters():
        p.requires_grad_(name.startswith(only))
    learning = [p for p in holder.parameters() if p.requires_grad]
    assert_same_bits(both_ways(monkeypatch, holder, lambda: inputs(torch.float32, True), None, learning))


def test_only_the_products_learn_and_the_stream_does_not(monkeypatch):
    holder = Holder(torch.float32, False)
    for name, p in holder.named_parameters():
        p.requires_grad_("_proj" in name)

    def made():
        return Unsummed(*(t.detach() for t in inputs(torch.float32, True)[1])), []

    assert_same_bits(both_ways(monkeypatch, holder, made, None, [p for p in holder.parameters() if p.requires_grad]))


def test_not_causal_is_one_node_too(monkeypatch):
    holder = Holder(torch.float32, False)
    assert_same_bits(both_ways(monkeypatch, holder, lambda: inputs(torch.float32, True), None, [], causal=False))


STEPS = {
    "a window": {"window": (2, 0)},
    "a mask": {"mask": torch.ones(S, S, dtype=torch.bool)},
    "padding": {"key_padding_mask": torch.ones(B, S, dtype=torch.bool)},
    "positions from the first key": {"causal": "top_left"},
    "dropout of the branch": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("why", STEPS)
def test_what_one_node_does_not_know_goes_step_by_step(why):
    holder = Holder(torch.float32, False)
    outs = run(holder, inputs(torch.float32, True)[0], None, **STEPS[why])
    assert "_Block" not in type(outs[1].grad_fn).__name__


def test_a_part_that_learns_alone_among_the_products_goes_step_by_step():
    holder = Holder(torch.float32, False)
    for name, p in holder.named_parameters():
        p.requires_grad_("q_proj" in name)
    x = Unsummed(*(t.detach() for t in inputs(torch.float32, True)[1]))
    y, _ = run(holder, x, None)
    assert "_Block" not in type(y.grad_fn).__name__
    (dq,) = torch.autograd.grad(y.sum(), [holder.attn.q_proj.weight])
    assert dq.abs().max() > 0


def test_weights_that_lie_together_are_one_product():
    holder = Holder(torch.float32, False)
    om.pack_weights(holder)
    _, y = run(holder, inputs(torch.float32, True)[0], None)
    assert "_Block" not in type(y.grad_fn).__name__


def test_a_large_stream_goes_step_by_step_since_memory_counts_there(monkeypatch):
    monkeypatch.setattr(whole, "MOST", B * S * C - 1)
    _, y = run(Holder(torch.float32, False), inputs(torch.float32, True)[0], None)
    assert "_Block" not in type(y.grad_fn).__name__


def test_without_gradients_nothing_is_saved():
    holder = Holder(torch.float32, False)
    with torch.no_grad():
        y, _ = run(holder, inputs(torch.float32, True)[0], None)
    assert y.grad_fn is None


def test_a_hook_added_later_is_honoured():
    holder = Holder(torch.float32, False)
    run(holder, inputs(torch.float32, True)[0], None)
    called = []
    holder.attn.q_proj.register_forward_hook(lambda *args: called.append(1))
    tables = LlamaRotaryEmbedding(CONFIG)(torch.empty(B, S, C))
    run(holder, inputs(torch.float32, True)[0], tables)
    assert called == [1]


def test_tables_that_are_too_short_are_refused_in_words():
    holder = Holder(torch.float32, False)
    tables = (torch.ones(S - 1, 8), torch.ones(S - 1, 8))
    with pytest.raises(om.ArgumentError, match=r"^rope: cos must be a table of at least 6 rows, one for each token; got shape \[5, 8\]\."):
        run(holder, inputs(torch.float32, True)[0], tables)


def test_a_weight_changed_between_forward_and_backward_is_noticed():
    holder = Holder(torch.float32, False)
    y, _ = run(holder, inputs(torch.float32, True)[0], None)
    with torch.no_grad():
        holder.attn.k_proj.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("one", [True, False], ids=["one node", "step by step"])
@pytest.mark.parametrize("cast", [False, True], ids=["forward in fp32", "forward in bf16"])
def test_a_backward_under_autocast_gives_the_bits_of_one_outside(cast, one, monkeypatch):
    if not one:
        monkeypatch.setattr(whole, "takes", lambda *args: False)
    torch.manual_seed(0)
    holder = Holder(torch.float32, True)
    tables = LlamaRotaryEmbedding(CONFIG)(torch.zeros(1), torch.arange(S)[None])
    found = []
    for around in (False, True):
        x, leaves = inputs(torch.float32, False)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            outs = run(holder, x, tables)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            found.append(gradients(outs, [*leaves, *holder.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
