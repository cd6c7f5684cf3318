"""Measuring on a real GPU: what only such a device shows. `make gpu` runs it."""

import pytest
import torch

import ops_math as om
from ops_math import backends, schedule
from ops_math.schedule.apart import Apart
from ops_math.schedule.live import record_for
from ops_math.schedule.measure import Limits
from ops_math.schedule.timing import HOST_TIE, TIE
from ops_math.settings import Policy

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def a_step():
    x = torch.randn(8192, 2048, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.ones(2048, device="cuda", dtype=BF16, requires_grad=True)

    def step():
        om.softmax(om.swiglu(om.rms_norm(x, w), om.layer_norm(x, w, w))).backward(torch.ones_like(x))

    return step


@pytest.mark.alone
@pytest.mark.parametrize("apart", [True, False])
def test_a_step_is_calibrated_and_never_slower_than_pytorchs_own_beyond_noise(apart):
    found = om.calibrate(a_step(), seconds=30, apart=apart)
    assert found.skipped == ()
    assert {m.op for m in found.measurements} == {"rms_norm", "layer_norm", "softmax", "glu"}
    for m in found.measurements:
        assert any(name.startswith("triton_gpu") for name in m.times_us), m
        own = "vendor" if "vendor" in m.times_us else "eager"
        by_host = any(m.host_us[name] >= 0.99 * m.times_us[name] for name in (m.winner, own))
        assert m.times_us[m.winner] <= m.times_us[own] * (1 + max(HOST_TIE if by_host else TIE, m.noise[m.winner] + m.noise[own])), m
    ceilings = record_for(backends.device_of(torch.device("cuda", 0))).ceilings
    assert ceilings is not None
    assert ceilings.bandwidth_gbs > 500
    assert ceilings.bf16_tflops > 50


@pytest.mark.alone
def test_two_calibrations_on_a_gpu_agree_or_declare_a_tie():
    first = {(m.op, m.phase): m for m in om.calibrate(a_step(), seconds=30, save=False, apart=False).measurements}
    schedule.reread()
    for m in om.calibrate(a_step(), seconds=30, save=False, apart=False).measurements:
        other = first[m.op, m.phase]
        assert m.winner == other.winner or m.winner in other.ties or other.winner in m.ties, (m, other)


def test_a_candidate_that_takes_too_much_memory_is_refused_with_figures():
    x = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    found = om.calibrate(lambda: om.softmax(x), seconds=5, save=False, memory_gib=0.01, apart=False)
    assert "GiB beyond its results, and 0.01 are allowed" in found.measurements[0].refused["eager"]


def test_a_kernel_that_does_not_end_takes_a_child_with_it_and_nothing_else(monkeypatch):
    monkeypatch.setenv("PLANTED", "sleeps")
    x = torch.randn(64, 96)
    record = record_for(backends.device_of(torch.device("cuda", 0)))
    with Apart(("tests.schedule.planted",)) as child:
        found = child.measure(
            "softmax",
            "fwd",
            [x, torch.float32],
            torch.device("cuda", 0),
            Limits(0.5, 10.0),
            Policy("default", 0, ()),
            record,
            lambda w: None,
        )
    assert "has not finished a candidate's work" in found.refused["vendor"]
    assert found.winner != "vendor"
    assert torch.ones(3, device="cuda").sum().item() == 3.0
