"""Faults that hide below bf16's rounding on ordinary numbers, and the cases of the catalogue that amplify them until they show."""

from __future__ import annotations

import pytest
import torch

from ops_math import catalog
from ops_math.testing import verify

QUICK = ("rounding bias", "strides", "repeats", "unwritten memory", "graph", "one gradient alone")


def in_fp32(function):
    """The function in fp32, rounded once, at the store."""

    def op(x, *others, **options):
        return function(x.float(), *(t if t is None else t.float() for t in others), **options).to(x.dtype)

    return op


def norm_by(variance):
    def norm(x, weight=None, bias=None, *, eps=1e-5):
        mean = x.mean(-1, keepdim=True)
        y = (x - mean) * torch.rsqrt(variance(x, mean) + eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    return norm


class UnitWithAWrongSlope(torch.autograd.Function):
    """silu, whose derivative beyond 8 is taken to be the sigmoid alone."""

    @staticmethod
    def forward(ctx, gate):
        ctx.save_for_backward(gate)
        return gate * torch.sigmoid(gate)

    @staticmethod
    def backward(ctx, dy):
        (gate,) = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return dy * torch.where(gate.abs() > 8, s, s * (1 + gate * (1 - s)))


def clamped(gate):
    return gate.clamp(min=-20) * torch.sigmoid(gate.clamp(min=-20))


HONEST = {
    "layer_norm": norm_by(lambda x, mean: (x - mean).square().mean(-1, keepdim=True)),
    "swiglu": lambda gate, up: gate * torch.sigmoid(gate) * up,
}
# What each fault is, and the case without which it lives.
FAULTS = [
    ("layer_norm", norm_by(lambda x, mean: (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)), "neighbouring numbers"),
    ("swiglu", lambda gate, up: UnitWithAWrongSlope.apply(gate) * up, "rows of far negative gates"),
    ("swiglu", lambda gate, up: clamped(gate) * up, "gates around -24 alone"),
]


def held(name, function, cases):
    reference = getattr(catalog.public_functions()[name].file("reference"), name)
    return verify(in_fp32(function), reference=reference, inputs=cases, dtypes=("bf16",), faults=(), tempers=(), skip=QUICK)


def cases_of(name):
    """Of one dtype throughout: the wrapper stores in that of its first argument."""
    found = catalog.public_functions()[name].file("problem").CASES
    return [case for case in found if case.fn == name and case.small and "fp32" not in case.name]


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_one_passes_all_of_them(name):
    report = held(name, HONEST[name], cases_of(name))
    assert report.ok, str(report)


@pytest.mark.parametrize(("name", "function", "case"), FAULTS, ids=[case for _, _, case in FAULTS])
def test_a_fault_below_the_rounding_is_found_where_a_case_amplifies_it(name, function, case):
    found = held(name, function, cases_of(name))
    assert not found.ok
    assert {finding.check for finding in found.findings} == {"values"}
    amplifiers = {"rows of far negative gates", "gates around -24 alone", "neighbouring numbers"}
    assert held(name, function, [c for c in cases_of(name) if c.name not in amplifiers]).ok  # the others do not show it
    assert not held(name, function, [c for c in cases_of(name) if c.name == case]).ok
