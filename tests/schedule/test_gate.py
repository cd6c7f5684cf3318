"""The check before timing lets every honest implementation through on every case of its operator; a false alarm would hide the fastest."""

import pytest
import torch

from ops_math import catalog
from ops_math.schedule import Limits, measure
from ops_math.testing.crosscompile import calls_of

pytestmark = pytest.mark.slow
AT_ONCE = Limits(0.001, 30.0)


@pytest.mark.parametrize("name", catalog.operators())
def test_no_honest_implementation_is_refused(name):
    operator, refused, timed = catalog.operators()[name], [], 0
    for case in operator.file("problem").CASES:
        for dtype in case.dtypes:
            for call in calls_of(operator, case, dtype):
                args = [a.detach() if isinstance(a, torch.Tensor) else a for a in call.args]
                found = measure(operator, call.phase, args, limits=AT_ONCE)
                timed += len(found.times_us)
                refused += [(case.name, dtype, k, why) for k, why in found.refused.items() if not why.startswith("not tried")]
    assert refused == []
    assert timed > 50
