"""Every test of the scheduler has a cache folder of its own and puts the process's record back."""

import copy

import pytest

from ops_math import schedule
from ops_math.schedule.live import LIVE, changed


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder; what this process knew before is back afterwards."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("OPS_MATH_CACHE", str(folder))
    before = {name: copy.copy(value) for name, value in LIVE.__dict__.items()}
    schedule.reread()
    yield folder
    LIVE.__dict__.update(before)
    changed()
