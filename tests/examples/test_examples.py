"""Every example runs as it stands and says something."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs_and_says_something(example, tmp_path):
    result = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
