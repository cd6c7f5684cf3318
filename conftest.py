"""What every test gets: one thread under xdist, a fixed seed, a cache of its own, switches put back, and GPU tests skipped in words."""

import copy
import os
import shutil
import tempfile

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Under xdist each worker keeps to one thread; more would only fight. No test sees what its user has measured: the cache is a folder
    of this run, which workers inherit by the variable."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    elif "OPS_MATH_CACHE" not in os.environ:
        folder = os.environ["OPS_MATH_CACHE"] = tempfile.mkdtemp(prefix="ops-math-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long tests first, or one worker would end with them alone. Skip GPU tests where there is none, and name what is missing."""
    items.sort(key=lambda item: "interpreter" not in item.keywords)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test draws the same numbers on every run."""
    torch.manual_seed(20261129)


@pytest.fixture(autouse=True)
def switches_put_back():
    """A test that sets a switch as a statement does not set it for the next one."""
    from ops_math import settings

    before = copy.copy(settings.STATE.__dict__)
    yield
    settings.STATE.__dict__.update(before)
