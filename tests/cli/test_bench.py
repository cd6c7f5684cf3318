"""`ops-math bench`: every function has shapes, what is wrong is named, a slowdown fails the check, and a CPU gives ratios only."""

import errno
import io
import json
import os
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ops_math import catalog, checks
from ops_math.cli.app import application
from ops_math.cli.bench import calls, command, driver, rivals, show
from ops_math.cli.bench.clock import Sample
from ops_math.cli.bench.driver import Measured, Outcome, Plan, Work
from tests.cli.bench_fixtures import MadeUpClock

CPU = torch.device("cpu")


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """A clock that makes times up, and a cache folder of this test's own."""
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path))
    held = {"clock": MadeUpClock(0)}
    monkeypatch.setattr(command, "clock_for", lambda device: held["clock"])
    return held


def run(*options):
    return CliRunner().invoke(application, ["bench", *options])


def measured(function, shape, dtype="fp32", names="torch", **options):
    plan = Plan(function, shape, options, dtype, CPU, rivals.asked(names))
    return driver.measure(plan, MadeUpClock(0), 0.0, 1)


def test_every_public_function_has_standard_shapes():
    assert set(calls.CALLS) == set(catalog.public_functions()), "give a new function a line in src/ops_math/cli/bench/calls.py"
    assert all(entry.shapes and entry.small and entry.phases for entry in calls.CALLS.values())
    for function, entry in calls.CALLS.items():
        for shape, _ in (*entry.shapes, *entry.small):
            calls.sizes_of(function, shape)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("function", list(calls.CALLS))
def test_ours_runs_and_has_right_numbers_on_the_small_shapes(function, dtype):
    for shape, keywords in calls.CALLS[function].small[:1]:
        outcome = measured(function, shape, dtype, **keywords)
        assert outcome.failed == {}
        assert outcome.wrong == {}
        assert outcome.checked == ("a draw, not compared" if function == "dropout" else "plain PyTorch in fp64")
        rows = driver.rows_of(outcome)
        assert [row["phase"] for row in rows if row["variant"] == "ops_math"] == list(calls.CALLS[function].phases)
        assert all(row["implementation"] for row in rows if row["variant"] == "ops_math")


