"""Calibrating at a determinism level: what the level allows is timed as the level runs it, is used at that level, and changes no bit."""

import time
import types

import pytest
import torch

import ops_math as om
from ops_math import backends, catalog, settings
from ops_math.schedule import Limits, measure
from ops_math.schedule.explain import explain
from ops_math.schedule.levels import Cut, Levels
from ops_math.schedule.live import LIVE
from ops_math.settings import Policy
from ops_math.spec import Offer
from tests.schedule import toy

CPU = torch.device("cpu")
QUICK = Limits(0.2, 5.0)
LEVELS = Levels(
    {"magic": Offer(3), "eager": Offer(1, "rows together")}, "none", {"fwd": Cut("m", "m")}, {"magic": 16}, orders={("magic", "fwd"): ()}
)


def policy(level):
    return Policy("default", level, (), 64)


def leveled(candidates, levels=LEVELS, **facts):
    """A toy whose operator states its levels."""
    made = toy.Toy(candidates, **facts)
    for one in made.implementations():
        one._levels = types.SimpleNamespace(LEVELS=levels)
    return made


def recording(calls, seconds=0.0):
    def launch(problem, config, x):
        calls.append((config, problem.rows, x.shape[0]))
        time.sleep(seconds if config == "slow" else 0.0)
        return toy.double(x)

    return launch


X = torch.linspace(-1, 1, 40 * 96).reshape(40, 96)
TWO = {"configs": lambda p, d, phase: ("slow", "quick")}


def test_at_level_2_a_candidate_is_timed_in_the_pieces_that_the_level_runs_and_of_the_problem_that_is_chosen_for():
    calls = []
    operator = leveled({"magic": recording(calls, 0.002), "eager": toy.eager}, magic=TWO)
    found = measure(operator, "fwd", [X], limits=QUICK, policy=policy(2))
    assert {rows for _, rows, _ in calls} == {rows for _, _, rows in calls} == {16, 8}
    assert found.problem == str(toy.ToyProblem(64, 96, "fp32"))  # rows of a token block
    assert found.policy == "precision=default determinism=2"
    assert found.winner == "magic:quick"
    assert set(found.times_us) == {"magic:slow", "magic:quick"}  # eager offers level 1
    assert found.checked == "eager in fp64"  # and is what numbers are held to at every level


def test_below_level_2_it_is_timed_whole_and_of_its_own_problem():
    calls = []
    found = measure(leveled({"magic": recording(calls), "eager": toy.eager}, magic=TWO), "fwd", [X], limits=QUICK, policy=policy(1))
    assert {rows for _, _, rows in calls} == {40}
    assert found.problem == str(toy.ToyProblem(40, 96, "fp32"))


def test_wrong_numbers_are_refused_as_the_level_runs_them():
    """A launcher that is right whole and wrong in pieces."""

    def launch(problem, config, x):
        return toy.double(x) * (1.0 if problem.rows == 40 else 1.01)

    levels = LEVELS._replace(offers={"magic": Offer(3), "vendor": Offer(3), "eager": Offer(1)})
    operator = leveled({"magic": launch, "vendor": toy.eager, "eager": toy.eager}, levels)
    assert measure(operator, "fwd", [X], limits=QUICK, policy=policy(1)).refused == {}
    assert measure(operator, "fwd", [X], limits=QUICK, policy=policy(2)).refused["magic"].startswith("result 0 is wrong")


def step_of(*rows):
    def step():
        for n in rows:
            x = torch.randn(n, 24, generator=torch.Generator().manual_seed(n), requires_grad=True)
            om.rms_norm(x, torch.ones(24)).square().sum().backward()

    return step


@pytest.mark.parametrize("level", [2, 3])
def test_one_measurement_stands_for_all_numbers_of_rows_and_is_what_is_chosen_by(level):
    operator = catalog.operators()["rms_norm"]
    with om.determinism(level, token_block=32):
        found = om.calibrate(step_of(8, 24, 16), seconds=2)
        assert sorted((m.op, m.phase) for m in found.measurements) == [("rms_norm", "bwd"), ("rms_norm", "fwd")]
        assert all("rows=32" in m.problem for m in found.measurements)
        again = om.calibrate(step_of(5, 120), seconds=2)
        assert (len(again.measurements), again.known) == (0, 2)
        for rows in (8, 4000):
            problem = operator.phases["fwd"].problem_of(torch.randn(rows, 24), None, torch.ones(24), 1e-6, 0.0, torch.float32)
            assert explain(operator, "fwd", problem, backends.device_of(CPU)).reason == "fastest measured on this device"
    with om.determinism(level - 1, token_block=32):  # a measurement of another level says nothing here
        assert om.calibrate(step_of(8), seconds=2, save=False).known == 0


def test_a_calibration_at_level_2_times_a_row_a_call_where_the_level_runs_so(monkeypatch):
    """On a CPU: the time that is recorded is of what runs, not of one call on all rows."""
    eager = next(i for i in catalog.operators()["rms_norm"].implementations() if i.name == "eager")
    rows = set()
    plain = eager.module.launch_fwd

    def counted(problem, config, *tensors):
        rows.add(problem.rows)
        return plain(problem, config, *tensors)

    monkeypatch.setattr(eager.module, "launch_fwd", counted)
    x, weight = torch.randn(12, 24), torch.ones(24)
    args = (x, None, weight, 1e-6, 0.0, torch.float32)
    measure(catalog.operators()["rms_norm"], "fwd", args, limits=QUICK, policy=settings.policy()._replace(determinism=2))
    assert rows == {1, 12}  # twelve is the oracle and its yardstick


@pytest.mark.parametrize("level", [1, 2, 3])
def test_calibrating_changes_no_bit(level):
    def outcome():
        x = torch.randn(20, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
        w = torch.randn(24, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = om.softmax(om.linear(om.rms_norm(x, w[0]), w))
        loss = om.cross_entropy(y, torch.arange(20) % 24, reduction="sum")
        return [loss, *torch.autograd.grad(loss, [x, w])]

    with om.determinism(level, token_block=16):
        before = outcome()
        found = om.calibrate(outcome, seconds=4)
        assert len(found.measurements) == 8, str(found)
        after = outcome()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_step_that_cannot_keep_the_level_raises_in_calibrate_as_outside():
    x, w = torch.randn(4, 24), torch.randn(10, 24)
    with om.determinism(2), pytest.raises(om.UnsupportedError, match=r"^linear_cross_entropy \(fwd\): no implementation can run it: "):
        om.calibrate(lambda: om.linear_cross_entropy(x, w, torch.zeros(4, dtype=torch.long), reduction="sum"))
    assert LIVE.collector is None


@pytest.mark.slow
def test_a_measuring_process_of_its_own_times_the_level_too():
    with om.determinism(2, token_block=32):
        found = om.calibrate(step_of(24), seconds=4, apart=True)
        assert found.skipped == ()
        assert [(m.policy, "rows=32" in m.problem) for m in found.measurements] == [("precision=default determinism=2", True)] * 2
        here = om.calibrate(step_of(24), seconds=4, anew=True, save=False)
    times = [[m.times_us["eager"] for m in sorted(f.measurements, key=lambda m: m.phase)] for f in (found, here)]
    assert all(a > b / 8 for a, b in zip(*times, strict=True)), times  # a call a row takes 24 times as long as one
