"""Loads that are started ahead of a loop wait for the loop to have a step.

A compiler starts the first tiles' loads before the loop, if there is a step. Where it may conclude that there always is one (a division by
the number of steps says so), they are started for sequences that fill no tile too, and land in shared memory that is others' by then: wrong
gradients in one to five of two hundred runs on an H200 (Triton 3.6). Here the compiled code is read: what each such load waits for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from unittest import mock

import pytest

pytest.importorskip("triton", reason="missing capability: Triton")

import triton

from ops_math import backends, catalog
from ops_math.backends import null
from ops_math.ops.attention import triton_gpu_bwd
from ops_math.testing.capture import like_on
from ops_math.testing.crosscompile import calls_of

LOAD = re.compile(r"@(%p\d+) cp\.async\.bulk\.tensor")
BOTH = re.compile(r"and\.pred\s+(%p\d+), (%p\d+), (%p\d+);")
WHO = 2  # of all threads: one warp or some, and one thread of it
CASES = ("width 256", "causal, several tiles", "packed documents, one empty, one of one")


def waits_for(ptx: str) -> Iterator[set[str]]:
    """For each load of a tile through a descriptor, the conditions that all must hold."""
    both = {found[1]: found.groups()[1:] for found in BOTH.finditer(ptx)}

    def leaves(p: str) -> set[str]:
        return set().union(*(leaves(part) for part in both[p])) if p in both else {p}

    return (leaves(found[1]) for found in LOAD.finditer(ptx))


def compiled(name: str, phase: str) -> dict[str, str]:
    """PTX of a case's kernels on an H200."""
    operator, device = catalog.operators()["attention"], backends.NAMED["h200"]
    case = next(c for c in operator.file("problem").CASES if c.name == name)
    call = next(c for c in calls_of(operator, case, "bf16") if c.phase == phase)
    problem = operator.phases[phase].problem_of(*call.args)
    kernels = next(i for i in operator.implementations() if i.name == "triton_gpu")
    tensors = [like_on(t, "meta") for t in call.args[: operator.phases[phase].num_tensors]]
    with null.pretend(device) as seen:
        kernels.launcher(phase)(problem, kernels.module.configs(problem, device, phase)[0], *tensors)
        found = {kernel: one.asm["ptx"] for kernel, one in seen}
        seen.clear()
    return found


def careless(name: str, phase: str) -> dict[str, list[int]]:
    """By kernel with such loads: how many conditions each of them waits for."""
    counted = {kernel: [len(conditions) for conditions in waits_for(ptx)] for kernel, ptx in compiled(name, phase).items()}
    return {kernel: found for kernel, found in counted.items() if found}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("phase", ["fwd", "bwd"])
def test_a_first_load_waits_for_the_loop_to_have_a_step(name, phase):
    found = careless(name, phase)
    assert found
    assert all(count > WHO for counts in found.values() for count in counts), found


def test_the_reader_tells_a_load_that_waits_from_one_that_does_not():
    both = "and.pred %p6, %p1, %p2;\nand.pred %p7, %p3, %p6;\n"
    waits = "@%p7 cp.async.bulk.tensor.2d [%r1];\n"
    assert [len(found) for found in waits_for(both + waits + waits.replace("%p7", "%p6"))] == [WHO + 1, WHO]


@pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="missing capability: a compiler that draws the conclusion (Triton 3.6)"
)
def test_a_division_by_the_number_of_steps_is_caught():
    honest = triton_gpu_bwd._bwd_dkdv_kernel
    text = honest.src.replace("tl.maximum(count, 1)", "count")
    assert text != honest.src
    faulty = triton.JITFunction(honest.fn, do_not_specialize=honest.do_not_specialize)
    faulty._unsafe_update_src(text)
    with mock.patch("ops_math.ops.attention.triton_gpu._bwd_dkdv_kernel", faulty):
        found = careless("width 256", "bwd")
    assert min(found["_bwd_dkdv_kernel"]) == WHO