def test_a_cpu_gives_ratios_and_no_times(made_up):
    result = run("softmax", "--shape", "8x64", "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {(row["phase"], row["variant"]) for row in found["rows"]} == {(p, v) for p in ("fwd", "bwd") for v in ("ops_math", "torch")}
    for row in found["rows"]:
        assert not {"kernel_us", "host_us", "gbs", "share"} & set(row)
        assert row["ratio_to_torch"] == pytest.approx(1.0, abs=0.3)
    assert {"device", "torch", "commit", "liger", "PyTorch's CuTe kernels"} <= set(found["live"])


def test_a_rerun_is_not_flagged_in_20_repeats_and_a_slowdown_of_30_percent_is(made_up):
    options = ("softmax", "--shape", "8x64", "--device", "cpu", "--seconds", "0.1")
    made_up["clock"] = MadeUpClock(1)
    assert run(*options, "--save", "main").exit_code == 0
    for seed in range(2, 22):
        made_up["clock"] = MadeUpClock(seed)
        again = run(*options, "--check", "main")
        assert again.exit_code == 0, again.output
    made_up["clock"] = MadeUpClock(22, {"ops_math": 1300.0})
    slower = run(*options, "--check", "main")
    assert slower.exit_code == 1
    assert re.search(r"SLOWER: softmax 8x64 fp32 fwd ops_math: time over that of torch: by (2[5-9]|3[0-5])%", slower.output)
    assert "SLOWER: softmax 8x64 fp32 bwd" in slower.output


def test_a_machine_that_became_slower_as_a_whole_is_no_regression(made_up):
    options = ("softmax", "--shape", "8x64", "--device", "cpu", "--seconds", "0.1")
    assert run(*options, "--save", "main").exit_code == 0
    made_up["clock"] = MadeUpClock(5, {"ops_math": 2000.0, "torch": 2000.0})
    assert run(*options, "--check", "main").exit_code == 0


def test_save_writes_a_picture_beside_the_baseline_and_results_append_rows(made_up, tmp_path):
    for _ in range(2):
        result = run(
            "softmax", "--shape", "8x64", "--device", "cpu", "--save", str(tmp_path / "b.json"), "--results", str(tmp_path / "r.jsonl")
        )
        assert result.exit_code == 0, result.output
    svg = (tmp_path / "b.svg").read_text()
    assert ET.fromstring(svg).tag.endswith("svg")
    assert "softmax 8x64 fp32 fwd" in svg
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {"benchmark", "op", "phase", "variant", "device", "commit", "command"} <= set(rows[0])


def test_what_was_measured_stays_on_the_screen_when_the_disk_is_full(made_up, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "p.svg").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    places = ["--save", str(tmp_path / "b.json"), "--picture", str(tmp_path / "p.svg"), "--results", "/dev/full"]
    result = run("softmax", "--shape", "8x64", "--device", "cpu", *places)
    assert "softmax 8x64 fp32" in result.stdout
    assert isinstance(result.exception, OSError)  # which `ops-math` says in one sentence, with exit code 2
    said = [f"{place} could not be written: No space left on device" for place in (tmp_path / "b.json", tmp_path / "p.svg", "/dev/full")]
    assert str(result.exception) == "; ".join(said)
    assert (tmp_path / "p.svg").read_text() == "old"
    assert not list(tmp_path.glob("*.part"))
    as_data = run("softmax", "--shape", "8x64", "--device", "cpu", "--json", *places)
    assert json.loads(as_data.stdout)["rows"]


def test_a_file_in_the_way_of_a_baseline_is_said_before_anything_is_measured(made_up, tmp_path):
    (tmp_path / "b.json").write_text("notes")
    result = run("softmax", "--shape", "8x64", "--device", "cpu", "--save", str(tmp_path / "b.json"))
    assert str(result.exception).startswith("bench: --save must be a baseline that can be read; got ")
    assert made_up["clock"].orders == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["rms_nrom"], "bench: OP must be one of "),
        (["rms_norm", "--shape", "4"], "bench: --shape must be ROWSxCOLS for rms_norm; got '4'. Write it like 16384x4096."),
        (["all", "--shape", "4x4"], "bench: --shape must be used with one operator and without --random; got all."),
        (["rms_norm", "--vs", "torch,lieger"], "bench: --vs must be one of "),
        (["rms_norm", "--with", "eps"], "bench: --with must be KEYWORD=VALUE; got 'eps'."),
        (
            ["rms_norm", "--shape", "4x8", "--with", "epsilon=1"],
            "bench: --with must be a keyword of rms_norm; got rms_norm() got an unexpected",
        ),
        (["rope", "--random", "3"], "bench: --random must be used with an operator of rows and columns; got rope."),
        (["rms_norm", "--random", "-3"], "bench: --random must be above 0; got -3."),
        (["rms_norm", "--save", "x", "--sessions", "1"], "bench: --sessions must be at least 3 with --save or --check; got 1."),
        (["rms_norm", "--check", "never"], "bench: --check must be a baseline that was saved on this device; got none at "),
        (["rms_norm", "--dtype", "int8"], "bench: --dtype must be one of "),
        (["rms_norm", "--seconds", "0"], "bench: --seconds must be positive; got 0.0."),
        (["step", "--model", "gpt-9"], "bench: --model must be one of "),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_words(options, words, made_up):
    result = run(*options, "--device", "cpu")
    assert isinstance(result.exception, checks.ArgumentError)
    assert str(result.exception).startswith(words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_here_is_refused():
    result = run("rms_norm", "--device", "cuda")
    assert str(result.exception).startswith("bench: --device cuda: torch sees no GPU here. Use --device cpu")


@pytest.fixture
def eager_softmax():
    """The implementations of softmax, to plant faults in; mended afterwards."""
    operator = catalog.operators()["softmax"]
    yield operator
    for implementation in operator.implementations():
        implementation.replaced.clear()
    operator.forget()


def plant(operator, phase, change):
    for implementation in operator.implementations():
        original = implementation.launcher(phase)
        implementation.replaced[phase] = lambda *args, original=original: change(original, *args)
    operator.forget()


def test_wrong_numbers_of_ours_are_named_and_fail_the_command(made_up, eager_softmax):
    def scaled(original, *args):
        found = original(*args)
        return found * 1.01 if isinstance(found, torch.Tensor) else tuple(one * 1.01 for one in found)

    plant(eager_softmax, "bwd", scaled)
    result = run("softmax", "--shape", "8x64", "--device", "cpu")
    assert result.exit_code == 1
    assert "wrong numbers: ops_math in softmax 8x64 fp32 fwd: result 1 is wrong" in result.output
    assert "wrong numbers: torch" not in result.output


def test_ours_that_raises_is_named_and_fails_the_command(made_up, eager_softmax):
    def broken(original, *args):
        raise RuntimeError("the device is on fire")

    plant(eager_softmax, "bwd", broken)
    result = run("softmax", "--shape", "8x64", "--shape", "4x32", "--device", "cpu")
    assert result.exit_code == 1
    for shape in ("8x64", "4x32"):
        assert f"dropped out: ops_math in softmax {shape} fp32: failed: RuntimeError: the device is on fire" in result.output


def test_a_clock_that_gives_up_is_named_and_fails_the_command(made_up, monkeypatch):
    def take(calls, order):
        checks.refuse("bench: kernel times", "the profile has 1 marks where 2 were made", "Give it fewer --seconds")

    monkeypatch.setattr(made_up["clock"], "take", take)
    result = run("softmax", "--shape", "8x64", "--device", "cpu")
    assert result.exit_code == 1
    assert "dropped out: the clock in softmax 8x64 fp32: bwd: bench: kernel times: the profile has 1 marks" in result.output


def test_random_shapes_keep_within_their_bounds_and_the_memory():
    shapes = [calls.sizes_of("rms_norm", shape) for shape in calls.random_shapes("rms_norm", 500, 7, 1 << 40)]
    rows, cols = zip(*shapes, strict=True)
    assert min(cols) >= 64
    assert max(cols) <= 16384
    assert min(rows) >= 1
    assert max(rows) <= 1_000_000
    assert sum(n < 1000 for n in rows) > 150, "each octave is as likely: small ones are half of all"
    assert sum(n % 8 != 0 for n in cols) > 250, "most widths are odd ones"
    capped = [calls.sizes_of("rms_norm", shape) for shape in calls.random_shapes("rms_norm", 500, 7, 1 << 16)]
    assert max(m * n for m, n in capped) <= 1 << 16
    assert [n for _, n in capped] == list(cols), "memory takes rows away and changes nothing else"
    assert calls.random_shapes("softmax", 20, 7, 1 << 30) != calls.random_shapes("softmax", 20, 8, 1 << 30)


def test_random_shapes_report_the_worst_of_ours(made_up):
    result = run("softmax", "--random", "3", "--seed", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert re.search(r"worst ratio to plain PyTorch: \d\.\d\d \(softmax \d+x\d+ fp32 (fwd|bwd)\)", result.output)


def test_compiled_code_starts_afresh_for_each_call_so_that_no_shape_is_run_eagerly_in_silence(monkeypatch):
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    measured("softmax", "2x8", names="torch,compile")
    measured("softmax", "2x16", names="torch,compile")
    assert len(resets) == 2


def gpu_outcome(function, products, **times):
    """What a GPU would have given, without one."""
    plan = Plan(function, "4x4", {}, "bf16", torch.device("cuda"), ("torch",))
    samples = {name.replace("copy", "copy_"): [Sample(us, 10.0)] * 7 for name, us in times.items()}
    session = Measured("fwd", samples, Work(8_000_000, products, "triton_gpu"))
    return Outcome(plan, {"fwd": [session]}, {}, {}, {}, "plain PyTorch in fp64", {})


def test_a_gpu_row_has_kernel_time_host_time_rate_and_share_of_the_copy():
    ours, torchs = driver.rows_of(gpu_outcome("rms_norm", 0, ops_math=2.5, torch=5.0, copy=2.0))
    assert (ours["kernel_us"], ours["host_us"], ours["gbs"], ours["share"]) == (2.5, 10.0, 3200.0, 0.8)
    assert (ours["ratio_to_torch"], torchs["share"], ours["implementation"]) == (0.5, 0.4, "triton_gpu")


def test_a_call_that_meets_no_operator_of_ours_says_so_and_has_no_share():
    outcome = gpu_outcome("dropout", 0, ops_math=2.0, torch=2.0, copy=1.0)
    session = outcome.measured["fwd"][0]._replace(work=Work(0, 0, driver.PLAIN))
    ours, _ = driver.rows_of(outcome._replace(measured={"fwd": [session]}))
    assert (ours["implementation"], ours["kernel_us"]) == ("plain PyTorch", 2.0)
    assert not {"gbs", "share", "tflops"} & set(ours)
    assert show.table([ours]).row_count == 2


def test_an_operator_of_products_is_held_to_a_product():
    done = 2 * driver.PRODUCT_WIDTH**3
    ours, _ = driver.rows_of(gpu_outcome("attention", done // 4, ops_math=500.0, torch=1000.0, product=1000.0))
    assert ours["tflops"] == pytest.approx(done / 4 / 500e6)
    assert ours["share"] == pytest.approx(0.5)
    assert "gbs" not in ours


def test_a_baseline_of_a_gpu_holds_kernel_time_against_the_copy_and_host_time_against_torch():
    kept = driver.kept(gpu_outcome("rms_norm", 0, ops_math=2.5, torch=5.0, copy=2.0), {})
    assert kept["rms_norm 4x4 bf16 fwd ops_math"]["metrics"] == {
        "kernel time over that of copy_": [[1.25] * 7],
        "host time over that of torch": [[1.0] * 7],
    }
    assert list(kept) == ["rms_norm 4x4 bf16 fwd ops_math"], "rivals are no business of a baseline"


def test_the_copy_moves_as_many_bytes_as_the_operator_must():
    plan = Plan("rms_norm", "4x4", {}, "bf16", CPU, ("torch",))
    name, copy = driver.ceiling(plan, Work(1 << 20, 0, ""))
    assert name == "copy_"
    assert copy().numel() * 2 * 2 == 1 << 20


def gpu_row(variant, us, share, **more):
    known = {"benchmark": "operator", "op": "rms_norm", "shape": "4x4", "dtype": "bf16", "phase": "fwd", "noise": 0.01}
    return {**known, "variant": variant, "kernel_us": us, "share": share, "gbs": 1.0, "host_us": 1.0, "ratio_to_torch": 1.0, **more}


def test_the_table_of_a_gpu_shows_times_rates_shares_and_wrong_numbers():
    rows = [gpu_row("ops_math", 10.0, 0.8, implementation="triton_gpu"), gpu_row("liger", 8.0, 0.99, wrong="result 0 is wrong")]
    rows.append({k: v for k, v in gpu_row("torch", 9.0, 0.5, tflops=600.0, op="attention").items() if k != "gbs"})
    out = Console(width=140, record=True, file=io.StringIO())
    show.tell(out, rows, {"quack: has no rms_norm": "rms_norm"}, {"fa4 in attention": "failed"}, {"device": "NVIDIA H200"})
    text = out.export_text()
    assert re.search(r"ops_math +│ 10.0 us +│ 1 GB/s +│ 0.80 +│ 1 us +│ 1.00 +│ 1% +│ +│ triton_gpu", text)
    assert re.search(r"torch +│ 9.0 us +│ 600 TFLOP/s +│ 0.50", text)
    assert "WRONG NUMBERS" in text
    assert "wrong numbers: liger in rms_norm 4x4 bf16 fwd: result 0 is wrong" in text
    assert "not measured in rms_norm: quack: has no rms_norm" in text
    assert "dropped out: fa4 in attention: failed" in text


def test_losses_are_named_and_a_rival_with_wrong_numbers_wins_nothing():
    rows = [
        gpu_row("ops_math", 10.0, 0.8),
        gpu_row("torch", 12.0, 0.7),
        gpu_row("liger", 8.0, 0.99),
        gpu_row("quack", 5.0, 1.5, wrong="NaN"),
    ]
    assert show.lost(rows) == ["rms_norm 4x4 bf16 fwd: liger takes 0.80 of our time"]
    assert show.lost([row for row in rows if row["variant"] != "liger"]) == []
    assert show.lost([gpu_row("ops_math", 10.0, 0.8), gpu_row("torch", 9.8, 0.8)]) == [], "a tie is no loss"
    step = {"benchmark": "step", "model": "m", "batch": 1, "seq": 1, "noise": 0.01}
    forms = [step | {"variant": v, "ratio_to_plain": r} for v, r in (("plain", 1.0), ("ops", 0.9), ("packed", 0.8), ("graphed", 0.5))]
    assert show.lost(forms) == [], "other forms of ours are no rivals"
    assert (
        show.worst_words([*rows, gpu_row("ops_math", 1.0, 0.3, phase="bwd")]) == "worst share of the ceiling: 0.30 (rms_norm 4x4 bf16 bwd)"
    )
