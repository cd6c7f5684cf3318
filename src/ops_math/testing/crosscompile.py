"""Compiles every kernel of an operator for devices that are not there, through its own launchers."""

from __future__ import annotations

from typing import NamedTuple

from ops_math import backends, settings
from ops_math.backends import null
from ops_math.dispatch import Operator
from ops_math.spec import DTYPE_OF, Case
from ops_math.testing.capture import OpCall, like_on, watch
from ops_math.testing.inputs import Draw, run


class Compiled(NamedTuple):
    """One kernel compiled for one device."""

    device: str
    case: str
    dtype: str
    kernel: str
    resources: null.Resources


def calls_of(operator: Operator, case: Case, dtype: str) -> list[OpCall]:
    """The dispatcher calls of a case's forward and backward, recorded on the CPU."""
    with settings.force(**{operator.name: "eager"}):
        call = case.make(Draw(1, dtype))
        seen = watch(lambda: run(operator.public[case.fn], call, case.frozen, rounded=DTYPE_OF[dtype]))
    return [c for c in seen.calls if c.operator == operator.name]


def compile_case(
    operator: Operator, case: Case, dtype: str, device_name: str, implementation: str = "triton_gpu", every_config: bool = False
) -> list[Compiled]:
    """Compile the kernels that a case starts on a named device, in the default configuration (or in every one).

    Raises Triton's OutOfResources where a kernel wants more shared memory than the device has.
    """
    device = backends.NAMED[device_name]
    target = next(i for i in operator.implementations() if i.name == implementation)
    found = []
    for call in calls_of(operator, case, dtype):
        phase = operator.phases[call.phase]
        problem = phase.problem_of(*call.args)
        if target.optional("supports", lambda *_: None)(problem, device, call.phase):
            continue
        tensors = [like_on(t, "meta") for t in call.args[: phase.num_tensors]]
        configs = target.module.configs(problem, device, call.phase)
        for config in configs if every_config else configs[:1]:
            with null.pretend(device) as compiled:
                target.launcher(call.phase)(problem, config, *tensors)
                found += [Compiled(device_name, case.name, dtype, name, null.resources(kernel)) for name, kernel in compiled]
                compiled.clear()
    return found
