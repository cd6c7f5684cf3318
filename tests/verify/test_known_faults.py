"""Two faults that users of operator libraries met, reproduced in our own cross-entropy: each must be found, and by both ways of looking."""

from __future__ import annotations

import pytest
import torch

import ops_math as om
from ops_math import catalog
from ops_math.testing import FAULTS, Fault, judge_for, planted, verify
from ops_math.testing.proof import prove
from tests.verify import broken

OPERATOR = catalog.operators()["cross_entropy"]


def _rounded_before_the_subtraction(launcher):
    """p in the storage dtype first, then one is subtracted at the true class."""

    def faulty(problem, config, dloss, logits, target, *rest):
        dz = launcher(problem, config, dloss, logits, target, *rest)
        p = torch.softmax(logits.double().reshape(-1, logits.shape[-1]), -1).to(logits.dtype)
        at = target.reshape(-1, 1).clamp_min(0)
        wrong = (p.gather(-1, at) - 1) * dloss.reshape(-1, 1).expand(len(p), 1).to(p.dtype)
        return dz.reshape(p.shape).scatter(-1, at, wrong).view(dz.shape) if problem_is_plain(problem) else dz

    def problem_is_plain(problem):
        return problem.reduction == "none" and not problem.softcap and not problem.z_loss and not problem.label_smoothing

    return faulty


ONE_FOR_ALL = next(fault for fault in FAULTS if fault.name == "first output gradient used for every row")
KNOWN = {
    "one output gradient for every row": (ONE_FOR_ALL, broken.loss_inputs, "fp32"),
    "true class rounded before the subtraction": (
        Fault("true class", "bwd", _rounded_before_the_subtraction),
        broken.confident_inputs,
        "bf16",
    ),
}


def unreduced(logits, target):
    return om.cross_entropy(logits, target, reduction="none")


@pytest.mark.parametrize("name", KNOWN)
def test_verify_finds_it_in_our_loss_and_passes_ours_without_it(name):
    fault, inputs, dtype = KNOWN[name]
    options = {"reference": broken.loss_reference, "inputs": inputs, "dtypes": (dtype,), "faults": ()}
    with om.force(cross_entropy="eager"):
        assert verify(unreduced, **options).ok
        with planted(OPERATOR, "eager", fault) as trace:
            report = verify(unreduced, **options)
    assert trace.changed
    (found,) = [f for f in report.findings if f.check == "values" and f.output == "d0"]
    if name.startswith("one"):
        assert "uses one row's output gradient for every row" in found.words
    assert "tokens=" in found.smallest


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_our_own_proof_finds_it_too(name):
    fault, _, dtype = KNOWN[name]
    for case in OPERATOR.file("problem").CASES:  # the yardstick must be measured before anything is planted in it
        if dtype in case.dtypes:
            judge_for(OPERATOR, case, dtype, "cpu")
    with planted(OPERATOR, "eager", fault):
        report = prove(OPERATOR, "eager", dtypes=(dtype,), faults=False, behaviour=False)
    assert any(f.check == "values" and f.output == "d0" for f in report.findings), str(report)
