"""A record decides as it should: exactly, roughly, frozen, replayed, at each determinism level, and within two microseconds."""

import json
import statistics
import time
import types
import warnings

import pytest
import torch

import ops_math as om
from ops_math import UnsupportedError, backends, catalog, features, schedule, settings
from ops_math.schedule import choose
from ops_math.schedule.choose import ANOTHER_ORDER
from ops_math.schedule.identity import identity_of, source_of
from ops_math.schedule.live import LIVE, add, contents_of, record_for
from ops_math.schedule.record import EMPTY, bucket, of_measurements, policy_text
from ops_math.schedule.store import ScheduleWarning
from ops_math.settings import Policy
from ops_math.spec import Cost, Device, Implementation
from tests.schedule.test_record import CPU, row
from tests.schedule.toy import ToyProblem

DEVICE = Device("cpu", "", "cpu", 2, 0, 20.0, 0.1, 3.0)
FREE = Policy("default", 0, ())
COST = Cost((("x", 1 << 20),), (("y", 1 << 20),), ())
PROBLEM = ToyProblem(1000, 4096, "fp32")


def candidate(name, **facts):
    made = Implementation("toy", name, "nowhere")
    made._module = types.SimpleNamespace(**facts)
    return made


CANDIDATES = [candidate("vendor", PASSES=3.0), candidate("eager", configs=lambda p, d, phase: ("a", "b"))]


def measured(problem=PROBLEM, **changes):
    return row(problem, bucket=bucket(problem), **{"times_us": {"vendor": 5.0, "eager:b": 7.0}, "noise": {}, "host_us": {}, **changes})


def answer(*measurements, candidates=CANDIDATES, problem=PROBLEM, policy=FREE, **facts):
    record = of_measurements(EMPTY._replace(**facts), measurements, None)
    return choose(candidates, problem, COST, "fp32", "fwd", DEVICE, policy, record)


def test_a_measurement_of_this_very_problem_decides_with_its_configuration_and_its_reasons():
    choice = answer(measured(winner="eager:b", ties=("vendor",)))
    assert (choice.implementation.name, choice.config, choice.predicted_us) == ("eager", "b", 7.0)
    assert choice.reason == "fastest measured on this device"
    assert choice.rejected == (("vendor", "measured 5.0 us against 7.0 us, a tie"),)


def test_a_measurement_of_a_like_problem_decides_where_there_is_no_better_and_says_so():
    like = PROBLEM._replace(rows=1016)
    assert answer(measured(), problem=like).reason == "fastest measured on this device on a like problem"
    exact = measured(like, winner="eager:b")
    assert answer(measured(), exact, problem=like).implementation.name == "eager"
    assert answer(measured(), problem=PROBLEM._replace(cols=8192)).reason == "fastest predicted"


def test_the_newest_of_those_that_fit_a_bucket_speaks_for_it():
    like = PROBLEM._replace(rows=1016)
    older, newer = measured(when="1"), measured(PROBLEM._replace(rows=1008), when="2", winner="eager:b")
    assert answer(older, newer, problem=like).config == answer(newer, older, problem=like).config == "b"


@pytest.mark.parametrize("field", ["op", "phase", "dtype", "policy"])
def test_a_measurement_of_another_operator_phase_dtype_or_policy_is_not_used(field):
    assert answer(measured(**{field: "other"})).reason == "fastest predicted"


def test_every_part_of_a_policy_but_what_was_forced_and_the_token_block_is_in_the_key():
    assert policy_text(Policy("ieee", 1, (("toy", "eager"),))) == policy_text(Policy("ieee", 1, ())) == "precision=ieee determinism=1"
    assert len(policy_text(FREE).split()) == len(Policy._fields) - 2


