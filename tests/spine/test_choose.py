"""The scheduler's choice is a pure function, explains itself, and never hides a fallback."""

from __future__ import annotations

import types

import pytest

from ops_math import UnsupportedError
from ops_math.schedule import choose
from ops_math.schedule.record import EMPTY, load_shipped, parse
from ops_math.settings import Policy
from ops_math.spec import Cost, Device, Implementation

CPU = Device("cpu", "", "cpu", 2, 0, 20.0, 0.1, 3.0)
GPU = Device("cuda", "90", "NVIDIA H200", 132, 232448, 4272.0, 770.0, 8.0)
FREE = Policy("default", 0, ())
COST = Cost((("x", 1 << 20),), (("y", 1 << 20),), ())


def candidate(name, **facts):
    made = Implementation("toy", name, "nowhere")
    made._module = types.SimpleNamespace(**facts)
    return made


def answer(candidates, device=GPU, policy=FREE, record=EMPTY):
    return choose(candidates, ("problem",), COST, "bf16", "fwd", device, policy, record)


def test_the_fastest_predicted_candidate_wins_and_the_others_say_why_not():
    choice = answer([candidate("vendor", PASSES=3.0), candidate("eager", PASSES=1.0)])
    assert choice.implementation.name == "eager"
    assert choice.reason == "fastest predicted"
    assert choice.rejected[0][0] == "vendor"
    assert "predicted" in choice.rejected[0][1]


def test_a_measurement_outweighs_a_prediction():
    row = {"op": "toy", "phase": "fwd", "device": "NVIDIA H200", "dtype": "bf16", "size_low": 0, "size_high": 1 << 30}
    record = parse([{**row, "times_us": {"vendor": 5.0, "eager": 9.0}, "source": "a test"}])
    choice = answer([candidate("vendor", PASSES=3.0), candidate("eager", PASSES=1.0)], record=record)
    assert choice.implementation.name == "vendor"
    assert choice.reason == "fastest measured"


def test_a_measurement_of_another_device_dtype_or_size_is_not_used():
    row = {"op": "toy", "phase": "fwd", "device": "NVIDIA H200", "dtype": "bf16", "size_low": 0, "size_high": 1 << 30}
    for change in ({"device": "NVIDIA A100"}, {"dtype": "fp32"}, {"phase": "bwd"}, {"size_low": 1 << 29}):
        record = parse([{**row, "times_us": {"vendor": 5.0, "eager": 9.0}, "source": "a test", **change}])
        assert answer([candidate("vendor", PASSES=3.0), candidate("eager")], record=record).implementation.name == "eager"


def test_a_refusal_of_the_devices_own_implementation_is_a_fallback_with_its_reason():
    own = candidate("triton_gpu", supports=lambda p, d, phase: "has no fp64 kernel")
    choice = answer([own, candidate("eager")])
    assert choice.implementation.name == "eager"
    assert choice.fallback == "has no fp64 kernel"


def test_a_forced_implementation_runs_even_if_it_is_slower():
    policy = FREE._replace(forced=(("toy", "vendor"),))
    assert answer([candidate("vendor", PASSES=9.0), candidate("eager")], policy=policy).implementation.name == "vendor"


def test_forcing_an_implementation_that_does_not_exist_or_cannot_run_is_refused_in_words():
    with pytest.raises(UnsupportedError, match=r"^toy: there is no implementation 'magic'\. Pick one of eager\.$"):
        answer([candidate("eager")], policy=FREE._replace(forced=(("toy", "magic"),)))
    own = candidate("triton_gpu", supports=lambda p, d, phase: "too small")
    with pytest.raises(UnsupportedError, match=r"triton_gpu: too small; eager: triton_gpu was asked for"):
        answer([own, candidate("eager")], policy=FREE._replace(forced=(("toy", "triton_gpu"),)))


def test_determinism_removes_configurations_and_whole_candidates():
    levels = {"atomic": 0, "ordered": 1}
    mixed = candidate("vendor", configs=lambda p, d, phase: ("atomic", "ordered"), determinism=lambda p, c, phase: levels[c])
    assert answer([mixed]).config == "atomic"
    assert answer([mixed], policy=FREE._replace(determinism=1)).config == "ordered"
    loose = candidate("vendor", configs=lambda p, d, phase: ("atomic",), determinism=lambda p, c, phase: levels[c])
    choice = answer([loose, candidate("eager", PASSES=9.0)], policy=FREE._replace(determinism=1))
    assert choice.implementation.name == "eager"
    assert choice.rejected == (("vendor", "offers no determinism level 1 for this problem"),)


def test_a_kernel_is_not_even_imported_where_triton_cannot_run():
    choice = answer([Implementation("toy", "triton_gpu", "no.such.module"), candidate("eager")], device=CPU)
    assert choice.rejected[0] == ("triton_gpu", "Triton kernels need a GPU, this is cpu")


def test_equal_times_go_to_the_candidate_listed_first_every_time():
    picks = {answer([candidate("vendor"), candidate("eager")]).implementation.name for _ in range(20)}
    assert picks == {"vendor"}


def test_the_shipped_record_holds_measurements_with_their_source_and_rows_that_we_lose():
    entries = load_shipped().entries
    assert entries
    for entry in entries:
        assert entry.size_low < entry.size_high
        assert len(entry.times_us) > 1
        assert "commit" in entry.source
        assert "torch" in entry.source
    assert any(min(e.times_us, key=e.times_us.get) == "vendor" for e in entries)


def test_where_the_record_says_that_pytorch_wins_pytorch_runs(tmp_path, monkeypatch):
    import torch

    import ops_math as om

    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path))  # what this machine was calibrated to is no matter here
    om.schedule.reread()
    om.reset_stats()
    om.layer_norm(torch.randn(1024, 320), torch.ones(320))
    monkeypatch.undo()
    om.schedule.reread()
    (row,) = om.stats().rows
    assert (row.implementation, row.reason) == ("vendor", "fastest measured")
