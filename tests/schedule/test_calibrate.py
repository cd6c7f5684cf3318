"""A step is calibrated in one call: its problems are found, measured, recorded, and from then on what is fastest runs."""

import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math import UnsupportedError, backends, catalog, schedule, settings
from ops_math.backends import inductor
from ops_math.schedule import collect, store
from ops_math.schedule.identity import identity_of
from ops_math.schedule.live import LIVE, contents_of, record_for
from tests.schedule import toy

ROOT = Path(__file__).resolve().parents[2]
CPU = backends.device_of(torch.device("cpu"))


def a_step():
    """A training step with weights, a loss and a rotation, some calls twice."""
    x, w = torch.randn(64, 128, requires_grad=True), torch.ones(128, requires_grad=True)
    target = torch.arange(64)

    def step():
        y = om.rms_norm(om.rms_norm(x, w), w)
        om.cross_entropy(y + om.softmax(y), target).backward()

    return step


def row_of(op, phase="fwd"):
    return next(row for row in om.stats().rows if (row.op, row.phase) == (op, phase))


def test_every_problem_of_the_step_is_measured_and_used_from_then_on(cache):
    step, told = a_step(), []
    found = om.calibrate(step, seconds=5, progress=lambda *words: told.append(words))
    assert {(m.op, m.phase) for m in found.measurements} == {
        (op, phase) for op in ("rms_norm", "softmax", "cross_entropy") for phase in ("fwd", "bwd")
    }
    assert found.skipped == ()
    assert all(m.checked == "eager in fp64" for m in found.measurements)
    assert told[-1] == ("done", 6, 6)
    om.reset_stats()
    step()
    for m in found.measurements:
        row = row_of(m.op, m.phase)
        assert row.reason == "fastest measured on this device"
        assert row.implementation == m.winner.partition(":Config")[0]
    assert "6 problems measured" in str(found)


def test_known_problems_are_not_measured_again_unless_asked_and_another_process_knows_them(cache):
    step = a_step()
    om.calibrate(step, seconds=3)
    schedule.reread()  # as a new process would
    again = om.calibrate(step, seconds=3)
    assert (len(again.measurements), again.known) == (0, 6)
    assert len(om.calibrate(step, seconds=3, anew=True).measurements) == 6


def apart(a, b):
    """Problems for which one calibration chose what the other neither chose nor declared as good."""
    assert a.keys() == b.keys()
    differing = [(a[key], b[key]) for key in a if a[key].winner != b[key].winner]
    return [f"{x.op} {x.phase}: {x.times_us}, {y.times_us}" for x, y in differing if y.winner not in x.ties and x.winner not in y.ties]


def test_calibrations_agree_or_declare_a_tie():
    """Three of four in every problem: on a machine that others use, one may be disturbed for as long as it takes."""
    step, found = a_step(), []
    for _ in range(4):
        schedule.reread()
        found.append({(m.op, m.phase, m.problem): m for m in om.calibrate(step, seconds=6, save=False).measurements})
        assert len(found[-1]) == 6
    trios = [[words for a, b in itertools.combinations(trio, 2) for words in apart(a, b)] for trio in itertools.combinations(found, 3)]
    assert min(trios, key=len) == [], "\n".join(max(trios, key=len))


def test_calibrations_that_are_apart_are_seen():
    (m,) = [m for m in om.calibrate(a_step(), seconds=6, save=False).measurements if (m.op, m.phase) == ("cross_entropy", "bwd")]
    other = next(name for name in m.times_us if name != m.winner)
    assert apart({"it": m}, {"it": m._replace(winner=other, ties=(m.winner,))}) == []
    assert len(apart({"it": m._replace(ties=())}, {"it": m._replace(winner=other, ties=())})) == 1


def test_a_measured_choice_is_not_slower_than_pytorchs_own_beyond_noise():
    for m in om.calibrate(a_step(), seconds=6, save=False).measurements:
        own = "vendor" if "vendor" in m.times_us else next(name for name in m.times_us if name.startswith("eager"))
        assert m.times_us[m.winner] <= m.times_us[own] * (1.03 + m.noise[m.winner] + m.noise[own]), m


def test_with_no_time_left_the_rest_is_skipped_in_words():
    found = om.calibrate(a_step(), seconds=1e-6, save=False)
    assert found.measurements == ()
    assert {why for _, why in found.skipped} == {"the time is over: give calibrate more seconds"}
    om.reset_stats()
    a_step()()
    assert "predicted" in row_of("rms_norm", "bwd").reason or row_of("rms_norm", "bwd").reason == "only candidate"


