"""`ops-math doctor`: each check on machines that are fit, doubtful and broken, and the command as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops_math.cli import diagnosis
from ops_math.cli.diagnosis import Gpu, Line
from ops_math.cli.doctor import verdict

SRC = Path(__file__).resolve().parents[2] / "src"
C_PROGRAM = "int main(void) { return 0; }\n"


def finished(code: int, stdout: str = "", stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(["probe"], code, stdout, stderr)


@pytest.mark.parametrize(("version", "status"), [((3, 10), "failure"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "warning")])
def test_python_is_fit_from_3_11_to_3_13(version, status):
    assert diagnosis.python_line(version, "python").status == status


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "failure"), ("2.11.0+cu128", "ok"), ("2.14.1", "ok"), ("2.15.0a0+git1", "warning")]
)
def test_torch_is_fit_from_2_11_to_2_14(version, status):
    assert diagnosis.torch_line(version).status == status


@pytest.mark.parametrize(
    ("installed", "wanted", "has_gpu", "status"),
    [
        ("3.6.0", "3.6.0", True, "ok"),
        ("3.9.0", None, False, "ok"),
        ("3.9.0", "3.6.0", True, "warning"),
        ("3.5.1", None, False, "failure"),
        ("3.10.0", "3.10.0", True, "failure"),
        (None, None, False, "warning"),
        (None, "3.6.0", True, "failure"),
    ],
)
def test_triton_must_be_the_one_that_torch_was_built_for(installed, wanted, has_gpu, status):
    line = diagnosis.triton_line(installed, wanted, has_gpu)
    assert line.status == status
    assert bool(line.do) == (status != "ok")


def test_the_wanted_triton_is_read_from_the_requirements_of_torch():
    assert diagnosis.triton_wanted(["filelock", 'triton==3.6.0; platform_system == "Linux"']) == "3.6.0"
    assert diagnosis.triton_wanted(['pytorch-triton-rocm==3.6.0 ; platform_system == "Linux"']) == "3.6.0"
    assert diagnosis.triton_wanted(["filelock", 'tritonclient>=2 ; extra == "serve"']) is None


@pytest.mark.parametrize(
    ("driver", "built_for", "sees_gpu", "status"),
    [
        ("580.65", "CUDA 13.0", True, "ok"),
        (None, None, False, "ok"),
        ("580.65", None, False, "warning"),
        ("470.82", "CUDA 13.0", False, "failure"),
    ],
)
def test_a_driver_that_torch_cannot_use_is_noticed(driver, built_for, sees_gpu, status):
    assert diagnosis.driver_line(driver, built_for, sees_gpu).status == status


def test_a_gpu_too_old_for_our_kernels_is_a_warning():
    new, old, amd = diagnosis.gpu_lines([Gpu("H200", "90", 141 << 30), Gpu("V100", "70", 16 << 30), Gpu("MI300X", "gfx942", 192 << 30)])
    assert (new.status, old.status, amd.status) == ("ok", "warning", "ok")
    assert new.found == "H200, sm_90, 141 GiB"
    assert amd.found == "MI300X, gfx942, 192 GiB"


def test_a_missing_compiler_is_a_warning_on_a_cpu_and_a_failure_on_a_gpu():
    for has_gpu, status in ((False, "warning"), (True, "failure")):
        line = diagnosis.compiler_line("C compiler", "no-such-compiler", "Triton's launcher", has_gpu, C_PROGRAM)
        assert (line.status, line.found) == (status, "not found")


def test_a_compiler_that_cannot_compile_is_noticed_with_its_own_words(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fatal: no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    line = diagnosis.compiler_line("C compiler", str(broken), "Triton's launcher", True, C_PROGRAM)
    assert (line.status, line.found) == ("failure", f"{broken} fails: fatal: no headers")


def test_the_kernel_line_tells_right_wrong_hung_and_interpreted_apart():
    def hung() -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("probe", diagnosis.PROBE_SECONDS)

    right = diagnosis.kernel_line(lambda: finished(0, '{"found": "compiled"}'), interpreted=False)
    wrong = diagnosis.kernel_line(lambda: finished(1, stderr="Traceback\nRuntimeError: ptxas"), interpreted=False)
    crashed = diagnosis.kernel_line(lambda: finished(-11), interpreted=False)
    assert right == Line("Triton kernel", "ok", "compiled")
    assert (wrong.status, wrong.found) == ("failure", "RuntimeError: ptxas")
    assert (crashed.status, crashed.found) == ("failure", "the process ended with -11 and no message")
    assert diagnosis.kernel_line(hung, interpreted=False).found == "not compiled within 120 s"
    assert diagnosis.kernel_line(hung, interpreted=True).status == "warning"


def test_a_cache_folder_that_cannot_be_made_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("")
    assert diagnosis.folder_line("cache", tmp_path / "new" / "deep", "OPS_MATH_CACHE").status == "ok"
    line = diagnosis.folder_line("cache", tmp_path / "file" / "below", "OPS_MATH_CACHE")
    assert line.status == "failure"
    assert line.do == "Make it writable, or name another folder with OPS_MATH_CACHE."


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "LEAST_FREE_BYTES", 2**80)
    assert diagnosis.folder_line("cache", tmp_path, "OPS_MATH_CACHE").status == "warning"


def test_each_variable_that_changes_numbers_gets_a_line_of_its_own():
    assert [line.status for line in diagnosis.environment_lines({})] == ["ok"]
    lines = diagnosis.environment_lines({"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert [line.status for line in lines] == ["warning", "warning"]
    assert lines[1].found == "NVIDIA_TF32_OVERRIDE=0: turns TF32 off in all NVIDIA libraries, whatever the program asks for"


def test_third_party_kernels_are_listed_and_never_needed():
    lines = diagnosis.optional_kernel_lines(lambda name: "2.8.3" if name == "flash-attn" else None)
    assert {line.status for line in lines} == {"ok"}
    assert lines[0].found == "2.8.3 (optional: attention)"


def test_the_verdict_counts_what_is_to_be_mended():
    ok, warning, failure = (Line("name", status, "found") for status in ("ok", "warning", "failure"))
    assert verdict([ok]) == "Ready to train."
    assert verdict([ok, warning]) == "Ready to train; 1 to know about."
    assert verdict([ok, warning, failure]) == "1 to mend before you train, 1 to know about."


def run_doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from ops_math.cli import main; main()", "doctor", "--json"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SRC), **environment}, check=False)


@pytest.mark.slow
def test_the_command_prints_json_and_ends_with_0_on_this_machine():
    result = run_doctor(NVIDIA_TF32_OVERRIDE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {line["name"]: line for line in json.loads(result.stdout)["lines"]}
    assert lines["torch"]["status"] == "ok"
    assert "compiled" in lines["Triton kernel"]["found"]
    assert any("NVIDIA_TF32_OVERRIDE=1" in line["found"] for line in json.loads(result.stdout)["lines"])


@pytest.mark.slow
def test_the_command_ends_with_1_when_something_must_be_mended():
    result = run_doctor(OPS_MATH_CACHE="/dev/null/cache", TRITON_INTERPRET="1")
    assert result.returncode == 1
    lines = {line["name"]: line["status"] for line in json.loads(result.stdout)["lines"]}
    assert (lines["cache"], lines["Triton kernel"]) == ("failure", "warning")
