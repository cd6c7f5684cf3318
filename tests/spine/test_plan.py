"""A plan does what the launcher did: the same kernels with the same arguments on whatever tensors come, and nothing where it cannot know.

No GPU: kernels are "compiled" into something that writes down what it was started with, and CPU tensors go a GPU's way.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import ops_math as om
from ops_math import backends, catalog, dispatch, features
from ops_math.backends import launch as launching
from ops_math.backends import plan as planning
from ops_math.dispatch import _Known
from ops_math.testing.capture import like_on
from ops_math.testing.crosscompile import calls_of

pytest.importorskip("triton", reason="missing capability: Triton")

COMPUTES = "linear_cross_entropy"  # whose forward calls PyTorch's products between kernels
OPERATORS = [n for n, op in catalog.operators().items() if any(i.name == "triton_gpu" for i in op.implementations())]


@pytest.fixture
def started(monkeypatch):
    """What kernels were started with, in order; operators choose for an H200."""
    seen = []

    def compiled(kernel, grid, args, options, constants):
        names = kernel.arg_names[len(args) :]
        run = lambda *a: seen.append((kernel.fn.__name__, a[:3], a[9:]))  # noqa: E731
        if set(names) == set(constants):
            x, y, z = (*grid, 1, 1)[:3]
            seen.append((kernel.fn.__name__, (x, y, z), (*args, *(constants[n] for n in names))))
        return SimpleNamespace(run=run, function=1, packed_metadata=2)

    monkeypatch.setattr(dispatch, "RECORD_AT", 2)
    monkeypatch.setattr(launching, "_start", compiled)
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(launching, "DIRECT", {"cuda", "cpu"})
    monkeypatch.setattr(features, "raw_stream", lambda index: 0)
    monkeypatch.setattr(backends, "device_of", lambda device: backends.NAMED["h200"])
    forget()
    yield seen
    forget()


def forget():
    for operator in catalog.operators().values():
        operator.forget()


def fresh(args):
    """Tensors of the same shapes and strides elsewhere in memory; views of one buffer (q, k, v) are each on their own."""
    return [like_on(a, "cpu") for a in args]


def symbols(starts, tensors, made):
    """Each pointer as the tensor that it points into and how far, each buffer numbered in the order in which kernels meet it."""
    numbers = {}

    def symbol(a, place):
        if isinstance(a, torch.Tensor):
            address = a.data_ptr()
            if not address:
                return 0
        elif type(a) is int and a > 2**32:
            address = a
        elif hasattr(a, "block_shape"):
            fields = {name: value for name, value in vars(a).items() if name != "base"}
            return str(fields), symbol(a.base.data_ptr(), place), a.base.dtype
        else:
            return a
        for number, t in enumerate(tensors):
            if t is not None and t.data_ptr() == address:
                return f"tensor {number}"
        for t in made:
            base = t.untyped_storage().data_ptr()
            if base <= address < base + max(t.untyped_storage().nbytes(), 1):
                number = numbers.setdefault(base, len(numbers))
                return f"buffer {number} of {t.untyped_storage().nbytes()} + {address - base}"
        return "a copy"

    return [(name, grid, tuple(symbol(a, place) for place, a in enumerate(args))) for name, grid, args in starts]


def watched(monkeypatch, call):
    """What a call returned, and every tensor that it allocated."""
    made = []
    with monkeypatch.context() as patch:
        for name, kept in (("empty", torch.empty), ("empty_strided", torch.empty_strided), ("empty_like", torch.empty_like)):
            patch.setattr(torch, name, lambda *a, _f=kept, **k: made.append(_f(*a, **k)) or made[-1])
        kept = torch.Tensor.new_empty
        patch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: made.append(kept(self, *a, **k)) or made[-1])
        out = call()
    return out, made


def forms(out):
    found = [out] if isinstance(out, torch.Tensor) else list(out or ())
    assert not any(t._is_view() for t in found)  # nobody could write into it after autograd has seen it
    return [(t.shape, t.stride() if t.numel() else None, t.dtype) for t in found]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_third_call_starts_the_kernels_of_the_second_on_its_own_tensors(name, started, monkeypatch):
    operator, planned = catalog.operators()[name], []
    for case in operator.file("problem").CASES:
        for call in calls_of(operator, case, "bf16" if "bf16" in case.dtypes else case.dtypes[0]):
            phase, count = operator.phases[call.phase], operator.phases[call.phase].num_tensors
            tensors, scalars = call.args[:count], call.args[count:]
            supports = operator.implementations()[0].optional("supports", lambda *_: None)
            if supports(phase.problem_of(*call.args), backends.NAMED["h200"], call.phase):
                continue
            seen = []
            with om.force(**{name: "triton_gpu"}):
                forget()
                for _ in range(3):
                    given = fresh(tensors)
                    started.clear()
                    out, made = watched(monkeypatch, lambda given=given, phase=phase, scalars=scalars: phase(*given, *scalars))
                    seen.append((symbols(started, given, made), forms(out)))
            (known,) = (k for k in phase.memo.values() if isinstance(k, _Known))
            assert seen[1] == seen[0]
            assert seen[2] == seen[0], (case.name, call.phase)
            planned.append((call.phase, known.why if known.play is None else None))
    assert None in [why for _, why in planned], planned
    if name == COMPUTES:
        assert None not in [why for phase, why in planned if phase == "fwd"], planned


def norm(rows=4, cols=64, **options):
    return torch.randn(rows, cols, **options)


def remembered(phase="fwd"):
    return [k for k in catalog.operators()["rms_norm"].phases[phase].memo.values() if isinstance(k, _Known)]


def pointers(started):
    return [[a for a in args if isinstance(a, int) and a > 2**32] for _, _, args in started]


def test_a_plan_reads_the_tensors_of_its_own_call(started):
    weight = torch.randn(64)
    for _ in range(4):
        x = norm()
        started.clear()
        y = om.rms_norm(x, weight)
    (known,) = remembered()
    assert known.play is not None
    assert pointers(started)[0][:3] == [x.data_ptr(), weight.data_ptr(), y.data_ptr()]


DIFFERENT = {
    "another length": lambda: norm(5),
    "other strides": lambda: norm(4, 128)[:, :64],
    "another dtype": lambda: norm(dtype=torch.float64).to(torch.bfloat16),
    "an address off 16 bytes": lambda: norm(1, 4 * 64 + 1).view(-1)[1:].view(4, 64),
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_the_launcher_may_depend_on_meets_no_plan_made_for_something_else(change, started):
    for _ in range(3):
        om.rms_norm(norm(), torch.ones(64))
    before = remembered()
    om.rms_norm(DIFFERENT[change](), torch.ones(64))
    assert len(remembered()) == len(before) + 1


def test_one_tensor_given_twice_makes_no_plan_that_mixes_the_two_up(started):
    x, r = norm(), norm()
    for _ in range(3):
        om.add_rms_norm(x, x)
    assert [k.play for k in remembered()] == [None]
    for _ in range(3):
        started.clear()
        om.add_rms_norm(x, r)
    assert remembered()[0].play is not None
    assert pointers(started)[0][:2] == [x.data_ptr(), r.data_ptr()]
    started.clear()
    om.add_rms_norm(x, x)
    assert pointers(started)[0][:2] == [x.data_ptr(), x.data_ptr()]


def test_a_launcher_that_computes_has_no_plan(started, monkeypatch):
    for _ in range(4):
        om.rms_norm(norm().t().contiguous().t(), torch.ones(64))  # rows that must be copied first
    (known,) = remembered()
    assert known.play is None
    assert known.why == "aten::clone"


def test_a_kernel_that_triton_starts_itself_has_no_plan(started, monkeypatch):
    monkeypatch.setattr(launching, "_HIP", True)
    for _ in range(4):
        om.rms_norm(norm(), torch.ones(64))
    (known,) = remembered()
    assert (known.play, known.why) == (None, "a kernel that Triton starts itself")


def test_a_buffer_off_the_usual_alignment_goes_by_the_launcher(started, monkeypatch):
    for _ in range(3):
        om.rms_norm(norm(), torch.ones(64))
    strided = torch.empty_strided

    def off(size, stride, **options):
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return strided((span + 1,), (1,), **options)[1:].as_strided(size, stride)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", off)
        started.clear()
        om.rms_norm(norm(), torch.ones(64))
    assert [isinstance(a, torch.Tensor) for a in started[0][2][:1]] == [True]  # the launcher hands tensors on, a plan addresses


def test_views_that_move_are_refused_where_inputs_share_memory(started):
    shared = torch.randn(2, 8)

    def launcher(a, b):
        out = torch.empty(8)
        launching._TAPE.starts.append((launching.Kept(None, None, None, ()), (1,), (a.view(2, 4)[1], out)))
        return out

    _, plan, why = planning.record(lambda: launcher(shared[0], shared[1]), (shared[0], shared[1]))
    assert plan is None
    assert why == "a view that moves, where inputs share memory"
    apart = torch.randn(8), torch.randn(8)
    _, plan, why = planning.record(lambda: launcher(*apart), apart)
    assert why == ""
    assert plan.starts[0].pointers == ((0, 0, 16), (1, 2, 0))


def test_a_shape_that_does_not_return_is_not_written_down(started, monkeypatch):
    monkeypatch.setattr(dispatch, "RECORD_AT", 5)
    recorded = []
    monkeypatch.setattr(planning, "record", lambda call, tensors: (recorded.append(1) or call(), None, ""))
    for calls, written in ((4, 0), (1, 1), (3, 1)):
        for _ in range(calls):
            om.rms_norm(norm(), torch.ones(64))
        assert len(recorded) == written


def test_a_watched_call_puts_writing_down_off_and_does_not_prevent_it(started):
    with torch.inference_mode():
        for _ in range(4):
            om.rms_norm(norm(), torch.ones(64))
    assert [k.play for k in remembered()] == [None]
    for _ in range(2):
        om.rms_norm(norm(), torch.ones(64))
    assert [k.play is not None for k in remembered()] == [True]


def test_forgetting_forgets_plans(started):
    for _ in range(3):
        om.rms_norm(norm(), torch.ones(64))
    assert remembered()
    catalog.operators()["rms_norm"].forget()
    assert not remembered()
