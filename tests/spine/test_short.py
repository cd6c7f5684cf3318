"""The short way does what a plan does for the calls that it was made for, and nothing for any other; checks that were passed once are
left out for calls that would pass them too."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ops_math as om
from ops_math import backends, catalog, dispatch, features, settings
from ops_math.backends import launch as launching
from ops_math.backends import short
from ops_math.testing.crosscompile import calls_of
from tests.spine.test_plan import OPERATORS, forget, forms, fresh, norm, pointers, started, symbols, watched  # noqa: F401 (a fixture)

pytest.importorskip("triton", reason="missing capability: Triton")
NORM = catalog.operators()["rms_norm"]


@pytest.fixture
def long_way(monkeypatch):
    """The calls that were looked up in the dictionary or went further."""
    seen, signature = [], dispatch._Phase.signature
    monkeypatch.setattr(dispatch._Phase, "signature", lambda self, args: seen.append(self.name) or signature(self, args))
    return seen


@pytest.mark.parametrize("name", OPERATORS)
def test_the_fourth_call_starts_the_kernels_of_the_second_on_its_own_tensors(name, started, long_way, monkeypatch):  # noqa: F811
    made, shortened = [], 0
    allocate = lambda size, stride, dtype: made.append(torch.empty_strided(size, stride, dtype=dtype)) or made[-1]  # noqa: E731
    monkeypatch.setattr(features, "short_empty", lambda kind: allocate)
    operator = catalog.operators()[name]
    for case in operator.file("problem").CASES:
        for call in calls_of(operator, case, "bf16" if "bf16" in case.dtypes else case.dtypes[0]):
            phase, enter = operator.phases[call.phase], getattr(operator, call.phase, None)
            supports = operator.implementations()[0].optional("supports", lambda *_: None)
            if enter is None or supports(phase.problem_of(*call.args), backends.NAMED["h200"], call.phase):
                continue
            tensors, scalars = call.args[: phase.num_tensors], call.args[phase.num_tensors :]
            with om.force(**{name: "triton_gpu"}), torch.no_grad():
                forget()
                seen = []
                for number in range(4):
                    given = fresh(tensors)
                    for record in (started, long_way, made):
                        record.clear()
                    if number < 3 or not phase.short:
                        out, own = watched(monkeypatch, lambda given=given, enter=enter, scalars=scalars: enter(*given, *scalars))
                    else:  # allocations that are watched close the short way
                        out, own = enter(*given, *scalars), made
                    own = [*own, *(t for t in given if t is not None)]  # pointers into the middle of inputs too
                    seen.append((symbols(started, given, own), forms(out)))
                    if number == 2 and phase.short:
                        shortened += 1
                assert long_way == [] or not phase.short
                assert seen[3] == seen[1] == seen[0], (case.name, call.phase)
    assert shortened


def settled(x=norm, weight=None):
    """After these calls the short way is open."""
    weight = torch.ones(64) if weight is None else weight
    for _ in range(4):
        om.rms_norm(x(), weight)
    return weight


def test_pointers_are_those_of_the_call_and_results_are_new(started, long_way):  # noqa: F811
    weight = settled()
    long_way.clear()
    kept = []
    for _ in range(3):
        x = norm()
        started.clear()
        y = om.rms_norm(x, weight)
        kept.append(y)
        assert pointers(started)[0][:3] == [x.data_ptr(), weight.data_ptr(), y.data_ptr()]
    assert long_way == []
    assert len({y.data_ptr() for y in kept}) == 3


def off_16_bytes():
    return norm(1, 4 * 64 + 1).view(-1)[1:].view(4, 64)


def freed():
    x = norm()
    x.untyped_storage().resize_(0)
    return x


OTHERS = {
    "another length": lambda: norm(5),
    "other strides": lambda: norm(4, 128)[:, :64],
    "another rank": lambda: norm(4).view(2, 2, 64),
    "another dtype": lambda: norm().bfloat16(),
    "an address off 16 bytes": off_16_bytes,
    "a parameter": lambda: torch.nn.Parameter(norm(), requires_grad=False),
    "a lazily negated tensor": lambda: norm()._neg_view(),
    "one that learns": lambda: norm().requires_grad_(),
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_tensor_goes_the_long_way(change, started, long_way):  # noqa: F811
    weight = settled()
    long_way.clear()
    om.rms_norm(OTHERS[change](), weight)
    assert long_way


def test_a_tensor_whose_memory_was_freed_is_not_read(started, long_way):  # noqa: F811
    weight = settled()
    started.clear()
    long_way.clear()
    om.rms_norm(freed(), weight)
    assert long_way


def test_the_operator_below_autograd_is_refused_where_a_gradient_would_be_lost(started):  # noqa: F811
    x, weight = norm().requires_grad_(), torch.ones(64)
    with torch.no_grad():
        for _ in range(4):
            NORM.fwd(x, None, weight, 1e-6, 0.0, torch.float32)
    assert NORM.phases["fwd"].short
    with pytest.raises(RuntimeError, match="this is the operator below autograd, whose results have no gradient"):
        NORM.fwd(x, None, weight, 1e-6, 0.0, torch.float32)


@pytest.mark.parametrize("rest", [{"eps": 1e-5}, {"weight_offset": 1.0}, {"eps": 1}])
def test_another_value_goes_the_long_way(rest, started, long_way):  # noqa: F811
    weight = settled()
    long_way.clear()
    om.rms_norm(norm(), weight, **rest)
    assert long_way


def test_a_value_of_another_type_that_is_equal_goes_the_long_way(started, long_way):  # noqa: F811
    weight = torch.ones(64)
    for _ in range(5):
        NORM.fwd(norm(), None, weight, 1.0, 0.0, torch.float32)
    long_way.clear()
    NORM.fwd(norm(), None, weight, 1.0, 0.0, torch.float32)
    assert long_way == []
    NORM.fwd(norm(), None, weight, 1, 0.0, torch.float32)
    NORM.fwd(norm(), None, weight, True, 0.0, torch.float32)
    assert len(long_way) == 2


class Sees(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Sees, Function])
def test_a_mode_sees_a_call_whose_short_way_is_open(mode, started):  # noqa: F811
    weight, x = settled(), norm()
    with mode() as watcher:
        om.rms_norm(x, weight)
    assert "ops_math.rms_norm_fwd.default" in watcher.seen


def test_the_profiler_sees_a_call_whose_short_way_is_open(started):  # noqa: F811
    weight = settled()
    with torch.profiler.profile() as profile:
        om.rms_norm(norm(), weight)
    assert "ops_math::rms_norm_fwd" in {e.name for e in profile.events()}


def test_vmap_is_refused_where_the_short_way_is_open(started):  # noqa: F811
    weight = settled()
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: om.rms_norm(x, weight))(norm(2, 4 * 64).view(2, 4, 64))


def deterministic(on):
    torch.use_deterministic_algorithms(on)


def products(on):
    torch.set_float32_matmul_precision("high" if on else "highest")


def products_by_backend(on):
    """PyTorch's newer setting, after which `torch.get_float32_matmul_precision` raises."""
    if on:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", [deterministic, products, products_by_backend])
