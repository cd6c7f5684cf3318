"""A call that nobody watches goes straight to its launcher; whoever watches, or alters tensors, meets the operators in the dispatcher."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import ops_math as om
from ops_math import catalog, dispatch, features
from ops_math.testing.capture import watch

ROUND_TRIP = dispatch._Phase.__call__.__code__


@contextmanager
def round_trips():
    """Calls that came from PyTorch's dispatcher."""
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(1) if event == "call" and frame.f_code is ROUND_TRIP else None)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def x_and_weight(grad=False):
    return torch.randn(4, 16, requires_grad=grad), torch.randn(16, requires_grad=grad)


def step(x, weight):
    y = om.rms_norm(x, weight)
    return torch.autograd.grad(y.square().sum(), [x, weight])


def test_a_call_that_nobody_watches_makes_no_round_trip_through_the_dispatcher():
    with round_trips() as seen:
        om.rms_norm(*x_and_weight())
        step(*x_and_weight(True))
        with torch.inference_mode():
            x, weight = x_and_weight()
        om.rms_norm(x, weight)
        with torch.autocast("cpu", torch.bfloat16):
            om.rms_norm(*x_and_weight())
    assert seen == []


def test_the_round_trip_is_seen_where_it_is_made():
    x, weight = x_and_weight()
    with round_trips() as seen:
        torch.ops.ops_math.rms_norm_fwd(x, None, weight, 1e-6, 0.0, torch.float32)
    assert seen == [1]


def test_the_profiler_sees_forward_and_backward():
    with torch.profiler.profile() as profile:
        step(*x_and_weight(True))
    assert {"ops_math::rms_norm_fwd", "ops_math::rms_norm_bwd"} <= {e.name for e in profile.events()}


def test_a_dispatch_mode_sees_forward_and_backward():
    assert [c.phase for c in watch(lambda: step(*x_and_weight(True))).calls] == ["fwd", "bwd"]


def test_a_function_mode_sees_the_operator():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        om.rms_norm(*x_and_weight())
    assert "ops_math.rms_norm_fwd.default" in seen


def test_make_fx_traces_the_operator():
    graph = make_fx(lambda x, w: om.rms_norm(x, w))(*x_and_weight()).graph
    assert torch.ops.ops_math.rms_norm_fwd.default in [n.target for n in graph.nodes]


def test_torch_jit_traces_the_operator():
    traced = torch.jit.trace(lambda x, w: om.rms_norm(x, w), x_and_weight())
    assert "ops_math::rms_norm_fwd" in str(traced.graph)


class Layer(torch.nn.Module):
    """A block, and an operator that is called by itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = torch.nn.RMSNorm(16), torch.nn.Linear(16, 16)

    def forward(self, x):
        return om.softmax(om.residual_mlp(x, self.norm, self.mlp))


def saved_and_loaded(traced):
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


def test_torch_jit_traces_a_block_that_is_to_run_and_its_file_takes_other_lengths():
    layer, longer = Layer(), torch.randn(3, 7, 16)
    with torch.no_grad():
        traced = torch.jit.trace(layer, (torch.randn(2, 5, 16),))
        assert {"ops_math::rms_norm_fwd", "ops_math::softmax_fwd"} <= {node.kind() for node in traced.inlined_graph.nodes()}
        assert torch.equal(saved_and_loaded(traced)(longer), layer(longer))


def test_a_backward_under_torch_jit_is_refused_with_both_ways_out():
    """PyTorch would write a call of Python into the graph, which cannot be saved, and whose check differs from itself."""
    do = "Trace under torch.no_grad() what is to run, under ops_math.enabled(False) what is to learn; or use torch.export."
    with pytest.raises(om.UnsupportedError) as error:
        torch.jit.trace(Layer(), (torch.randn(2, 5, 16),))
    assert str(error.value) == f"ops_math under torch.jit.trace: a backward of ours cannot be written into its graph. {do}"


def test_the_second_way_out_learns():
    layer, x = Layer(), torch.randn(2, 5, 16)
    with om.enabled(False):
        saved_and_loaded(torch.jit.trace(layer, (x,)))(x).square().sum().backward()
        traced = torch.jit.trace(layer, (x,))
        want = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
        got = torch.autograd.grad(traced(x).square().sum(), list(traced.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_trace_that_is_to_run_does_not_lose_gradients_without_an_error():
    """The graph calls what lies below autograd: PyTorch warns, in the backward alone, and gives none."""
    with torch.no_grad():
        traced = torch.jit.trace(Layer(), (torch.randn(2, 5, 16),))
    with pytest.raises(RuntimeError, match="this is the operator below autograd, whose results have no gradient"):
        traced(torch.randn(2, 5, 16))


def test_fake_tensors_stay_fake():
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(4, 16))
        assert type(om.rms_norm(x)).__name__ == "FakeTensor"


def test_export_sees_the_operator():
    class Module(torch.nn.Module):
        def forward(self, x, w):
            return om.rms_norm(x, w)

    graph = torch.export.export(Module(), x_and_weight()).graph
    assert torch.ops.ops_math.rms_norm_fwd.default in [n.target for n in graph.nodes]


SEEN = []


class Logged(torch.Tensor):
    """A tensor that sees the operators it meets."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        SEEN.append(str(func))
        return func(*[a.inner if isinstance(a, Logged) else a for a in args], **(kwargs or {}))


def test_a_tensor_subclass_sees_the_operator():
    x, weight = x_and_weight()
    y = om.rms_norm(Logged(x), weight)
    assert SEEN[-1] == "ops_math.rms_norm_fwd.default"
    assert torch.equal(y, om.rms_norm(x, weight))


def test_a_lazily_negated_tensor_is_read_with_its_sign():
    x, weight = x_and_weight()
    negated = torch._neg_view(x)
    assert negated.is_neg()
    assert torch.equal(om.rms_norm(negated, weight), om.rms_norm(-x, weight))


def test_what_a_transform_left_behind_is_unwrapped_as_pytorch_does():
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(torch.ones(4, 16))
    weight = torch.randn(16)
    assert torch.equal(om.rms_norm(left[0].detach(), weight), om.rms_norm(torch.ones(4, 16), weight))
    weight.requires_grad_()
    om.rms_norm(left[0], weight).sum().backward()
    assert weight.grad is not None


def test_a_whole_number_for_a_float_is_one_by_the_time_a_kernel_sees_it():
    x, weight = x_and_weight()
    phase = catalog.operators()["rms_norm"].phases["fwd"]
    phase.forget()
    assert torch.equal(om.rms_norm(x, weight, weight_offset=1), om.rms_norm(x, weight, weight_offset=1.0))
    problems = [k.problem for k in phase.memo.values() if isinstance(k, dispatch._Known)]
    assert {type(p.weight_offset) for p in problems} == {float}


def test_where_pytorch_does_not_tell_the_dispatcher_is_used(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_tls_local_include_set")
    assert features._quiet()() is False


def test_scalars_are_told_apart_by_their_exact_types():
    kinds = dispatch.scalar_kinds("(Tensor x, float p, SymInt n, bool b, ScalarType? out) -> Tensor")
    assert kinds == {(float, int, bool, torch.dtype), (float, int, bool, type(None))}


def test_a_double_backward_is_refused_through_the_short_way():
    x, weight = x_and_weight(True)
    (dx,) = torch.autograd.grad(om.rms_norm(x, weight).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_backward_runs_without_recording_whatever_the_grad_mode_around_it():
    x, weight = x_and_weight(True)
    with torch.enable_grad():
        dx, _ = step(x, weight)
    assert dx.grad_fn is None