def test_arguments_that_are_too_large_to_keep_are_met_and_named():
    found = collect.Collector(1000)
    with found:
        om.softmax(torch.randn(64, 64))
        om.softmax(torch.randn(2, 4))
    assert [met.args is None for met in found.met.values()] == [True, False]


def test_arguments_are_kept_as_they_were_laid_out_and_later_writes_do_not_reach_them():
    x = torch.randn(6, 8, 4)
    views = (
        x.transpose(0, 1),
        x[:, ::2],
        x[:1].expand(5, 8, 4),
        torch.randn(3).expand(2, 3),
        x[..., :1],
        torch.randn(0, 4),
        torch.tensor(3.0),
    )
    for view in views:
        kept = collect.laid_out_like(view, view, torch.device("cpu"))
        assert torch.equal(kept, view)
        assert kept.stride() == view.stride()
        assert kept.numel() == 0 or kept.data_ptr() != view.data_ptr()
    wide = torch.as_strided(torch.randn(10_000), (2, 2), (5000, 1))
    assert collect.laid_out_like(wide, wide, torch.device("cpu")).is_contiguous()


def test_bad_candidates_of_a_real_operator_are_named_and_training_goes_on():
    operator = catalog.operators()["softmax"]
    vendor = next(i for i in operator.implementations() if i.name == "vendor")
    honest = vendor.launcher("fwd")

    def poisoned(problem, config, *tensors):
        out = honest(problem, config, *tensors)
        (out[0] if isinstance(out, tuple) else out).view(-1)[3] = torch.nan
        return out

    vendor.replaced["fwd"] = poisoned
    x = torch.randn(128, 256)
    try:
        found = om.calibrate(lambda: om.softmax(x), seconds=2, save=False)
        assert found.measurements[0].winner == "eager"
        assert found.measurements[0].refused["vendor"].startswith("result 0 has NaN")
        assert "refused vendor: result 0 has NaN" in str(found)
        assert torch.isfinite(om.softmax(x)).all()
    finally:
        vendor.replaced.clear()
        operator.forget()


def test_a_compiled_step_is_calibrated_too():
    w = torch.ones(64)
    compiled = torch.compile(lambda x: om.rms_norm(x, w), backend="aot_eager", fullgraph=True)
    found = om.calibrate(lambda: compiled(torch.randn(32, 64)), seconds=2, save=False)
    assert [(m.op, m.phase) for m in found.measurements] == [("rms_norm", "fwd")]


def test_a_step_that_meets_nothing_says_so():
    with om.enabled(False):
        found = om.calibrate(a_step(), seconds=1, save=False)
    assert str(found) == "the step met no operator of ops_math: ops_math is switched off; ops_math.enabled(True) switches it on"
    found = om.calibrate(lambda: om.softmax(torch.empty(3, 4, device="meta")), seconds=1, save=False)
    assert str(found).startswith("the step met no operator of ops_math: call its functions or adopt the model")
    assert str(found).endswith("where tensors are on the meta device, nothing runs")


def test_a_calibration_inside_another_is_refused_and_the_next_one_listens():
    def inside():
        om.calibrate(a_step(), seconds=1, save=False)

    with pytest.raises(
        UnsupportedError, match=r"^calibrate: another calibrate is running a step of this process\. Call one after the other"
    ):
        om.calibrate(inside, seconds=1, save=False)
    assert om.calibrate(a_step(), seconds=2, save=False).measurements


def test_two_threads_do_not_share_what_their_steps_meet():
    entered, ended, refused = threading.Event(), threading.Event(), []

    def slow():
        entered.set()
        assert ended.wait(20)
        a_step()()

    first = threading.Thread(target=lambda: om.calibrate(slow, seconds=1, save=False))
    first.start()
    assert entered.wait(20)
    try:
        om.calibrate(a_step(), seconds=1, save=False)
    except UnsupportedError as error:
        refused.append(str(error))
    ended.set()
    first.join()
    assert len(refused) == 1


def test_a_step_that_raises_leaves_nobody_listening():
    with pytest.raises(ZeroDivisionError):
        om.calibrate(lambda: 1 / 0, seconds=1)
    assert LIVE.collector is None


