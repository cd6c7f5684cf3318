"""By how many values a kernel may read, and how many warps a small call gets."""

from __future__ import annotations

import pytest

from ops_math.layout import alignment
from ops_math.spec import few_warps


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ((), 16),
        ((0,), 16),
        ((4096, 16), 16),
        ((48, 40), 8),
        ((1164,), 4),
        ((1164, 654), 2),
        ((4096, 753), 1),
        ((2**40 + 8, 0), 8),
        ((-24, 16), 8),
    ],
)
def test_the_alignment_is_the_greatest_power_of_two_up_to_16_that_divides_all_numbers(numbers, found):
    assert alignment(*numbers) == found
    assert all(n % found == 0 for n in numbers)


def test_a_call_with_fewer_tiles_than_cores_gets_fewer_warps_a_program():
    assert [few_warps(values, 256, 132) for values in (1, 25 * 270, 132 * 512 - 1, 132 * 512, 132 * 1024 - 1, 132 * 1024, 2**31)] == [
        *(1, 1, 1, 2, 2, 4, 4),
    ]