def test_a_winner_that_is_not_legal_here_gives_way_to_the_fastest_that_is():
    gone = measured(times_us={"magic": 1.0, "vendor": 5.0, "eager:b": 4.0}, winner="magic")
    assert answer(gone).config == "b"
    assert answer(measured(times_us={"magic": 1.0}, winner="magic")).reason == "fastest predicted"


def test_a_refused_candidate_is_rejected_with_what_was_found():
    found = measured(times_us={"eager:b": 4.0}, winner="eager:b", refused={"vendor": "result 0 has NaN"})
    assert answer(found).rejected == (("vendor", "result 0 has NaN"),)
    assert answer(measured(times_us={"eager:b": 4.0}, winner="eager:b", refused={})).rejected == (("vendor", "was not measured"),)


def test_what_was_forced_wins_over_what_was_measured():
    assert answer(measured(), policy=FREE._replace(forced=(("toy", "eager"),))).implementation.name == "eager"


def test_at_level_one_a_measurement_exchanges_only_what_gives_the_same_bits():
    level = FREE._replace(determinism=1)
    found = measured(policy="precision=default determinism=1")
    modelled = answer(policy=level)
    assert (modelled.implementation.name, modelled.config) == ("eager", "a")
    kept = answer(found, policy=level)
    assert (kept.implementation.name, kept.config, kept.reason) == ("eager", "a", "fastest predicted")
    same_bits = {"signature": lambda p, config, phase: "by rows"}
    alike = [candidate("vendor", PASSES=3.0, **same_bits), candidate("eager", configs=lambda p, d, phase: ("a", "b"), **same_bits)]
    assert answer(found, policy=level, candidates=alike).implementation.name == "vendor"
    half = [candidate("vendor", PASSES=3.0), candidate("eager", configs=lambda p, d, phase: ("a", "b"), **same_bits)]
    choice = answer(found, policy=level, candidates=half)
    assert choice.config == "b"
    assert choice.rejected == (("vendor", ANOTHER_ORDER),)


def test_a_frozen_schedule_takes_the_model_for_what_it_does_not_know_and_says_so_or_refuses():
    assert answer(frozen="predict").reason == "fastest predicted (frozen: this problem is not in the record)"
    assert answer(measured(), frozen="refuse").reason == "fastest measured on this device"
    with pytest.raises(
        UnsupportedError, match=r"^toy \(fwd\): the schedule is frozen and has no measurement of this problem\. Calibrate it"
    ):
        answer(frozen="refuse")
    assert answer(frozen="refuse", candidates=CANDIDATES[:1]).reason == "only candidate"


def real(problem_rows=64, winner="eager"):
    """A measurement of a real softmax, as this process would keep it."""
    operator = catalog.operators()["softmax"]
    x = torch.randn(problem_rows, 96)
    problem = operator.phases["fwd"].problem_of(x, torch.float32)
    source = source_of(operator.implementations()[0])
    times = {"vendor": 5.0, "eager": 9.0}
    return x, row(problem, op="softmax", bucket=bucket(problem), source=source, times_us=times, noise={}, host_us={}, winner=winner)


def reason_of_softmax(x):
    om.reset_stats()
    om.softmax(x)
    (found,) = om.stats().rows
    return found.implementation, found.reason


def test_what_a_call_remembers_is_dropped_when_the_record_changes():
    x, found = real()
    before = reason_of_softmax(x)
    assert before[1] != "fastest measured on this device"
    add(CPU, [found])
    assert reason_of_softmax(x) == ("eager", "fastest measured on this device")
    schedule.reread()
    assert reason_of_softmax(x) == ("eager", "fastest measured on this device"), "the file knows it"


def test_a_measurement_of_older_sources_is_kept_and_not_used():
    x, found = real()
    add(CPU, [found._replace(source="old")])
    assert reason_of_softmax(x)[1] != "fastest measured on this device"
    assert len(contents_of(CPU).measurements) == 1


