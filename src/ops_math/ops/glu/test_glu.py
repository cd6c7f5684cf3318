"""What is special to the gated units and GELU; the general contract is tested over CASES in tests/conformance."""

from __future__ import annotations

import math

import pytest
import torch

import ops_math as om
from ops_math.ops.glu.op import OP
from ops_math.ops.glu.op_gelu import OP as GELU

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


@pytest.mark.parametrize("implementation", ["eager", "vendor"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packing", ["", "halves"])
def test_the_backward_gives_the_output_again_and_the_same_gradients(activation, packing, implementation):
    dy, gate, up = normal(9, 40), normal(9, 40, scale=2.0), normal(9, 40)
    inputs = (torch.cat((gate, up), -1), None) if packing else (gate, up)
    with om.force(glu=implementation):
        y, act = OP.fwd(*inputs, activation, packing, True, torch.float32)
        usual = OP.bwd(dy, *inputs, None, activation, packing, True, True, False)
        kept = OP.bwd(dy, *inputs, act, activation, packing, True, True, True)
        again = OP.bwd(dy, *inputs, None, activation, packing, True, True, True)
    assert usual[2].numel() == 0
    for one in (kept, again):
        assert torch.equal(one[2], y)
        assert torch.equal(one[0], usual[0])
        assert torch.equal(one[1], usual[1])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_backward_of_gelu_gives_the_output_again(approximate):
    x, bias, dy = normal(9, 40), normal(40), normal(9, 40)
    with om.force(gelu="eager"):
        dx, dbias, y = GELU.bwd(dy, x, bias, approximate, True, True, True)
        assert torch.equal(y, om.gelu(x, bias, approximate=approximate))
        alone = GELU.bwd(dy, x, bias, approximate, False, False, True)
        no_dx = GELU.bwd(dy, x, bias, approximate, False, True, True)
    assert torch.equal(alone[2], y)
    assert alone[0].numel() == alone[1].numel() == 0
    assert torch.equal(no_dx[1], dbias)
    assert torch.equal(no_dx[2], y)
    assert torch.allclose(dbias, dx.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("implementation", ["eager"])
def test_packed_inputs_give_the_bits_of_separate_ones_and_one_packed_gradient(interleaved, implementation):
    gate, up, dy = normal(7, 33), normal(7, 33), normal(7, 33)
    join = (lambda a, b: torch.stack((a, b), -1).flatten(-2)) if interleaved else (lambda a, b: torch.cat((a, b), -1))
    packed = join(gate, up).requires_grad_()
    gate.requires_grad_(), up.requires_grad_()
    with om.force(glu=implementation):
        y, y_packed = om.swiglu(gate, up), om.swiglu_packed(packed, interleaved=interleaved)
        (dpacked,) = torch.autograd.grad(y_packed, packed, dy)
        grads = torch.autograd.grad(y, (gate, up), dy)
    assert torch.equal(y, y_packed)
    assert torch.equal(dpacked, join(*grads))
    assert dpacked.is_contiguous()


@pytest.mark.parametrize("implementation", ["eager", "vendor"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_of_any_finite_size_give_finite_results(activation, implementation):
    ends = [0.0, 1e-45, 1e-38, 88.0, 89.0, 104.0, 1e4, 1e18]
    gate = torch.tensor(ends + [-e for e in ends])
    with om.force(glu=implementation):
        y, _ = OP.fwd(gate, torch.ones_like(gate), activation, "", False, torch.float32)
        dgate, dup, _ = OP.bwd(torch.ones_like(gate), gate, torch.ones_like(gate), None, activation, "", True, True, False)
    assert torch.isfinite(y).all()
    assert torch.isfinite(dgate).all()
    assert torch.equal(y[3:8], gate[3:8])
    assert torch.equal(dgate[3:8], torch.ones(5))
    assert y[12:].abs().max() < 1e-36
    assert torch.equal(dup, y)


def test_infinite_gates_do_what_pytorch_does():
    gate = torch.tensor([math.inf, -math.inf, math.nan])
    ours, theirs = om.swiglu(gate, torch.ones(3)), torch.nn.functional.silu(gate)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_the_bias_gradient_is_summed_wide():
    rows = 4096  # in bf16 a sum of ones stops at 256
    x, bias = torch.full((rows, 3), 30.0, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    om.gelu(x, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((3,), float(rows), dtype=torch.bfloat16))


def test_under_autocast_the_output_has_its_dtype_and_gradients_that_of_the_inputs():
    gate, up = normal(5, 16).requires_grad_(), normal(5, 16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = om.swiglu(gate, up)
        z = om.gelu(gate, up[0])
    assert y.dtype == z.dtype == torch.bfloat16
    (y.float().sum() + z.float().sum()).backward()
    assert gate.grad.dtype == up.grad.dtype == torch.float32


def test_on_a_cpu_as_much_is_saved_as_by_pytorch_and_no_more():
    def saved(fn):
        sizes = {}
        gate, up = normal(8, 64).requires_grad_(), normal(8, 64).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t):
            y = fn(gate, up)
        del y
        return sum(sizes.values())

    assert saved(om.swiglu) <= saved(lambda g, u: torch.nn.functional.silu(g) * u)


X = torch.zeros(4, 6)
REFUSED = {
    "another shape": (lambda: om.swiglu(X, X[:, :5]), r"swiglu: up must be of shape \[4, 6\], as gate is; got shape \[4, 5\]"),
    "broadcasting": (lambda: om.geglu(X, X[:1]), r"geglu: up must be of shape \[4, 6\], as gate is; got shape \[1, 6\]"),
    "integers": (lambda: om.swiglu(X.long(), X), r"swiglu: gate must be floating point \(fp32, bf16, fp16 or fp64\); got int64"),
    "an odd width": (
        lambda: om.swiglu_packed(X[:, :5]),
        r"swiglu_packed: gate_up must be of an even last dimension \(gate and up\); got shape \[4, 5\]\. "
        r"Concatenate gate and up along the last dimension\.",
    ),
    "a scalar": (lambda: om.geglu_packed(torch.tensor(1.0)), r"geglu_packed: gate_up must be a tensor with at least one dimension"),
    "an unknown form": (lambda: om.geglu(X, X, approximate="erf"), r"geglu: approximate must be one of 'none', 'tanh'; got 'erf'"),
    "a bias of another width": (
        lambda: om.gelu(X, X[0, :5]),
        r"gelu: bias must be of shape \[6\] \(the last dimension of x\); got shape \[5\]",
    ),
    "a list": (lambda: om.gelu([1.0]), r"gelu: x must be a tensor; got list"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_does_not_fit_is_refused_in_words(what):
    call, words = REFUSED[what]
    with pytest.raises(om.ArgumentError, match=words):
        call()
