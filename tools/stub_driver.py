"""A CUDA driver that starts nothing, so that Triton's own launcher can be timed and watched on a machine without a GPU.

`install(folder)` compiles it (with gcc) and loads it as `libcuda.so.1`; `launcher(driver)` has Triton's launchers call it; `last(count)`
is what its latest launch was given.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

_NOTHING = (
    "cuInit cuDeviceGetAttribute cuDeviceGet cuDevicePrimaryCtxRetain cuCtxSetCurrent cuCtxGetDevice cuCtxSetLimit cuCtxGetLimit "
    "cuFuncSetAttribute cuFuncGetAttribute cuFuncSetCacheConfig cuModuleLoadData cuModuleUnload cuModuleGetFunction cuStreamIsCapturing "
    "cuPointerGetAttribute cuPointerGetAttributes cuDriverGetVersion cuOccupancyMaxActiveClusters cuTensorMapEncodeTiled "
    "cuTensorMapEncodeIm2col cuGetErrorString cuMemAlloc_v2 cuMemFree_v2 cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemGetAddressRange_v2"
).split()
_SOURCE = """
typedef struct { unsigned grid[3], block[3], shared; void *stream; void *attrs; unsigned num_attrs; } config;
unsigned long long seen[40];
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuLaunchKernelEx(config *c, void *function, unsigned long long **parameters, void **extra) {
  for (int i = 0; i < 3; i++) { seen[i] = c->grid[i]; seen[3 + i] = c->block[i]; }
  seen[6] = c->shared; seen[7] = (unsigned long long)c->stream; seen[8] = (unsigned long long)function; seen[9] = c->num_attrs;
  int count = (int)seen[39];
  for (int i = 0; i < count; i++) seen[10 + i] = *parameters[i];
  return 0;
}
void expect(int parameters) { seen[39] = parameters; }
"""
_LOADED: list[Any] = []


def install(folder: Path) -> Any:
    """Compile and load it; Triton finds it in `folder`."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE + "\n".join(f"int {name}() {{ return 0; }}" for name in _NOTHING))
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    _LOADED.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))
    return _LOADED[-1]


def launcher(driver: Any) -> None:
    """Have a driver of `ops_math.backends.null` make Triton's own launchers, which call the stub."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    driver.launcher_cls = CudaLauncher
    driver.allocate_default_profile_scratch = lambda *_: None
    for name, value in vars(CudaUtils()).items():
        if not hasattr(type(driver.utils), name):
            setattr(driver.utils, name, value)


def last(count: int) -> tuple[int, ...]:
    """Grid, block, shared memory, stream, function, number of attributes, and the first eight bytes of each of `count` parameters of the
    latest launch."""
    return tuple((ctypes.c_ulonglong * 40).in_dll(_LOADED[-1], "seen"))[: 10 + count]
