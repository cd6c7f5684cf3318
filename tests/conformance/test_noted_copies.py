"""Every copy that a launcher makes because of strides is in `om.layout.report()`: launchers are called with inputs in other strides, and
what they copy is counted below them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ops_math as om
from ops_math import backends, catalog
from ops_math.spec import Device
from ops_math.testing.conformance import transposed
from ops_math.testing.crosscompile import calls_of
from tests.conformance.cases import first_dtype

# What copies whatever the strides are: (operator, implementation).
COPIES_ALWAYS = {("attention", "eager"): "gathers pieces of heads that fit a cache, in the dtype of arithmetic"}
# Whose first tensor, the gradient of a loss without reduction, has one value a row: nothing beside the logits.
ONE_A_ROW = {("cross_entropy", "bwd"), ("linear_cross_entropy", "bwd")}
CPU = backends.device_of(torch.device("cpu"))
GPU = backends.NAMED["h100"]


class _Copies(TorchDispatchMode):
    """Adds up bytes of what is cloned: `contiguous()`, `clone()` and a `reshape` that finds no view all arrive as one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and made.dim() > 1:  # parameters and statistics have one dimension
            self.bytes += made.numel() * made.element_size()
        return made


@functools.cache
def recorded(name: str, case: Any) -> list[Any]:
    return calls_of(catalog.operators()[name], case, first_dtype(case))


def moved(value: Any, place: str, as_it_lies: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    value = transposed(value) if value.is_floating_point() and value.dim() > 1 and not as_it_lies else value
    return value if place == "cpu" else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=place)


def copied_and_noted(name: str, case: Any, implementation: str, device: Device, place: str) -> list[tuple[int, int]]:
    operator = catalog.operators()[name]
    (target,) = [i for i in operator.implementations() if i.name == implementation]
    found = []
    for call in recorded(name, case):
        phase = operator.phases[call.phase]
        tensors = call.args[: phase.num_tensors]
        args = [moved(t, place, t is tensors[0] and (name, call.phase) in ONE_A_ROW) for t in tensors] + list(call.args[len(tensors) :])
        problem = phase.problem_of(*args)
        if target.optional("supports", lambda *_: None)(problem, device, call.phase):
            continue
        config = target.optional("configs", lambda *_: (None,))(problem, device, call.phase)[0]
        om.layout.reset()
        with torch.no_grad(), _Copies() as seen:
            target.launcher(call.phase)(problem, config, *args[: phase.num_tensors])
        found.append((seen.bytes, om.layout.report().bytes))
    return found


IMPLEMENTATIONS = [
    pytest.param(name, i.name, id=f"{name}-{i.name}")
    for name, op in catalog.operators().items()
    for i in op.implementations()
    if i.name in ("eager", "vendor", "triton_gpu") and (name, i.name) not in COPIES_ALWAYS
]


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_a_launcher_notes_what_it_copies_for_inputs_in_other_strides(name, implementation, monkeypatch):
    device, place = CPU, "cpu"
    if implementation == "triton_gpu":
        pytest.importorskip("triton", reason="missing capability: Triton")
        device, place = GPU, "meta"
        assert catalog.operators()[name].file("triton_gpu")
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("ops_math.ops.") and hasattr(m, "launch")]:
            monkeypatch.setattr(module, "launch", lambda *_, **__: None)  # kernels do nothing here: only what is made for them counts
    cases = [case for case in catalog.operators()[name].file("problem").CASES if case.small]
    found = {case.name: copied_and_noted(name, case, implementation, device, place) for case in cases}
    if not any(found.values()):
        pytest.skip(f"missing capability: {implementation} of {name} on this device")
    assert {case: pairs for case, pairs in found.items() if any(copied > noted for copied, noted in pairs)} == {}


def test_a_softmax_of_a_transposed_input_is_in_the_report():
    om.layout.reset()
    om.softmax(torch.randn(64, 32).t())
    (row,) = om.layout.report().rows
    assert row.bytes == 64 * 32 * 4
    om.layout.reset()
