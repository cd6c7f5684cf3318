"""The folder of compiled kernels is capped: what was used longest ago goes, and nothing that may be in use."""

import os

from ops_math.backends import kernel_cache

DAY = kernel_cache.LEAST_AGE_S


def entry(folder, name, days_ago, now, size=1000):
    (folder / name).mkdir(parents=True)
    file = folder / name / "kernel.cubin"
    file.write_bytes(b"x" * size)
    os.utime(file, (now - days_ago * DAY, now - days_ago * DAY))


def test_the_oldest_go_until_the_rest_fits_and_the_young_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    now = 1e9
    for name, days in (("oldest", 9), ("old", 5), ("middle", 3), ("young", 0.5)):
        entry(tmp_path / "cache", name, days, now)
    (tmp_path / "cache" / "a file").write_text("of somebody else")
    assert kernel_cache.trim(2500, now) == (4000, 2000, 2)
    assert {p.name for p in (tmp_path / "cache").iterdir()} == {"middle", "young", "a file"}
    assert kernel_cache.trim(0, now) == (2000, 1000, 1)
    assert (tmp_path / "cache" / "young").exists()


def test_a_folder_within_its_cap_or_that_is_not_there_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert kernel_cache.folder() == tmp_path / ".triton" / "cache"
    assert kernel_cache.trim(0) == (0, 0, 0)
    entry(kernel_cache.folder(), "one", 9, 1e9)
    assert kernel_cache.trim(1000, 1e9) == (1000, 1000, 0)