NO_STEPS = [
    (3, "int"), (None, "NoneType"), ("step", "str"), (torch.nn.Linear(2, 2), "one of (input)"), (lambda x: x, "one of (x)"),
    (lambda x, *, y: x, "one of (x, y)"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "got"), NO_STEPS, ids=[got for _, got in NO_STEPS])
def test_what_cannot_be_called_without_arguments_is_no_step(step, got):
    with pytest.raises(om.ArgumentError) as error:
        om.calibrate(step)
    needs = "a function without arguments that runs one training step"
    assert str(error.value) == f"calibrate: step_fn must be {needs}; got {got}. Pass e.g. lambda: model(batch).loss.backward()."


def test_a_step_may_have_arguments_with_defaults_and_be_any_callable():
    for step in (lambda x=3, *rest, **more: None, functools.partial(lambda x: None, 3), dict):
        om.calibrate(step, save=False)


def test_seconds_that_are_none_are_refused():
    with pytest.raises(om.ArgumentError, match=r"^calibrate: seconds must be above 0; got 0\. "):
        om.calibrate(a_step(), seconds=0)


UNUSABLE = [
    ({"seconds": "10"}, "seconds must be a number; got '10'. Pass seconds as an int or a float."),
    ({"seconds": None}, "seconds must be a number; got None. Pass seconds as an int or a float."),
    ({"memory_gib": "3"}, "memory_gib must be a number; got '3'. Pass memory_gib as an int or a float."),
    ({"memory_gib": 0}, "memory_gib must be above 0; got 0. Pass a positive memory_gib."),
    ({"progress": True}, "progress must be a function of (what, done, total); got bool. Pass e.g. progress=print."),
    ({"progress": lambda words: None},
     "progress must be a function of (what, done, total); got one with too many positional arguments. Pass e.g. progress=print."),
    ({"modules": "json"}, "modules must be a list of names of modules; got 'json'. Pass e.g. ['json']."),
    ({"modules": ["nosuchmodule"]},
     "modules must be of modules that can be imported; got 'nosuchmodule'. Name it as in an import statement."),
    ({"modules": ["no.such.module"]},
     "modules must be of modules that can be imported; got 'no.such.module'. Name it as in an import statement."),
]  # fmt: skip


@pytest.mark.parametrize(("options", "sentence"), UNUSABLE, ids=[str(i) for i in range(len(UNUSABLE))])
def test_what_could_not_be_used_is_said_before_the_step_has_run(options, sentence):
    ran = []
    with pytest.raises(om.ArgumentError) as error:
        om.calibrate(lambda: ran.append(1), save=False, **options)
    assert (str(error.value), ran) == ("calibrate: " + sentence, [])


