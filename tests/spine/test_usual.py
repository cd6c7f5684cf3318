"""A call like one that passed its checks passes without them; any other is looked at, and answered as ever."""

from __future__ import annotations

import math

import pytest
import torch

import ops_math as om
from ops_math import usual
from ops_math.ops.rms_norm import op as rms

CALLS = {
    "rms_norm": lambda x, w: om.rms_norm(x, w),
    "add_rms_norm": lambda x, w: om.add_rms_norm(x, torch.ones_like(x), w),
    "layer_norm": lambda x, w: om.layer_norm(x, w),
    "add_layer_norm": lambda x, w: om.add_layer_norm(x, torch.ones_like(x), w),
    "gelu": lambda x, w: om.gelu(x, w),
}
BAD = {
    "an integer input": (lambda: torch.ones(4, 16, dtype=torch.int32), lambda: torch.ones(16)),
    "a weight of another width": (lambda: torch.randn(4, 16), lambda: torch.ones(8)),
    "an integer weight": (lambda: torch.randn(4, 16), lambda: torch.ones(16, dtype=torch.int64)),
    "a weight elsewhere": (lambda: torch.randn(4, 16), lambda: torch.ones(16, device="meta")),
    "a scalar": (lambda: torch.tensor(1.0), lambda: torch.ones(16)),
    "a list": (lambda: [1.0] * 16, lambda: torch.ones(16)),
}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    for known in (rms._RMS_NORM, rms._ADD_RMS_NORM):
        monkeypatch.setattr(known, "known", ())


@pytest.fixture
def checked(monkeypatch):
    """The calls that were checked."""
    seen, check = [], rms._check
    monkeypatch.setattr(rms, "_check", lambda *args: seen.append(args[0]) or check(*args))
    return seen


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_is_named_in_the_same_words_after_many_good_calls(name, bad):
    call, (x, w) = CALLS[name], BAD[bad]
    with pytest.raises((om.ArgumentError, TypeError)) as before:
        call(x(), w())
    for _ in range(3):
        call(torch.randn(4, 16), torch.ones(16))
    with pytest.raises(type(before.value)) as after:
        call(x(), w())
    assert str(after.value) == str(before.value)


@pytest.mark.parametrize("eps", [-1.0, math.inf, math.nan, "1e-6", None])
def test_a_bad_number_is_named_after_good_calls(eps):
    for _ in range(3):
        om.rms_norm(torch.randn(4, 16))
    with pytest.raises((om.ArgumentError, TypeError)):
        om.rms_norm(torch.randn(4, 16), eps=eps)


def test_a_unit_of_another_form_is_named_after_good_calls():
    x = torch.randn(4, 16)
    for _ in range(3):
        om.swiglu(x, x.clone())
        om.geglu(x, x.clone())
    with pytest.raises(om.ArgumentError, match="geglu: approximate must be one of 'none', 'tanh'"):
        om.geglu(x, x.clone(), approximate="silu")


def test_the_second_call_of_a_kind_is_not_checked_again(checked):
    for grad in (False, True):
        checked.clear()
        for _ in range(3):
            om.rms_norm(torch.randn(4, 16, requires_grad=grad), torch.ones(16))
        assert checked == ["rms_norm"]


