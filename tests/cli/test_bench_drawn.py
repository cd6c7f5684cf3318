"""Shapes drawn from a seed: the same for the same seed, all kinds early, ours and rivals in one visit, the end in words."""

import pytest
import torch

from benchmarks import random_shapes
from ops_math import checks
from ops_math.cli.bench import calls, drawn, driver, rivals
from ops_math.cli.bench.clock import Sample

CPU = torch.device("cpu")


class MadeUp:
    """Ours takes `ours` us, all others 10; each call is run once."""

    fixed_s = 0.0

    def __init__(self, ours=8.0):
        self.ours, self.orders = ours, []

    def take(self, posed, order):
        self.orders.append(list(order))
        for timed in posed.values():
            timed.run(timed.prepare())
        return [Sample(self.ours if name.endswith("ops_math") else 10.0, 1.0) for name in order]


def plans(seed=3, count=20, wanted=None):
    return drawn.plans(count, seed, CPU, "fp32", ("torch",), wanted or drawn.functions())


def test_a_seed_draws_twenty_shapes_for_each_memory_bound_operator():
    first, again, other = plans(), plans(), plans(4)
    assert [p.label for p in first] == [p.label for p in again] != [p.label for p in other]
    assert len(first) == 20 * len(drawn.functions())
    assert {"rms_norm", "layer_norm", "softmax", "gelu", "cross_entropy", "swiglu"} <= set(drawn.functions())
    for plan in first:
        rows, cols = calls.sizes_of(plan.function, plan.shape)
        assert 64 <= cols <= 16384
        assert 1 <= rows <= 1_000_000
        assert rows * cols <= max(drawn.MOST["cpu"], cols)
    assert len({p.function for p in first[:40]}) > 8, "a run cut short has met most operators"


@pytest.mark.parametrize("function", ["rms_norm", "cross_entropy", "dropout"])
def test_a_visit_times_both_phases_of_all_in_turns(function):
    (plan,) = drawn.plans(1, 0, CPU, "fp32", ("torch",), [function])
    clock = MadeUp()
    outcome = drawn.visit(plan, clock, rounds=2)
    names = ["fwd ops_math", "bwd ops_math", "fwd torch", "bwd torch"]
    assert clock.orders == [[*names, *names[::-1]]]
    rows = driver.rows_of(outcome)
    assert [(row["phase"], row["variant"]) for row in rows] == [
        ("fwd", "ops_math"),
        ("fwd", "torch"),
        ("bwd", "ops_math"),
        ("bwd", "torch"),
    ]
    assert {row["ratio_to_torch"] for row in rows} == {0.8, 1.0}
    assert not any(row["wrong"] for row in rows)


def test_wrong_numbers_of_ours_are_seen_and_fail_the_run(monkeypatch):
    from ops_math.catalog import operators

    implementation = next(i for i in operators()["rms_norm"].implementations() if i.name == "eager")
    original = implementation.launcher("fwd")
    monkeypatch.setitem(implementation.replaced, "fwd", lambda *args: tuple(t * 1.05 for t in original(*args)))
    operators()["rms_norm"].forget()
    found = drawn.run(drawn.plans(1, 0, CPU, "fp32", ("torch",), ["rms_norm"]), MadeUp(), 60.0, lambda row: None)
    operators()["rms_norm"].forget()
    assert drawn.ours_failed(found)
    assert any(line.startswith("wrong numbers: ops_math in rms_norm") for line in drawn.words(found))


def test_the_end_names_every_place_where_a_rival_wins_and_the_worst():
    posed = drawn.plans(2, 0, CPU, "fp32", ("torch", "liger"), ["softmax"])
    told = []
    found = drawn.run(posed, MadeUp(ours=20.0), 60.0, told.append)
    lines = drawn.words(found)
    assert told == found.rows
    assert lines[0] == "2 of 2 calls were reached in the time given"
    assert lines[1] == "not measured: liger: liger-kernel is not installed"
    assert lines[2] == "4 of 4 calls in which a rival is faster:"
    assert lines[3] == f"  softmax {posed[0].shape} fp32 fwd: torch takes 0.50 of our time"
    assert lines[-1].startswith("worst ratio to plain PyTorch: 2.00 (softmax")
    assert not drawn.ours_failed(found)
    assert drawn.words(drawn.run(posed, MadeUp(ours=1.0), 60.0, told.append))[2] == "0 of 4 calls in which a rival is faster"


def test_time_that_is_over_ends_the_run_and_is_said():
    found = drawn.run(plans(count=2), MadeUp(), 0.0, lambda row: None)
    assert found.reached < found.asked
    assert drawn.words(found)[0] == f"{found.reached} of {found.asked} calls were reached in the time given"


def test_one_of_ours_that_cannot_run_at_all_is_named_and_fails_the_run(monkeypatch):
    def broken(plan, clock):
        raise checks.UnsupportedError("rms_norm: no kernel")

    monkeypatch.setattr(drawn, "visit", broken)
    found = drawn.run(drawn.plans(1, 0, CPU, "fp32", ("torch",), ["rms_norm"]), MadeUp(), 60.0, lambda row: None)
    assert drawn.ours_failed(found)
    assert any("rms_norm: no kernel" in line for line in drawn.words(found))


def test_a_rival_that_raises_is_named_and_the_others_are_timed(monkeypatch):
    def broken(x):
        raise RuntimeError("bad rival")

    subjects = rivals.subjects
    monkeypatch.setattr(
        drawn.rivals, "subjects", lambda *args: ([*subjects(*args)[0], rivals.Subject("rival", broken)], {}),
    )  # fmt: skip
    found = drawn.run(drawn.plans(1, 0, CPU, "fp32", ("torch",), ["softmax"]), MadeUp(), 60.0, lambda row: None)
    assert [why for name, why in found.failed.items() if name.startswith("rival in softmax")] == ["failed: RuntimeError: bad rival"]
    assert {row["variant"] for row in found.rows} == {"ops_math", "torch"}
    assert not drawn.ours_failed(found)


def test_the_script_runs_on_a_cpu_and_appends_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", [
        "benchmarks/random_shapes.py", "gelu", "--seed", "1", "--count", "2", "--device", "cpu", "--results", str(tmp_path / "r.jsonl"),
    ])  # fmt: skip
    with pytest.raises(SystemExit) as end:
        random_shapes.main()
    assert end.value.code is False
    out = capsys.readouterr().out
    assert "2 of 2 calls were reached in the time given" in out
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 8
