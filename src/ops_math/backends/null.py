"""A named device that computes nothing: launchers run, kernels compile for it, resources are read from the binary.

`with pretend(NAMED["h100"]) as compiled:` replaces Triton's driver. Launchers are called with `meta` tensors as on the device;
each kernel that they start is compiled with its real specialisation and configuration, raises `OutOfResources` as the device
would, and lands in `compiled`. Nothing runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ops_math.backends import launch
from ops_math.spec import Device


class Resources(NamedTuple):
    """What one compiled kernel takes: registers a thread, bytes spilled a thread [B], shared memory a program [B]."""

    registers: int
    spilled: int
    shared: int


class _Utils:
    """Stands for the driver's helper module."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._device.shared_bytes,
            "multiprocessor_count": self._device.num_cores,
            "warpSize": _warp_size(self._device),
        }

    def load_binary(self, name: str, kernel: Any, shared: int, _: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads: real figures come from resources()

    def unload_module(self, _: int) -> None:
        return None


class _NullDriver:
    """Answers what Triton asks a driver, for a device that is not there."""

    def __init__(self, device: Device) -> None:
        from triton.backends.compiler import GPUTarget

        self.utils = _Utils(device)
        arch: Any = device.arch if device.kind == "hip" else int(device.arch)
        self._target = GPUTarget(device.kind, arch, _warp_size(device))

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def _warp_size(device: Device) -> int:
    return 64 if device.kind == "hip" else 32


def _forget_kernels() -> None:
    import triton.compiler.compiler as compiler

    for kernel in launch.STARTED:
        kernel.device_caches.clear()
    compiler.max_shared_mem.cache_clear()


@contextmanager
def pretend(device: Device) -> Iterator[list[tuple[str, Any]]]:
    """Compile for `device` instead of running. Yields the list of (kernel name, compiled kernel), filled as launchers run.

    Keep the compiled kernels only while inside: their destructor asks the driver that was active when they were made.
    """
    import triton
    from triton.runtime.driver import driver

    compiled: list[tuple[str, Any]] = []

    def seen(*, key: Any, fn: Any, **_: Any) -> None:
        compiled.append((fn.name, fn.jit_function.device_caches[0][0][key]))

    before, hook = driver._active, triton.knobs.runtime.jit_post_compile_hook
    driver.set_active(_NullDriver(device))
    _forget_kernels()
    triton.knobs.runtime.jit_post_compile_hook = seen
    try:
        yield compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
        _forget_kernels()
        driver._active = before


def resources(kernel: Any) -> Resources:
    """Registers, spills and shared memory of a compiled kernel, read from its binary.

    On NVIDIA a stack frame means spills; on AMD vector registers are counted (scalar ones spill in any matrix product there).
    """
    if kernel.metadata.target.backend == "hip":
        text = kernel.asm["amdgcn"]
        return Resources(_number(r"\.vgpr_count:\s+(\d+)", text), 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text), kernel.metadata.shared)
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run([str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return Resources(_number(r"REG:(\d+)", done.stdout), _number(r"STACK:(\d+)", done.stdout), kernel.metadata.shared)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise LookupError(f"the compiler's report has no {pattern!r}: {text[:500]}")
    return int(found.group(1))
