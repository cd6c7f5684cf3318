"""Functions compiled for the CPU: when they may run, what they are compiled for, and that nothing around them matters."""

import shutil
import threading
import types

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import ops_math as om
from ops_math import UnsupportedError, backends, schedule
from ops_math.backends import inductor
from ops_math.schedule import choose, first_meeting
from ops_math.schedule.live import LIVE
from ops_math.schedule.record import EMPTY, Entry, of_measurements
from tests.schedule.test_choice import COST, DEVICE, FREE, PROBLEM, candidate, measured

pytestmark = pytest.mark.skipif(inductor.unavailable(DEVICE) is not None, reason="missing capability: a C++ compiler")
CANDIDATES = [candidate("eager", PASSES=8.0), candidate("inductor", PASSES=1.0)]


def scaled(x, w):
    return x.square().mean(-1), (x * w).sum(0)


@pytest.fixture
def compilations(monkeypatch):
    """Nothing compiled yet, and a list that grows with each compilation."""
    monkeypatch.setattr(inductor, "_COMPILED", {})
    monkeypatch.setattr(inductor, "_BY_SHAPE", {})
    honest, seen = inductor._compile, []
    monkeypatch.setattr(inductor, "_compile", lambda *args: seen.append(args) or honest(*args))
    return seen


def called(rows, key="scaled", function=scaled, cols=32):
    x, w = torch.randn(rows, cols), torch.randn(cols)
    found = inductor.call(key, function, (x, w), ((0,), ()))
    exact, sizes = function(x.double(), w.double()), function(x.double().abs(), w.double().abs())
    for mine, right, size in zip(found, exact, sizes, strict=True):  # fp32 sums in any order: a unit of the terms' sizes for each of them
        assert ((mine - right).abs() <= (max(rows, cols) + 2) * 2.0**-24 * size).all()


def test_the_model_never_picks_it_and_says_why():
    entry = Entry("toy", "fwd", "cpu", "fp32", 0, 1 << 40, {"eager": 9.0, "inductor": 1.0}, "shipped")
    for record in (EMPTY, EMPTY._replace(entries=(entry,))):
        choice = choose(CANDIDATES, PROBLEM, COST, "fp32", "fwd", DEVICE, FREE, record)
        assert choice.implementation.name == "eager"
        assert dict(choice.rejected)["inductor"] == inductor.ON_REQUEST
    assert choose(CANDIDATES, PROBLEM, COST, "fp32", "fwd", DEVICE, FREE, EMPTY).reason == "only candidate"


def test_a_measurement_of_this_machine_or_a_wish_picks_it():
    record = of_measurements(EMPTY, [measured(times_us={"eager": 9.0, "inductor": 3.0}, winner="inductor")], None)
    choice = choose(CANDIDATES, PROBLEM, COST, "fp32", "fwd", DEVICE, FREE, record)
    assert (choice.implementation.name, choice.reason) == ("inductor", "fastest measured on this device")
    asked = FREE._replace(forced=(("toy", "inductor"),))
    assert choose(CANDIDATES, PROBLEM, COST, "fp32", "fwd", DEVICE, asked, EMPTY).implementation.name == "inductor"


def test_at_level_one_a_measurement_does_not_exchange_it_for_another_order_of_sums():
    record = of_measurements(EMPTY, [measured(policy="precision=default determinism=1", times_us={"eager": 9.0, "inductor": 3.0})], None)
    choice = choose(CANDIDATES, PROBLEM, COST, "fp32", "fwd", DEVICE, FREE._replace(determinism=1), record)
    assert choice.implementation.name == "eager"


def test_a_first_meeting_does_not_wait_for_a_compiler(monkeypatch):
    why_not = []
    monkeypatch.setattr(first_meeting, "ensure_ceilings", lambda *args: None)
    monkeypatch.setattr(first_meeting, "measure", lambda *args, **facts: why_not.append(facts["limits"].why_not_compiled) or measured())
    monkeypatch.setattr(first_meeting.live, "add", lambda *args: None)
    operator = types.SimpleNamespace(name="toy", implementations=lambda: CANDIDATES, file=lambda name: None)
    monkeypatch.setattr(first_meeting, "why_not", lambda *args: None)
    monkeypatch.setattr(LIVE, "first_use_seconds", 0.5)
    schedule.met(operator, "fwd", PROBLEM, [torch.zeros(1)])
    assert why_not == [inductor.ON_REQUEST]


