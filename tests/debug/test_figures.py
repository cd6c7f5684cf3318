"""The figures of a trace: every bit and its place count, and the distance of two sketches is that of the tensors.

The arithmetic below them has tests of its own beside `om.FigureTable`.
"""

from __future__ import annotations

import math

import pytest
import torch

from ops_nn.debug.figures import SLAB_BYTES, Figures, measure, unpack
from ops_nn.debug.trace import Record
from ops_nn.debug.verdict import difference

WORDS = 4096

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)


def figures(t: torch.Tensor) -> Figures:
    return unpack(measure(t), t.numel())


def drawn(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return (x > 0) if dtype == torch.bool else (x * 40).to(dtype) if not dtype.is_floating_point else x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 64, 4097])
def test_a_change_of_any_one_element_changes_the_fingerprint(dtype, count):
    x = drawn(count, dtype)
    seen = {figures(x).fingerprint}
    places = range(count) if count < 100 else range(0, count, 97)
    for place in places:
        y = x.clone()
        y[place] = ~y[place] if dtype == torch.bool else y[place] + 1
        seen.add(figures(y).fingerprint)
    assert len(seen) == 1 + len(places)


def test_a_change_of_any_one_bit_changes_both_halves():
    x = drawn(2)
    plain = figures(x).fingerprint
    for bit in range(64):
        y = (x.view(torch.int64) ^ torch.tensor(-(2**63) if bit == 63 else 2**bit)).view(torch.float32)
        changed = figures(y).fingerprint
        assert changed[:16] != plain[:16]
        assert changed[16:] != plain[16:]


def test_the_place_counts_wherever_rows_of_words_begin():
    x = drawn(8 * WORDS)
    seen = {figures(x).fingerprint}
    for far in (1, 2, 2 * 1021, 2 * 1024, 2 * WORDS - 1, 2 * WORDS, 4 * WORDS, 6 * WORDS):
        y = x.clone()
        y[5], y[5 + far] = x[5 + far], x[5]
        seen.add(figures(y).fingerprint)
    seen.update(figures(x.roll(n)).fingerprint for n in (1, 2 * 1021, 2 * 1024, WORDS))
    seen.add(figures(x.view(-1, 64).t()).fingerprint)
    assert len(seen) == 14


def test_two_signs_that_flip_in_the_highest_bits_do_not_cancel():
    x = drawn(4096).abs()
    seen = set()
    for place in range(3, 1023, 2):
        y = x.clone()
        y[1], y[place] = -y[1], -y[place]
        seen.add(figures(y).fingerprint)
    assert len(seen) == 510
    assert figures(x).fingerprint not in seen


def test_strides_and_offsets_do_not_count_and_the_values_do():
    x = drawn(30 * 40).view(30, 40)
    assert figures(x.t().contiguous().t()) == figures(x)
    assert figures(torch.cat([x[:1, :1].reshape(-1), x.reshape(-1)])[1:].view(30, 40)) == figures(x)
    assert figures(x.t()).fingerprint != figures(x).fingerprint


@pytest.mark.parametrize("count", [7, 64, 1000, WORDS - 1, WORDS, 5 * WORDS + 77, 32 * WORDS, 67 * WORDS + 1])
def test_the_distance_is_that_of_the_tensors_to_a_third(count):
    x, noise = drawn(count), torch.randn(count, generator=torch.Generator().manual_seed(1))
    for y in (x + 1e-4 * noise, torch.cat([x[:-3], x[-3:] + 0.1 * noise[-3:]])):
        true = ((x - y).double().norm() / x.double().norm()).item()
        assert true / 1.6 < figures(x).distance(figures(y)) < 1.6 * true


def test_what_is_not_finite_is_counted_and_does_not_hide_the_rest():
    x = torch.tensor([3.0, -4.0, math.nan, math.inf, -math.inf, math.nan])
    found = figures(x)
    assert (found.l2, found.max, found.nans, found.infinities) == (5.0, 4.0, 2, 2)
    assert found.distance(figures(x.nan_to_num(0.0))) == math.inf
    assert found.distance(found) == 0.0
    assert 0 < found.distance(figures(torch.tensor([3.0, -4.5, math.nan, math.inf, -math.inf, math.nan]))) < 1


ODD = {
    "empty": torch.empty(0),
    "no columns": torch.empty(3, 0),
    "a number": torch.tensor(2.5),
    "complex": torch.tensor([1.0 - 2.0j, 0.5j, -3.0 + 0j]),
}


@pytest.mark.parametrize("t", ODD.values(), ids=ODD)
def test_odd_tensors_have_figures_too(t):
    assert measure(t).shape == (86,)
    assert figures(t) == figures(t.clone())
    assert len(figures(t).samples) <= 16


@pytest.mark.parametrize("shape", [(7, 13), (48, 256), (1000, 33), (2, 24, 256)])
@pytest.mark.parametrize(("a", "b"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float32, torch.float16)])
def test_the_distance_between_two_dtypes_is_that_of_a_rounding(shape, a, b):
    torch.manual_seed(3)
    x = torch.randn(shape, dtype=torch.float64).to(a)
    y = x.to(b)
    own, other = (Record(unpack(measure(t), t.numel()), t.shape, t.stride(), str(t.dtype)[6:], 0) for t in (x, y))
    apart = (x.double() - y.double()).norm() / x.double().norm()
    assert 0.3 * apart < difference(own, other, 1e-6).l2 < 3 * apart
    wrong = Record(unpack(measure(1.5 * y), y.numel()), y.shape, y.stride(), str(b)[6:], 0)
    assert difference(own, wrong, 1e-6).l2 == pytest.approx(0.5, rel=0.1)


def test_where_sketches_of_two_widths_part_is_where_the_operator_cuts():
    from ops_math.ops.figures.problem import SLAB_BYTES as CUT

    assert SLAB_BYTES == CUT
