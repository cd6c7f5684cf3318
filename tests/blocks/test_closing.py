"""A branch closed in one autograd node gives the bits of the same operators called one by one, whatever needs a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ops_math as om
from ops_math.blocks import closing, norms, packed, residual

LAYER_NORM = "layer_norm"


@pytest.fixture
def step_by_step(monkeypatch):
    """Switches closing off; counts how often a branch was closed before."""
    closed = []
    close = residual._close

    def counted(*args):
        found = close(*args)
        closed.append(found is not None)
        return found

    monkeypatch.setattr(residual, "_close", counted)

    def off():
        monkeypatch.setattr(residual, "_close", lambda *args: None)

    return off, closed


def encoder(dropout=0.0, activation="gelu", norm_first=True):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, activation=activation, batch_first=True, norm_first=norm_first)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer.train()


def both_blocks(layer, x, rng, pre):
    key = {} if rng is None else {"rng": rng}
    if pre:
        pair = om.residual_attention(x, layer.norm1, layer, next_norm=layer.norm2, **key)
        return om.residual_mlp(pair, None, layer, next_norm=layer.norm1, **key)
    x = om.residual_attention(x, layer.norm1, layer, norm_first=False, **key)
    return (om.residual_mlp(x, layer.norm2, layer, norm_first=False, **key),)


def run(layer, x, rng, pre, frozen=()):
    for name, p in layer.named_parameters():
        p.requires_grad_(name not in frozen)
        p.grad = None
    x = x.clone().requires_grad_("x" not in frozen)
    outputs = both_blocks(layer, x, rng, pre)
    torch.autograd.backward(outputs, [torch.sin(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape).to(y.dtype) for y in outputs])
    return [*outputs, x.grad, *(p.grad for p in layer.parameters())]


FROZEN = {
    "all trained": (),
    "x": ("x",),
    "weights": ("self_attn.out_proj.weight", "linear2.weight"),
    "biases": ("self_attn.out_proj.bias", "linear2.bias", "linear1.bias"),
    "norms": ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"),
    "a norm's bias": ("norm2.bias",),
    "first product": ("linear1.weight", "linear1.bias"),
}


@pytest.mark.parametrize("in_norm", [False, True], ids=["bias in the product", "bias in the norm"])
@pytest.mark.parametrize("pre", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_the_bits_are_those_of_the_steps(monkeypatch, step_by_step, pre, frozen, in_norm):
    off, closed = step_by_step
    monkeypatch.setattr(norms, "adds_bias", lambda kind, x: in_norm and kind == LAYER_NORM)
    layer, x = encoder(norm_first=pre), torch.randn(2, 6, 32)
    ours = run(layer, x, None, pre, FROZEN[frozen])
    assert closed == [True, True]
    off()
    for a, b in zip(ours, run(layer, x, None, pre, FROZEN[frozen]), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("pre", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("autocast", [False, True])
def test_with_dropout_by_key_and_autocast_too(step_by_step, pre, autocast):
    off, closed = step_by_step
    layer, x, rng = encoder(dropout=0.4, norm_first=pre), torch.randn(2, 6, 32), om.Rng(7)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(run(layer, x, rng, pre))
        off()
    assert closed == [True, True]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_another_key_gives_another_mask(step_by_step):
    layer, x = encoder(dropout=0.4, norm_first=False), torch.randn(2, 6, 32)
    assert not torch.equal(run(layer, x, om.Rng(7), False)[0], run(layer, x, om.Rng(8), False)[0])


def test_an_rms_norm_closes_and_with_dropout_does_not(step_by_step):
    off, closed = step_by_step
    torch.manual_seed(0)
    mlp, norm = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)), nn.RMSNorm(16)
    x = torch.randn(3, 5, 16, requires_grad=True)

    def grads(p):
        total, y = om.residual_mlp(x, nn.Identity(), mlp, next_norm=norm, dropout_p=p, rng=om.Rng(1))
        return [total, y, *torch.autograd.grad((total * y.sin()).sum(), [x, *mlp.parameters(), *norm.parameters()])]

    ours = [*grads(0.0), *grads(0.3)]
    assert closed == [True, False]
    off()
    for a, b in zip(ours, [*grads(0.0), *grads(0.3)], strict=True):
        assert torch.equal(a, b)


def test_only_one_of_two_results_is_used():
    layer, x = encoder(), torch.randn(2, 6, 32, requires_grad=True)
    for place in (0, 1):
        grads = torch.autograd.grad(both_blocks(layer, x, None, True)[place].square().sum(), [x, layer.linear2.weight])
        assert all(g.abs().sum() > 0 for g in grads)


def test_packed_heads_are_the_products_as_heads():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float32, requires_grad=True)
    affines = tuple((torch.randn(n, 16, requires_grad=True), torch.randn(n, requires_grad=True)) for n in (16, 8, 8))
    flat = [t for pair in affines for t in pair]
    with torch.autocast("cpu", torch.bfloat16):
        ours = packed.packed_heads(x, affines, 4)
        plain = [torch.nn.functional.linear(x, w, b).unflatten(-1, (-1, 4)).transpose(1, 2) for w, b in affines]
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    dys = [torch.randn_like(y) for y in plain]
    mine = torch.autograd.grad(ours, [x, *flat], dys)
    theirs = torch.autograd.grad(plain, [x, *flat], dys)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_packed_heads_of_an_empty_batch_are_empty():
    x, weights = torch.randn(0, 5, 16, requires_grad=True), [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        heads = packed.packed_heads(x, tuple((w, None) for w in weights), 4)
    assert [tuple(h.shape) for h in heads] == [(0, 2, 5, 4)] * 3
    grads = torch.autograd.grad(sum(h.sum() for h in heads), [x, *weights])
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_product_of_heads_closes_as_that_of_rows(heads_first):
    torch.manual_seed(0)
    wide = {"dtype": torch.float64, "requires_grad": True}
    a, x = torch.randn(2, 5, 4, 4, **wide), torch.randn(2, 5, 8, **wide)
    w, b, g, s = torch.randn(8, 16, **wide), torch.randn(8, **wide), torch.randn(8, **wide), torch.randn(8, **wide)
    ending = closing.Ending(norms.Norm(LAYER_NORM, g, s, 1e-5), x, 0.0, None, False)
    given = a.transpose(1, 2) if heads_first else a.flatten(-2)
    closed = closing.close_product(given, (w, b), ending, heads_first)
    assert closed.narrow is None
    ours = closed.total, closed.y
    total = x + torch.nn.functional.linear(a.flatten(-2), w, b)
    plain = total, torch.nn.functional.layer_norm(total, (8,), g, s)
    dys = [torch.randn_like(y) for y in plain]
    for mine, theirs in zip([*ours, *torch.autograd.grad(ours, [a, x, w, b, g, s], dys)],
                            [*plain, *torch.autograd.grad(plain, [a, x, w, b, g, s], dys)], strict=True):  # fmt: skip
        torch.testing.assert_close(mine, theirs)


def test_a_narrowed_stream_is_the_stream_and_its_cast():
    layer, x, found = encoder(norm_first=False), torch.randn(2, 6, 32), []
    for narrow in (True, False):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), om.force(layer_norm="eager"):  # PyTorch's own stores no second copy
            h = om.residual_attention(leaf, layer.norm1, layer, norm_first=False, narrow=narrow)
            assert isinstance(h, om.Narrowed) == narrow
            if narrow:
                assert (h.x.dtype, h.narrow.dtype) == (torch.float32, torch.bfloat16)
                assert torch.equal(h.narrow, h.x.bfloat16())
            y = om.residual_mlp(h, layer.norm2, layer, norm_first=False)
        y.sin().sum().backward()
        found.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    assert torch.equal(found[0][0], found[1][0])
    for a, b in zip(*found, strict=True):  # the two gradients of the stream are summed in fp32 either way, here without a rounding between
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_a_module_that_runs_as_it_is_takes_the_stream_itself():
    class Own(nn.Module):
        def forward(self, h):
            assert h.dtype == torch.float32
            return h * 2

    layer, x = encoder(norm_first=False), torch.randn(2, 6, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        h = om.residual_attention(x, layer.norm1, layer, norm_first=False, narrow=True)
        om.residual_mlp(h, layer.norm2, Own(), norm_first=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"narrow": True}, "norm_first must be False with narrow=True or a Narrowed pair; got True with narrow=True"),
        ({"narrow": True, "norm_first": False, "next_norm": nn.LayerNorm(32)}, "narrow must be False with next_norm; got True"),
    ],
)
def test_options_that_exclude_each_other(options, words):
    layer = encoder(norm_first=options.get("norm_first", True))
    with pytest.raises(om.ArgumentError, match=words):
        om.residual_mlp(torch.randn(2, 6, 32), layer.norm2, layer, **options)


def test_a_debugger_sees_one_tensor_in_and_one_out():
    layer, x = encoder(norm_first=False), torch.randn(2, 6, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        h = om.residual_attention(x, layer.norm1, layer, norm_first=False, narrow=True)
        with om.debug(on_error="raise") as debugger:
            y = om.residual_mlp(h, layer.norm2, layer, norm_first=False, narrow=True)
            assert isinstance(y, torch.Tensor)
            y.sum().backward()
    assert len(debugger.report().rows) > 5