def test_without_a_compiler_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "ccache /opt/none/c++")
    inductor._missing.cache_clear()
    try:
        expected = "Inductor needs a C++ compiler, and there is no ccache /opt/none/c++: install one, or name yours in CXX"
        assert inductor.unavailable(DEVICE) == expected
        with om.force(rms_norm="inductor"), pytest.raises(UnsupportedError, match="install one, or name yours in CXX"):
            om.rms_norm(torch.ones(3, 5), eps=2e-5)
    finally:
        inductor._missing.cache_clear()
    assert inductor.unavailable(backends.NAMED["h100"]) == "is for CPUs, this is cuda"


def test_new_lengths_compile_nothing_and_other_widths_do(compilations):
    for rows in (7, 2, 64, 1000, 3):
        called(rows)
    assert len(compilations) == 1
    called(5, cols=48)
    assert len(compilations) == 2
    called(1)  # a row alone is another shape to the compiler
    assert len(compilations) == 3


def test_what_was_compiled_for_few_rows_is_not_used_for_many(compilations):
    # above 4,096 values a sum the compiler adds up more carefully, and says that its code assumes fewer
    called(100)
    called(5000)
    called(4097)
    called(4096)
    assert len(compilations) == 2


def test_the_number_of_threads_is_part_of_what_was_compiled(compilations):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            called(64)
    finally:
        torch.set_num_threads(before)
    assert len(compilations) == 2


def test_threads_that_meet_a_function_together_compile_it_once(compilations):
    wrong = []

    def work(rows):
        try:
            called(rows)
        except Exception as error:  # noqa: BLE001 (handed to the test's thread)
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (2, 9, 33, 70)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, len(compilations)) == ([], 1)


def test_shapes_that_never_return_do_not_pile_up(compilations, monkeypatch):
    monkeypatch.setattr(inductor, "MOST_SHAPES", 4)
    for rows in range(2, 20):
        called(rows)
    assert len(inductor._BY_SHAPE) <= 4
    assert len(compilations) == 1


def test_another_compiler_inside_pytorch_is_refused_in_words(compilations, monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", None)
    monkeypatch.delattr("torch._inductor.compile_fx.compile_fx_inner")
    with pytest.raises(UnsupportedError, match=r"^inductor: this PyTorch's compiler is made otherwise \(cannot import name .*Use another"):
        called(7)


class Watching(TorchDispatchMode):
    """Sees every call."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_modes_tracers_and_stances_around_the_first_call_change_nothing(compilations):
    x, w = torch.randn(9, 40), torch.randn(40)
    with om.force(rms_norm="inductor"):
        expected = om.rms_norm(x, w)
        around = [
            lambda f: make_fx(f)(x)(x),
            lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)(x),
            lambda f: torch.compile(f, fullgraph=True)(x),
        ]
        for run in around:
            inductor._COMPILED.clear(), inductor._BY_SHAPE.clear()
            assert torch.equal(run(lambda t: om.rms_norm(t, w)), expected)
        inductor._COMPILED.clear(), inductor._BY_SHAPE.clear()
        with Watching():
            assert torch.equal(om.rms_norm(x, w), expected)
        inductor._COMPILED.clear(), inductor._BY_SHAPE.clear()
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(om.rms_norm(x, w), expected)
    assert len(compilations) >= 5


def test_a_sum_is_normalised_as_it_was_rounded():
    x, residual, w = (torch.randn(33, 96, dtype=torch.bfloat16) for _ in range(3))
    w = w[0].contiguous()
    with om.force(rms_norm="inductor"):
        y, total = om.add_rms_norm(x, residual, w)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, om.rms_norm(total, w))


def test_the_mean_square_is_that_of_the_rounded_sum():
    # 1 + 2^-9 is 1 in bf16; with the sum before rounding y would be 0.998, which bf16 would not show
    x, residual = torch.ones(5, 96, dtype=torch.bfloat16), torch.full((5, 96), 2.0**-9, dtype=torch.bfloat16)
    with om.force(rms_norm="inductor"):
        y, total = om.add_rms_norm(x, residual, eps=0.0, out_dtype=torch.float32)
    assert torch.equal(total, torch.ones_like(x))
    assert torch.equal(y, torch.ones(5, 96))


def test_casts_are_made_where_the_function_has_them(compilations):
    # left to itself the compiler takes a sum of two bf16 on in fp32, which no result would show to have been rounded
    x, residual = torch.randn(2, 64, 64, dtype=torch.bfloat16)

    def widened(a, b):
        return ((a + b).float() * 3.0001,)

    found, rounded = inductor.call("widened", widened, (x, residual), ((0,), (0,)))[0], widened(x, residual)[0]
    if torch.__version__ >= (2, 13):
        assert torch.equal(found, rounded)
    else:  # 2.11 makes none in C++ whatever it is told; each such value that a function of ours has is one that it returns
        assert torch.equal(found, rounded) or torch.equal(found, widened(x.float(), residual.float())[0])
