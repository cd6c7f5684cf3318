"""Configurations that level 1 may exchange: those whose order of sums is stated to be one."""

from __future__ import annotations

import pytest
import torch

from ops_math import backends, catalog
from ops_math.schedule.choose import order_of_sums
from ops_math.testing import Draw, run
from ops_math.testing.capture import watch

pytest.importorskip("triton", reason="missing capability: Triton")
H200 = backends.NAMED["h200"]


def orders(name, phase):
    """The order of sums of each configuration for the first case."""
    operator = catalog.operators()[name]
    case = operator.file("problem").CASES[0]
    seen = watch(lambda: run(operator.public[case.fn], case.make(Draw(1, "fp32")), case.frozen))
    call = next(c for c in seen.calls if (c.operator, c.phase) == (name, phase))
    problem = operator.phases[phase].problem_of(*call.args)
    kernels = next(i for i in operator.implementations() if i.name == "triton_gpu")
    configs = kernels.module.configs(problem, H200, phase)
    return configs, [order_of_sums(kernels, problem, config, phase) for config in configs]


@pytest.mark.parametrize(("name", "phase"), [("glu", "fwd"), ("glu", "bwd"), ("dropout", "fwd"), ("rope", "bwd"), ("cross_entropy", "bwd")])
def test_elementwise_kernels_have_one_order_whatever_their_tile(name, phase):
    configs, found = orders(name, phase)
    assert len(set(configs)) > 1
    assert len(set(found)) == 1


def test_a_norms_forward_may_load_ahead_but_not_spread_a_row_over_other_threads():
    configs, found = orders("rms_norm", "fwd")
    by_order = {}
    for config, order in zip(configs, found, strict=True):
        by_order.setdefault(order, set()).add((config.block_m, config.block_n, config.num_warps))
    assert all(len(tiles) == 1 for tiles in by_order.values())
    assert len(by_order) > 1


@pytest.mark.parametrize(("name", "phase"), [("softmax", "fwd"), ("rms_norm", "bwd"), ("attention", "fwd")])
def test_where_nothing_is_stated_a_configuration_stands_alone(name, phase):
    configs, found = orders(name, phase)
    assert len(set(found)) == len(configs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="missing capability: a CUDA or ROCm device")
def test_configurations_of_one_order_give_the_same_bits_on_a_gpu():
    from tools.gpu.determinism import signatures

    assert signatures()
