"""The check before timing lets every honest implementation through on every case of its operator; a false alarm would hide the fastest."""

import pytest
import torch

from ops_math import catalog
from ops_math.schedule import Limits, measure
from ops_math.testing.crosscompile import calls_of

AT_ONCE = Limits(0.001, 30.0)
# Each problem is a compilation of seconds there: one case of each operator here, the numbers of all in tests/conformance.
NOT_COMPILED = AT_ONCE._replace(why_not_compiled="not tried: compiled in the first case alone")


def measured_on(device, name, dtypes):
    """How many candidates were timed, and what was refused though it was tried; the first configuration of each."""
    operator, refused, timed = catalog.operators()[name], [], 0
    for number, case in enumerate(operator.file("problem").CASES):
        limits = NOT_COMPILED if number else AT_ONCE
        for dtype in dtypes & set(case.dtypes):
            for call in calls_of(operator, case, dtype):
                args = [a.detach().to(device) if isinstance(a, torch.Tensor) else a for a in call.args]
                found = measure(operator, call.phase, args, limits=limits)
                timed += len(found.times_us)
                refused += [(case.name, dtype, call.phase, k, why) for k, why in found.refused.items() if not why.startswith("not tried")]
    return timed, refused


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.operators())
def test_no_honest_implementation_is_refused(name):
    timed, refused = measured_on("cpu", name, {"fp32", "bf16", "fp16", "fp64"})
    assert refused == []
    assert timed > 50


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", catalog.operators())
def test_no_honest_implementation_is_refused_on_a_gpu(name):
    timed, refused = measured_on("cuda", name, {"bf16"})
    assert refused == []
    assert timed > 20