def test_what_pytorch_is_set_to_is_looked_at_each_time(switch, started, long_way):  # noqa: F811
    switch(False)
    weight = settled()
    try:
        switch(True)
        long_way.clear()
        om.rms_norm(norm(), weight)
        assert long_way == ["fwd"]
    finally:
        switch(False)
    long_way.clear()
    om.rms_norm(norm(), weight)
    assert long_way == []


SETTINGS = {
    "determinism": lambda: settings.determinism(1),
    "precision": lambda: om.precision("ieee"),
    "force": lambda: om.force(rms_norm="eager"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_in_force_at_the_next_call_and_ends_with_its_context(setting, started, long_way):  # noqa: F811
    weight = settled()
    with SETTINGS[setting]():
        long_way.clear()
        started.clear()
        om.rms_norm(norm(), weight)
        assert long_way == ["fwd"]
        assert bool(started) == (setting != "force")
    long_way.clear()
    om.rms_norm(norm(), weight)
    assert long_way == []


def test_a_context_that_is_entered_again_finds_its_short_way(started, long_way):  # noqa: F811
    for _ in range(4):
        with om.precision("ieee"):
            om.rms_norm(norm(), torch.ones(64))
    long_way.clear()
    with om.precision("ieee"):
        om.rms_norm(norm(), torch.ones(64))
    assert long_way == []


def test_forgetting_closes_the_short_way(started, long_way):  # noqa: F811
    weight = settled()
    om.schedule.reread()
    long_way.clear()
    om.rms_norm(norm(), weight)
    assert long_way == ["fwd"]


def test_a_replaced_allocator_is_used(started, monkeypatch):  # noqa: F811
    weight, kept = settled(), torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: kept(*a, **k).fill_(float("nan")))
    assert om.rms_norm(norm(), weight).isnan().all()


def test_buffers_off_the_alignment_start_nothing_by_the_short_way(started, long_way, monkeypatch):  # noqa: F811
    off = lambda size, stride, dtype: torch.empty(4 * 64 + 1, dtype=dtype)[1:].as_strided(size, stride)  # noqa: E731
    monkeypatch.setattr(features, "short_empty", lambda kind: off)
    weight = settled()
    before = om.stats().rows
    long_way.clear()
    started.clear()
    om.rms_norm(norm(), weight)
    assert long_way == ["fwd"]
    assert len(started) == 1
    assert sum(r.calls for r in om.stats().rows) == sum(r.calls for r in before) + 1


def test_signatures_that_take_turns_all_keep_a_short_way_and_more_do_not_grow(started, long_way):  # noqa: F811
    weight = torch.ones(64)
    for _ in range(6):
        for rows in (2, 3, 4, 5):
            om.rms_norm(norm(rows), weight)
    long_way.clear()
    for rows in (2, 3, 4, 5):
        om.rms_norm(norm(rows), weight)
    assert long_way == []
    for rows in range(6, 16):
        settled(lambda rows=rows: norm(rows), weight)
    assert len(NORM.phases["fwd"].short) == dispatch._SHORT


def test_a_signature_that_returns_is_put_in_front_again(started, long_way):  # noqa: F811
    weight = settled()
    for rows in range(6, 12):
        settled(lambda rows=rows: norm(rows), weight)
    long_way.clear()
    for _ in range(2 * dispatch._SHORTEN_EVERY):
        om.rms_norm(norm(), weight)
    assert 0 < len(long_way) <= dispatch._SHORTEN_EVERY


def test_threads_keep_their_tensors_apart(started):  # noqa: F811
    weight, wrong = settled(), []
    settled(lambda: norm(6), weight)

    def work(rows):
        for _ in range(300):
            y = om.rms_norm(norm(rows), weight)
            wrong.extend([y.shape] * (y.shape != (rows, 64)))

    started.clear()
    threads = [threading.Thread(target=work, args=(rows,)) for rows in (4, 6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    places = [(p[0], p[2]) for p in pointers(started)]
    assert all(a != b for a, b in places)


def test_where_pytorch_cannot_compare_there_is_no_short_way(started, monkeypatch):  # noqa: F811
    monkeypatch.setattr(features, "tensor_check", lambda tensors: None)
    settled()
    assert NORM.phases["fwd"].short == ()
    assert short.like((norm(),), (), 1) is None


def test_a_result_that_was_not_asked_for_is_one_tensor_and_the_dispatcher_still_makes_new_ones(started):  # noqa: F811
    weight = settled()
    one, two = (NORM.fwd(norm(), None, weight, 1e-6, 0.0, torch.float32) for _ in range(2))
    assert one[1] is two[1]
    assert one[1].numel() == 0
    assert one[0] is not two[0]
    phase = NORM.phases["fwd"]
    one, two = (phase.overload(norm(), None, weight, 1e-6, 0.0, torch.float32) for _ in range(2))
    assert one[1] is not two[1]


def test_counters_count_the_short_way(started):  # noqa: F811
    weight = settled()
    om.reset_stats()
    for _ in range(5):
        om.rms_norm(norm(), weight)
    (row,) = om.stats().rows
    assert (row.op, row.calls) == ("rms_norm", 5)
    assert row.bytes == 5 * NORM.cost(NORM.phases["fwd"].problem_of(norm(), None, weight, 1e-6, 0.0, torch.float32), "fwd").bytes


class CudaLauncher:
    """Stands for Triton's."""

    global_scratch_size, profile_scratch_size, launch_cooperative_grid, launch_pdl = 0, 0, False, True
    arg_annotations, kernel_signature = "annotations", "signature"

    def launch(self, *args):
        raise AssertionError("not called")


@pytest.mark.parametrize(
    ("version", "after_stream", "together"),
    [
        ("3.6.0", (1, False, True, None, None, 2, None, None, None), False),
        ("3.9.1", (1, False, True, 2, None, None, None, None, None, "annotations", "signature"), True),
    ],
)
def test_tritons_launcher_is_passed_by_where_its_version_is_known(version, after_stream, together, monkeypatch):
    monkeypatch.setattr("triton.__version__", version)
    launcher = CudaLauncher()
    assert launching.innermost(launching.Kept(launcher, 1, 2, ())) == (launcher.launch, after_stream, together)


@pytest.mark.parametrize("change", ["version", "scratch", "profile", "gsan", "kind"])
def test_tritons_launcher_is_called_where_it_does_more(change, monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.7.0" if change == "version" else "3.6.0")
    launcher = print if change == "kind" else CudaLauncher()
    if change in ("scratch", "profile"):
        setattr(launcher, {"scratch": "global_scratch_size", "profile": "profile_scratch_size"}[change], 128)
    if change == "gsan":
        launcher.gsan_enabled = True
    assert launching.innermost(launching.Kept(launcher, 1, 2, ())) == (launcher, (1, 2, None, None, None), False)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_meets_no_comparison_that_ends_the_process(layout, started):  # noqa: F811
    weight = settled()
    nested = torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)], layout=layout)
    with pytest.raises(om.ArgumentError, match=r"^rms_norm: x must be a dense tensor; got a nested tensor\."):
        om.rms_norm(nested, weight)
    with pytest.raises((RuntimeError, NotImplementedError)):
        NORM.fwd(nested, None, weight, 1e-6, 0.0, torch.float32)
