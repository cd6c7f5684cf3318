"""The budget passes honest rounding and fails what is wrong."""

from __future__ import annotations

import pytest
import torch

from ops_math.testing import Budget, statistics


def honest(seed, n=4096, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(32, n // 32, generator=g, dtype=torch.float64)
    noise = 1 + 2.0**-9 * torch.randn(r.shape, generator=g, dtype=torch.float64)
    return r, (r * noise).to(dtype)


def budget(dtype=torch.bfloat16):
    pairs = [honest(s, dtype=dtype) for s in (1, 2, 3)]
    return Budget([(r,) for r, _ in pairs], [(e,) for _, e in pairs], [(r,) for r, _ in pairs], ["y"])


def test_another_honest_rounding_passes():
    b = budget()
    for seed in range(10, 30):
        r, y = honest(seed)
        assert b.broken([y], [r]) == []


@pytest.mark.parametrize("scale", [1.01, 0.99, 1.003])
def test_a_wrong_scale_fails_though_every_element_is_close(scale):
    r, _ = honest(5)
    broken = budget().broken([(r * scale).to(torch.bfloat16)], [r])
    assert "gain" in {b.statistic for b in broken}


def test_one_bad_element_fails():
    r, y = honest(6)
    y[3, 5] += 0.5
    assert "max" in {b.statistic for b in budget().broken([y], [r])}


def test_a_wrong_scale_of_each_row_fails():
    r, _ = honest(7)
    g = torch.Generator().manual_seed(1)
    y = (r * (1 + 0.01 * torch.randn(32, 1, generator=g, dtype=torch.float64))).to(torch.bfloat16)
    assert "rows" in {b.statistic for b in budget().broken([y], [r])}


def test_nan_fails_everything_and_a_wrong_shape_fails():
    r, y = honest(8)
    y[0, 0] = float("nan")
    assert len(budget().broken([y], [r])) == 4
    assert [b.statistic for b in budget().broken([y[:, :5]], [r])] == ["shape"]


def test_equal_infinities_are_no_error_and_unequal_ones_are():
    r = torch.randn(8, 16, dtype=torch.float64)
    r[2] = float("-inf")
    assert statistics(r.clone(), r)["max"] == 0.0
    wrong = r.clone()
    wrong[2, 0] = 0.0
    assert statistics(wrong, r)["max"] == float("inf")
