"""The wheel holds what it should, and works in an environment that has torch and nothing else: no Triton, no terminal libraries."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

# What torch itself needs. Everything else of the outer environment stays out of sight of the new one.
TORCH_AND_ITS_NEEDS = (
    "torch",
    "torchgen",
    "functorch",
    "typing_extensions.py",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "filelock",
    "numpy",
    "numpy.libs",
    "nvidia",
)

USE_WITHOUT_TRITON = """
import importlib.util
assert importlib.util.find_spec("triton") is None and importlib.util.find_spec("rich") is None
import torch, ops_math as om, ops_nn
x = torch.randn(3, 8, requires_grad=True)
weight = torch.ones(8, requires_grad=True)
y = om.rms_norm(x, weight, eps=1e-6)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
y.sum().backward()
assert x.grad.abs().sum() > 0 and weight.grad.abs().sum() > 0
print(om.__version__)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty_environment(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel, and with torch by links to the outer one; returns its interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    link_torch(packages)
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    return python


def link_torch(packages: Path) -> None:
    """Link torch and what it needs into another environment's packages."""
    import torch

    outer = [Path(torch.__file__).parents[1], Path(sysconfig.get_path("purelib")), *map(Path, sys.path)]
    for name in TORCH_AND_ITS_NEEDS:
        found = next((folder / name for folder in outer if (folder / name).exists()), None)
        if found is not None:
            (packages / name).symlink_to(found)


def test_the_wheel_holds_both_packages_their_types_and_data_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ops_math/__init__.py", "ops_math/py.typed", "ops_nn/__init__.py", "ops_nn/py.typed"} <= names
    assert [name for name in names if Path(name).name.startswith("test_")] == []
    sources = [file.relative_to(ROOT / "src") for file in (ROOT / "src").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    missing = {file.as_posix() for file in sources if not file.name.startswith("test_")} - names
    assert missing == set()


def test_the_wheel_states_its_licence_version_and_command(wheel):
    files = {name: zipfile.ZipFile(wheel).read(name).decode() for name in zipfile.ZipFile(wheel).namelist() if "dist-info" in name}
    by_name = {Path(name).name: text for name, text in files.items()}
    assert "License-Expression: Apache-2.0" in by_name["METADATA"]
    assert "Apache License" in by_name["LICENSE"]
    assert "Version: 0.1.0" in by_name["METADATA"]
    assert "ops-math = ops_math.cli:main" in by_name["entry_points.txt"]


def test_the_operators_work_where_there_is_torch_and_no_triton(empty_environment):
    assert run(empty_environment, "-c", USE_WITHOUT_TRITON, cwd=empty_environment.parent).strip() == "0.1.0"


def test_the_installed_command_states_its_version():
    import torch

    command = Path(sys.executable).parent / "ops-math"
    assert command.exists(), f"{command} is missing: install the project with `make env`"
    assert run(command, "--version").strip() == f"ops-math 0.1.0 (torch {torch.__version__})"
