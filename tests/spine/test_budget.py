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


def test_a_weight_rounded_once_more_fails_by_columns_though_no_other_statistic_sees_it():
    def narrowed(seed, rounded):
        g = torch.Generator().manual_seed(seed)
        x, w = torch.randn(600, 48, generator=g, dtype=torch.float64), torch.randn(48, generator=g, dtype=torch.float64)
        return x * w, (x * (w.to(torch.bfloat16).double() if rounded else w)).to(torch.bfloat16)

    pairs = [narrowed(s, False) for s in (1, 2, 3)]
    b = Budget([(r,) for r, _ in pairs], [(e,) for _, e in pairs], [(r,) for r, _ in pairs], ["y"])
    for seed in range(10, 20):
        r, y = narrowed(seed, False)
        assert b.broken([y], [r]) == []
        r, y = narrowed(seed, True)
        assert "columns" in {broken.statistic for broken in b.broken([y], [r])}


@pytest.mark.parametrize(("place", "statistic"), [((3, slice(None)), "row"), ((slice(None), 5), "column")])
def test_one_row_or_one_column_off_by_a_percent_fails(place, statistic):
    r, y = honest(9)
    y = y.double()
    y[place] *= 1.01
    assert statistic in {b.statistic for b in budget().broken([y.to(torch.bfloat16)], [r])}


def test_an_error_is_stated_as_a_share_of_its_limit():
    r, y = honest(11)
    shares = {e.statistic: e.share for e in budget().errors([y], [r])}
    assert set(shares) == {"max", "l2", "gain", "rows", "columns", "row", "column"}
    assert all(0 < share < 1 for share in shares.values())


def test_nan_fails_everything_and_a_wrong_shape_fails():
    r, y = honest(8)
    y[0, 0] = float("nan")
    assert {b.statistic for b in budget().broken([y], [r])} == {"max", "l2", "gain", "rows", "columns", "row", "column"}
    assert [b.statistic for b in budget().broken([y[:, :5]], [r])] == ["shape"]


def test_equal_infinities_are_no_error_and_unequal_ones_are():
    r = torch.randn(8, 16, dtype=torch.float64)
    r[2] = float("-inf")
    assert statistics(r.clone(), r)["max"] == 0.0
    wrong = r.clone()
    wrong[2, 0] = 0.0
    assert statistics(wrong, r)["max"] == float("inf")