def test_an_interrupt_keeps_what_was_measured_until_then():
    def interrupted(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    step = a_step()
    with pytest.raises(KeyboardInterrupt):
        om.calibrate(step, seconds=5, progress=interrupted, save=False)
    assert om.calibrate(step, seconds=5, save=False).known == 2


def test_modules_and_progress_of_any_form_are_taken():
    for options in ({"progress": print}, {"progress": lambda *told: None}, {"modules": ("json", "os.path")}):
        om.calibrate(lambda: None, save=False, **options)


def test_ceilings_are_measured_once_and_predict_from_then_on(cache):
    om.calibrate(a_step(), seconds=1)
    first = record_for(CPU).ceilings
    assert first is not None
    assert 0.5 < first.bandwidth_gbs < 2000
    assert 0 < first.launch_us < 500
    schedule.reread()
    om.calibrate(a_step(), seconds=1)
    assert record_for(CPU).ceilings == first
    assert record_for(CPU).on(CPU, "fp32").product_tflops == first.fp32_tflops
    assert record_for(backends.NAMED["h100"]).on(backends.NAMED["h100"], "bf16") == backends.NAMED["h100"]


PROCESS = """
import torch, ops_math as om
x = torch.randn({rows}, 128)
found = om.calibrate(lambda: (om.softmax(x), om.rms_norm(x)), seconds=2)
assert len(found.measurements) == 2, str(found)
"""


@pytest.mark.slow
def test_two_processes_that_calibrate_at_once_both_end_with_one_valid_file(cache):
    environment = {**os.environ, "OPS_MATH_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::ops_math.schedule.ScheduleWarning", "-c"]
    running = [
        subprocess.Popen([*command, PROCESS.format(rows=rows)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rows in (32, 48)
    ]
    for process in running:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    files = list(cache.glob("*.json"))
    assert len(files) == 1
    identity = identity_of(CPU)._replace(cores=1)
    found = store.read(files[0], identity)
    assert len(found.measurements) == 4
    assert found.ceilings is not None


def test_a_problem_is_measured_when_first_met_where_that_was_asked_for(cache):
    x, told = torch.randn(96, 160), []
    with schedule.first_use(0.3, progress=told.append):
        om.reset_stats()
        om.softmax(x)
        assert row_of("softmax").reason == "fastest measured on this device"
        assert told
        count = len(told)
        om.softmax(torch.randn(98 + 6, 160))  # like it: not measured, and ever new lengths meet an end
        om.softmax(x)
        assert len(told) == count
    assert len(contents_of(identity_of(CPU)).measurements) == 1


@pytest.mark.parametrize("how", ["off", "frozen", "deterministic", "forced"])
def test_a_first_use_is_not_measured_where_that_would_change_what_was_promised(how, cache):
    x = torch.randn(96, 160)
    circumstances = {
        "off": lambda: schedule.first_use(0),
        "frozen": schedule.freeze,
        "deterministic": lambda: settings.determinism(1),
        "forced": lambda: settings.force(softmax="eager"),
    }
    with schedule.first_use(0.3), circumstances[how]():
        om.softmax(x)
    assert contents_of(identity_of(CPU)).measurements == {}


def test_a_problem_that_cannot_be_measured_is_said_once_and_runs_by_the_model():
    entry = toy.registered({"eager": toy.raising})
    x = torch.randn(4, 4)
    with schedule.first_use(0.1):
        with pytest.warns(schedule.ScheduleWarning, match=r"toy \(fwd\) was not measured: nothing could be run"):
            schedule.met(entry, "fwd", entry.phases["fwd"].problem_of(x), [x])
        start = time.perf_counter()
        schedule.met(entry, "fwd", entry.phases["fwd"].problem_of(x), [x])
        assert time.perf_counter() - start < 0.05


def test_a_frozen_schedule_refuses_to_calibrate():
    with schedule.freeze(), pytest.raises(UnsupportedError, match=r"^schedule: calibrate: the schedule is frozen\. Leave the `with`"):
        om.calibrate(a_step())
    assert LIVE.frozen == ""


def test_a_calibration_says_how_often_the_model_alone_would_have_been_right():
    found = om.calibrate(a_step(), seconds=2, save=False)
    assert 0 <= found.model_close <= 6
    assert f"within 10 % of the fastest in {found.model_close} of 6" in str(found)
    operator = catalog.operators()["softmax"]
    vendor = next(i for i in operator.implementations() if i.name == "vendor")
    x = torch.randn(64, 64)
    honest = vendor.launcher("fwd")
    vendor.replaced["fwd"] = lambda *args: (time.sleep(0.005), honest(*args))[1]
    try:
        slow = om.calibrate(lambda: om.softmax(x), seconds=1, save=False)
    finally:
        vendor.replaced.clear()
        operator.forget()
    assert slow.measurements[0].winner == "eager"
    assert slow.model_close == 0, "the model trusts what PASSES says of the vendor"


def test_a_disk_or_a_device_without_room_costs_a_sentence(monkeypatch):
    def no_room(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collect.Met, "args_on_device", no_room)
    found = om.calibrate(lambda: om.softmax(torch.randn(8, 8)), seconds=1, save=False)
    assert found.measurements == ()
    assert found.skipped[0][1] == "failed: OSError: [Errno 28] No space left on device"
    assert "not measured: softmax fwd SoftmaxProblem" in str(found)


@pytest.mark.slow
@pytest.mark.skipif(inductor.unavailable(CPU) is not None, reason="missing capability: a C++ compiler")
def test_what_compiles_is_tried_where_there_is_time_for_it_and_then_runs(cache):
    x = torch.randn(2048, 512)
    why = "not tried: it compiles for seconds, and there were 2 in all: give calibrate 20 s or more, with anew=True"
    for seconds, words in ((2.0, why), (20.0, None)):
        (found,) = om.calibrate(lambda: om.rms_norm(x), seconds=seconds, anew=True).measurements
        assert found.refused.get("inductor") == words
        assert ("inductor" in found.times_us) == (words is None)
    om.reset_stats()
    om.rms_norm(x)
    (ran,) = om.stats().rows
    assert (ran.implementation, ran.reason) == (found.winner, "fastest measured on this device")