KINDS = {
    "another shape": lambda: om.rms_norm(torch.randn(5, 16), torch.ones(16)),
    "another dtype": lambda: om.rms_norm(torch.randn(4, 16, dtype=torch.float64), torch.ones(16)),
    "no weight": lambda: om.rms_norm(torch.randn(4, 16)),
    "a parameter": lambda: om.rms_norm(torch.randn(4, 16), torch.nn.Parameter(torch.ones(16))),
    "another eps": lambda: om.rms_norm(torch.randn(4, 16), torch.ones(16), eps=1e-5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_another_kind_is_checked(kind, checked):
    om.rms_norm(torch.randn(4, 16), torch.ones(16))
    checked.clear()
    KINDS[kind]()
    assert checked == ["rms_norm"]


def test_the_dtype_follows_autocast_in_and_out():
    x = torch.randn(4, 16)
    dtypes = []
    for _ in range(2):
        dtypes.append(om.rms_norm(x).dtype)
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(om.rms_norm(x).dtype)
        with torch.autocast("cpu", torch.float16):
            dtypes.append(om.rms_norm(x).dtype)
            with torch.autocast("cpu", enabled=False):
                dtypes.append(om.rms_norm(x).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.float32] * 2


def test_a_graph_is_made_when_one_is_asked_for_and_not_otherwise():
    made = []
    for _ in range(2):
        for grad, learned in ((True, True), (False, True), (True, False)):
            with torch.set_grad_enabled(grad):
                made.append(om.rms_norm(torch.randn(4, 16, requires_grad=learned)).grad_fn is not None)
        with torch.inference_mode():
            made.append(om.rms_norm(torch.randn(4, 16)).requires_grad)
    assert made == [True, False, False, False] * 2


def test_a_call_that_learned_nothing_is_no_pattern_for_one_that_learns():
    x = torch.randn(4, 16, requires_grad=True)
    with torch.no_grad():
        for _ in range(2):
            om.rms_norm(x)
    assert om.rms_norm(x).grad_fn is not None


def test_switching_off_and_on_is_seen_at_the_next_call(monkeypatch):
    x = torch.randn(4, 16)
    plain = []
    monkeypatch.setattr(rms.plain, "rms_norm", lambda *args, **kwargs: plain.append(1) or x)
    for _ in range(2):
        om.rms_norm(x)
        with om.enabled(False):
            om.rms_norm(x)
            om.rms_norm(x)
    assert plain == [1] * 4


def test_a_tangent_is_refused_after_good_calls():
    x = torch.randn(4, 16)
    for _ in range(2):
        om.rms_norm(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(om.UnsupportedError, match="forward-mode AD"):
            om.rms_norm(dual)


def test_torch_func_is_refused_after_good_calls():
    x = torch.randn(4, 16)
    for _ in range(2):
        om.rms_norm(x)
    with pytest.raises(om.UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda t: om.rms_norm(t).sum())(x)


def test_what_a_transform_left_behind_is_unwrapped_as_pytorch_does():
    left = []
    torch.func.grad(lambda t: left.append(t) or t.sum())(torch.randn(4, 16))
    weight = torch.ones(16, requires_grad=True)
    for _ in range(3):
        assert om.rms_norm(left[0], weight).grad_fn is not None
        assert om.rms_norm(torch.randn(4, 16), weight).grad_fn is not None


def test_a_setting_that_a_refusal_hangs_on_is_looked_at():
    x, bias = torch.randn(4, 16), torch.ones(16, requires_grad=True)
    for _ in range(2):
        om.gelu(x, bias)
    with om.determinism(3), pytest.raises(om.UnsupportedError, match="gelu at determinism level 3"):
        om.gelu(x, bias)


def test_kinds_are_bounded_and_one_that_returns_is_remembered_in_the_end(checked):
    for rows in range(1, 20):
        om.rms_norm(torch.randn(rows, 16))
    assert len(rms._RMS_NORM.known) == usual._KINDS_KEPT
    checked.clear()
    for _ in range(3 * usual._AGAIN):
        om.rms_norm(torch.randn(19, 16))
    assert len(checked) <= usual._AGAIN


def test_recomputed_norms_are_offered_after_good_calls():
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    for _ in range(2):
        om.rms_norm(x)
    want = torch.autograd.grad(torch.nn.functional.linear(om.rms_norm(x), weight).sum(), weight)[0]
    with om.recompute_norms() as done:
        y = torch.nn.functional.linear(om.rms_norm(x), weight).sum()
    assert done.tensors
    assert torch.equal(torch.autograd.grad(y, weight)[0], want)


def test_gradients_are_those_of_the_whole_way():
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    dy = torch.randn(4, 16)
    found = [torch.autograd.grad(om.rms_norm(x, weight), (x, weight), dy) for _ in range(3)]
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
    want = torch.autograd.grad(torch.nn.functional.rms_norm(x, (16,), weight, 1e-6), (x, weight), dy)
    for a, b in zip(found[-1], want, strict=True):
        torch.testing.assert_close(a, b)


def test_torch_jit_is_met_after_good_calls():
    x, weight, constant = torch.randn(4, 16), torch.randn(16, requires_grad=True), torch.randn(16)
    for _ in range(3):
        om.rms_norm(x, weight)
        with torch.no_grad():
            om.rms_norm(x, constant)
    with pytest.raises(om.UnsupportedError, match=r"ops_math under torch\.jit\.trace"):
        torch.jit.trace(lambda t, w: om.rms_norm(t, w), (x, weight))
    with torch.no_grad():
        traced = torch.jit.trace(lambda t: om.rms_norm(t, constant), (x,))
    assert "ops_math::rms_norm_fwd" in str(traced.graph)


def test_compiled_and_exported_calls_hold_the_operator_after_good_calls():
    x = torch.randn(4, 16)
    for _ in range(3):
        om.rms_norm(x)
    module = torch.nn.Module()
    module.forward = lambda t: om.rms_norm(t)
    program = torch.export.export(module, (x,))
    assert torch.ops.ops_math.rms_norm_fwd.default in [n.target for n in program.graph.nodes]
