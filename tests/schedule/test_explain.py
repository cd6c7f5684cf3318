"""`ops-math explain` and `ops-math calibrate`: each candidate with its times and reason, for devices that are here and that are not."""

import json

import pytest
import torch
from typer.testing import CliRunner

import ops_math as om
from ops_math import backends, catalog, schedule
from ops_math.cli import explain as command
from ops_math.cli.app import application
from ops_math.schedule.live import add
from ops_math.schedule.record import bucket
from tests.schedule import toy
from tests.schedule.test_choice import real
from tests.schedule.test_record import CPU, row

RUNNER = CliRunner()
ATTENTION = ["explain", "attention", "--shape", "4x4096x32x8x128", "--with", "causal=true", "--json"]


def asked(*words):
    result = RUNNER.invoke(application, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_gpu_that_is_not_here_is_planned_for():
    fwd, bwd = json.loads(asked(*ATTENTION, "--device", "h100"))
    assert (fwd["op"], fwd["phase"], bwd["phase"]) == ("attention", "fwd", "bwd")
    assert fwd["device"]["name"] == "NVIDIA H100"
    rows = {row["implementation"]: row for row in fwd["rows"]}
    assert rows["vendor"]["config"] == "cudnn"
    assert rows["triton_gpu"]["configs"] > 1
    assert rows["vendor"]["predicted_us"] > fwd["floor_us"] > 700
    assert [row["runs"] for row in fwd["rows"]].count(True) == 1
    assert all(row["words"] for row in fwd["rows"])


def test_devices_differ_in_what_they_can_and_how_fast():
    h100, b200 = (json.loads(asked(*ATTENTION, "--device", name))[0] for name in ("h100", "b200"))
    assert b200["floor_us"] < h100["floor_us"] / 2
    cpu = json.loads(asked("explain", "attention", "--shape", "1x64x4x4x64", "--device", "cpu", "--json"))[0]
    rows = {row["implementation"]: row for row in cpu["rows"]}
    assert rows["triton_gpu"]["words"] == "Triton kernels need a GPU, this is cpu"
    assert rows["triton_gpu"]["predicted_us"] is None


@pytest.mark.parametrize("function", command.CALLS)
def test_every_function_is_explained_forward_and_backward(function):
    sizes = {1: "64x96", 2: "64x32x512", 4: "2x64x4x2x64"}[command.CALLS[function][0].count("x")]
    found = json.loads(asked("explain", function, "--shape", sizes, "--device", "h200", "--json"))
    assert {one["phase"] for one in found} >= {"fwd", "bwd"}
    assert {one["op"] for one in found} == {catalog.public_functions()[function].name}


def test_no_public_function_is_left_unexplained():
    assert set(command.CALLS) == set(catalog.public_functions())


def test_what_was_measured_here_is_shown_with_its_date_and_what_was_refused():
    x, found = real()
    add(CPU, [found._replace(refused={"magic": "result 0 has NaN"}, noise={"eager": 0.02}, host_us={"eager": 3.0})], save=False)
    text = asked("explain", "softmax", "--shape", f"{x.shape[0]}x{x.shape[1]}", "--dtype", "fp32", "--device", "cpu")
    assert "9.0 us ±2%" in text
    assert "measured here, 2026-11-29, numbers held to eager in fp64" in " ".join(text.split())
    assert "not timed: magic: result 0 has NaN" in text
    assert "runs eager" in text


def test_of_a_candidate_that_lost_the_fastest_configuration_is_shown():
    entry = toy.registered({"magic": toy.eager, "eager": toy.eager}, magic={"configs": lambda p, d, phase: ("a", "b", "c")})
    problem = toy.ToyProblem(100, 200, "fp32")
    times = {"eager": 3.0, "magic:a": 9.0, "magic:b": 5.0}
    found = row(problem, bucket=bucket(problem), times_us=times, noise={}, host_us={}, winner="eager", source="no-sources")
    add(CPU, [found], save=False)
    told = schedule.explain(entry, "fwd", problem, backends.device_of(torch.device("cpu")))
    magic = next(one for one in told.rows if one.implementation == "magic")
    assert (magic.config, magic.configs, magic.measured_us) == ("b", 3, 5.0)
    assert magic.words == "measured 5.0 us against 3.0 us"
    cpu = backends.device_of(torch.device("cpu"))
    like = schedule.explain(entry, "fwd", problem._replace(rows=101), cpu).measured
    assert like.endswith("on a like problem: ToyProblem(rows=100, cols=200, x='fp32')")
    assert schedule.explain(entry, "fwd", problem._replace(rows=104), cpu).measured == ""


def test_a_measurement_of_configurations_that_there_are_not_is_not_called_the_reason():
    entry = toy.registered(
        {"magic": toy.eager, "eager": toy.eager}, **{n: {"configs": lambda p, d, phase: ("a",)} for n in ("magic", "eager")}
    )
    problem = toy.ToyProblem(100, 200, "fp32")
    times = {"eager:z": 3.0, "magic:y": 9.0}
    found = row(problem, bucket=bucket(problem), times_us=times, noise={}, host_us={}, winner="eager:z", source="no-sources")
    add(CPU, [found], save=False)
    told = schedule.explain(entry, "fwd", problem, backends.device_of(torch.device("cpu")))
    assert told.reason == "fastest predicted"
    assert told.measured == "here, 2026-11-29, but none of the candidates that can run"


def test_an_explanation_is_the_choice_that_a_call_makes():
    x = torch.randn(300, 200)
    om.reset_stats()
    om.layer_norm(x, torch.ones(200))
    (row,) = om.stats().rows
    found = json.loads(asked("explain", "layer_norm", "--shape", "300x200", "--dtype", "fp32", "--device", "cpu", "--json"))[0]
    winner = next(one for one in found["rows"] if one["runs"])
    assert (winner["implementation"], winner["words"]) == (row.implementation, row.reason)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["softmax", "--shape", "12"], "explain: --shape must be ROWSxCOLS for softmax; got '12'."),
        (["softmax", "--shape", "²x3"], "explain: --shape must be ROWSxCOLS for softmax; got '²x3'."),
        (["softmax", "--shape", "12x0"], "explain: --shape must be ROWSxCOLS for softmax; got '12x0'."),
        (["softmax", "--shape", "9999999999x9999999999"], "explain: --shape must be of at most 2^56 elements, "),
        (["softmax", "--shape", f"3x{10**30}"], "explain: --shape must be of at most 2^56 elements, "),
        (["softmin", "--shape", "12x3"], "explain: operator must be one of 'rms_norm', "),
        (["softmax", "--shape", "12x3", "--device", "gb300"], "explain: --device must be one of 'cpu', 'a100', "),
        (["softmax", "--shape", "12x3", "--dtype", "int8"], "explain: --dtype must be one of "),
        (["softmax", "--shape", "12x3", "--with", "dim"], "explain: --with must be KEYWORD=VALUE; got 'dim'."),
        (["softmax", "--shape", "12x3", "--with", "axis=1"], "explain: --with must be a keyword of softmax; got "),
    ],
)
def test_what_is_mistyped_is_answered_in_words(words, sentence):
    result = RUNNER.invoke(application, ["explain", *words])
    assert str(result.exception).startswith(sentence)


