"""The documentation builds without a warning, knows every public name, and the README keeps its promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ops_math
import ops_nn.adopt
import ops_nn.data
import ops_nn.modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    page = (tmp_path / "operators" / "index.html").read_text()
    assert "Root-mean-square normalisation over the last dimension." in page
    assert "<strong>Precision:</strong>" in page


@pytest.mark.parametrize("package", [ops_math, ops_nn.adopt, ops_nn.data, ops_nn.modules], ids=lambda package: package.__name__)
def test_every_public_name_has_a_place_in_the_documentation(package):
    pages = "\n".join(file.read_text() for file in (ROOT / "docs").glob("*.md"))
    documented = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    public = {f"{package.__name__}.{name}" for name in package.__all__ if not name.startswith("__")}
    assert public - documented == set()


def test_the_readme_is_at_most_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_the_python_in_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
        assert result.returncode == 0, block + result.stderr


def test_every_file_that_the_readme_and_the_guide_point_to_exists():
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{page} points to {target}"


@pytest.mark.slow
def test_the_python_of_the_page_on_proofs_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "verify.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "my_norm" in result.stdout