def test_a_digest_of_sources_follows_every_file_that_an_operator_runs(tmp_path, monkeypatch):
    package = tmp_path / "planted"
    for name in ("op_a", "_tiles"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
        (package / name / "kernel.py").write_text("x = 1\n")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    one = Implementation("a", "eager", "planted.op_a.kernel")
    digests = [source_of(one)]
    for changed_file in (package / "op_a" / "kernel.py", package / "_tiles" / "kernel.py"):
        changed_file.write_text("x = 2\n")
        source_of.__globals__["_source_of"].cache_clear()
        digests.append(source_of(one))
    (package / "op_a" / "test_a.py").write_text("")
    source_of.__globals__["_source_of"].cache_clear()
    digests.append(source_of(one))
    assert len(set(digests[:3])) == 3
    assert digests[3] == digests[2], "a test is not run by a call"


def test_a_record_goes_into_a_checkpoint_and_is_replayed_alone(tmp_path):
    x, found = real(winner="eager")
    add(CPU, [found])
    torch.save({"schedule": schedule.state_dict()}, tmp_path / "checkpoint.pt")
    other = real(80, "vendor")[1]
    add(CPU, [found._replace(winner="vendor", when="2099"), other])
    assert reason_of_softmax(x)[0] == "vendor"
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["schedule"]
    assert schedule.load_state_dict(state) == 1
    assert reason_of_softmax(x) == ("eager", "fastest measured on this device")
    assert "on this device" not in reason_of_softmax(torch.randn(640, 96))[1]
    assert other.key not in contents_of(CPU).measurements


def test_a_checkpoint_of_a_run_without_measurements_is_replayed_without_any():
    x, found = real(winner="eager")
    state = schedule.state_dict()
    add(CPU, [found])
    assert reason_of_softmax(x)[1] == "fastest measured on this device"
    assert schedule.load_state_dict(state) == 0
    assert "on this device" not in reason_of_softmax(x)[1]


def test_a_record_is_exported_and_loaded_by_another_process(tmp_path, cache):
    x, found = real()
    add(CPU, [found], save=False)
    assert schedule.export(tmp_path / "exported.json") == 1
    schedule.reread()
    assert reason_of_softmax(x)[1] != "fastest measured on this device"
    assert schedule.load(tmp_path / "exported.json") == 1
    assert reason_of_softmax(x) == ("eager", "fastest measured on this device")
    assert not list(cache.glob("*.json"))
    schedule.load(tmp_path / "exported.json", save=True)
    assert [file.name for file in cache.glob("*.json")] == [CPU.file_name]


def test_a_loaded_record_of_another_machine_or_of_nonsense_is_set_aside_with_a_warning(tmp_path):
    x, found = real()
    add(CPU, [found], save=False)
    schedule.export(tmp_path / "exported.json")
    text = (tmp_path / "exported.json").read_text()
    schedule.reread()
    foreign = json.loads(text)
    foreign["records"][0]["identity"]["name"] = "NVIDIA GB300"
    cases = {
        "it was measured elsewhere: name NVIDIA GB300, here": json.dumps(foreign),
        "it is not JSON": text[:-20],
        "its format is 'none'": "[1, 2]",
    }
    for words, content in cases.items():
        (tmp_path / "bad.json").write_text(content)
        with pytest.warns(ScheduleWarning, match=words):
            assert schedule.load(tmp_path / "bad.json") == 0
        assert (tmp_path / "bad.json").read_text() == content
    assert reason_of_softmax(x)[1] != "fastest measured on this device"
    with pytest.raises(FileNotFoundError):
        schedule.load(tmp_path / "nothing.json")


def test_freezing_is_seen_by_calls_that_were_remembered_and_thawing_too():
    x = torch.randn(2, 3)  # smaller than any shipped entry
    assert reason_of_softmax(x)[1] == "fastest predicted"
    with schedule.freeze():
        assert reason_of_softmax(x)[1] == "fastest predicted (frozen: this problem is not in the record)"
        with schedule.freeze(strict=True), pytest.raises(UnsupportedError, match="frozen and has no measurement"):
            om.softmax(x)
        with pytest.raises(UnsupportedError, match=r"^schedule: load a record: the schedule is frozen"):
            schedule.load_state_dict(schedule.state_dict())
    assert reason_of_softmax(x)[1] == "fastest predicted"
    with schedule.freeze():
        assert "frozen" in reason_of_softmax(x)[1]
    assert reason_of_softmax(x)[1] == "fastest predicted", "what was chosen while frozen is not remembered"
    schedule.freeze()
    assert "frozen" in reason_of_softmax(x)[1]
    schedule.thaw()
    assert reason_of_softmax(x)[1] == "fastest predicted"


def test_a_planned_device_reads_shipped_entries_and_nothing_of_this_machine():
    _, found = real()
    add(CPU, [found])
    record = record_for(backends.NAMED["b200"])
    assert record.exact == {}
    assert record.entries == schedule.load_shipped().entries


def test_a_cache_that_changes_threads_changes_the_record():
    _, found = real()
    add(CPU, [found])
    before = torch.get_num_threads()
    device = backends.device_of(torch.device("cpu"))
    try:
        torch.set_num_threads(before + 1)
        assert record_for(device).exact == {}
        assert identity_of(device) != CPU
    finally:
        torch.set_num_threads(before)
    assert record_for(device).exact != {}


def test_seconds_of_first_use_are_checked():
    for bad in (-1, float("inf"), "1"):
        with pytest.raises(om.ArgumentError, match=r"^schedule\.first_use: seconds must be finite and at least 0; got"):
            schedule.first_use(bad)


def test_choosing_on_the_warm_path_takes_under_two_microseconds():
    """What a warm call pays for the choice: its key and one look into the memo. Measured 0.24 us (CPU, 2026-11-29); anew takes 75."""
    phase = catalog.operators()["softmax"].phases["fwd"]
    x = torch.randn(8, 16)
    om.softmax(x)
    problem, device = phase.problem_of(x, torch.float32), x.device

    def warm(repeats=2000):
        start = time.perf_counter()
        for _ in range(repeats):
            key = (problem, device, settings.policy(), torch.are_deterministic_algorithms_enabled())
            found = phase.memo.get(key)
        assert found is not None
        return (time.perf_counter() - start) / repeats * 1e6

    def cold():
        phase.forget()
        start = time.perf_counter()
        om.softmax(x)
        return (time.perf_counter() - start) * 1e6

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert min(warm() for _ in range(20)) < 2.0
        assert statistics.median(cold() for _ in range(20)) > 5.0, "the bound above could not fail: a choice anew is as quick"
    assert LIVE.collector is None


@pytest.mark.parametrize(
    ("name", "cols", "chosen"),
    [
        ("rms_norm", 4096, "triton_gpu"),
        ("rms_norm", 28672, "triton_gpu"),
        ("layer_norm", 28672, "triton_gpu"),
        ("rms_norm", 65536, "vendor"),
    ],
)
def test_the_backward_of_wide_rows_is_ours_where_an_h200_measured_it_faster(name, cols, chosen, monkeypatch):
    """0.60 and 0.56 of a copy at 28,672 columns, PyTorch's 0.37; wider rows are read twice."""
    monkeypatch.setattr(features, "has_kernel", lambda *_: True)
    operator = catalog.operators()[name]
    x, w, rstd = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((4096, cols), cols, 4096))
    call = {
        "rms_norm": (x, None, x, w, rstd, 1e-6, 0.0, True, True),
        "layer_norm": (x, None, None, x, w, rstd, rstd, None, x.dtype, x.dtype, x.dtype, 0.0, True, False, True, True, False),
    }
    found = operator.choice(operator.phases["bwd"].problem_of(*call[name]), "bwd", backends.NAMED["h200"]).implementation.name
    assert found == chosen