@pytest.mark.slow
def test_a_model_is_calibrated_from_the_command_line_and_the_record_is_written(cache, tmp_path):
    out = tmp_path / "exported.json"
    words = ["--model", "llama-tiny", "--batch", "1", "--seq", "32", "--seconds", "4", "--device", "cpu", "--export", str(out), "--json"]
    found = json.loads(asked("calibrate", *words))
    assert {"attention", "rms_norm", "rope", "glu"} <= {m["op"] for m in found["measurements"]}
    assert [file.name for file in cache.glob("*.json")] == [CPU.file_name]
    schedule.reread()
    assert schedule.load(out, only=True) == len(found["measurements"])
    assert json.loads(asked("calibrate", *words))["measurements"] == []


@pytest.mark.parametrize("function", ["attention", "rms_norm", "linear_cross_entropy", "linear", "cross_entropy"])
def test_without_a_shape_a_large_call_is_explained(function):
    found = json.loads(asked("explain", function, "--device", "h100", "--json"))
    assert [one["phase"] for one in found] == ["fwd", "bwd"]


def test_a_model_that_does_not_exist_is_refused():
    result = RUNNER.invoke(application, ["calibrate", "--model", "llama-9t"])
    assert str(result.exception).startswith("calibrate: --model must be one of 'llama-tiny'")


def test_at_level_two_it_explains_the_choice_that_a_call_gets():
    operator = catalog.operators()["layer_norm"]
    with om.determinism(2):
        om.reset_stats()
        om.layer_norm(torch.randn(3, 64), torch.ones(64))
        (ran,) = om.stats().rows
        problem = operator.phases["fwd"].problem_of(
            torch.randn(3, 64), None, torch.ones(64), None, None, None, 1e-5, 0.0, torch.float32, None
        )
        found = schedule.explain(operator, "fwd", problem, backends.device_of(torch.device("cpu")))
    assert [r.implementation for r in found.rows if r.runs] == [ran.implementation] == ["eager"]
    vendor = next(r for r in found.rows if r.implementation == "vendor")
    assert vendor.words == (
        "offers no determinism level 2 for this problem (PyTorch's kernels choose their order of sums by the number of rows)"
    )
