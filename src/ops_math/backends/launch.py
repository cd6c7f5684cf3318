"""The one place that starts a Triton kernel.

`kernel[grid](...)` binds and specialises its arguments anew at each call, which costs 16 us of host time on the machine of an H200, as
much as a small kernel runs. The compiled kernel is therefore kept by everything that it may be specialised for, and started by its own
launcher (6 us). The key holds exact integers and the alignment of pointers, so a kernel never meets arguments it was not compiled for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ops_math import features


class Kept(NamedTuple):
    """A compiled kernel: its launcher, what that takes besides grid and stream, and the constants that follow the arguments."""

    run: Any
    function: Any
    metadata: Any
    tail: tuple[Any, ...]


class _Tape(threading.local):
    starts: list[Any] | None = None


_COMPILED: dict[tuple[Any, ...], Kept] = {}
_TAPE = _Tape()
STARTED: set[Any] = set()  # every kernel that went Triton's own way; `null` makes them forget what they compiled
DIRECT = {"cuda"}  # kinds of devices whose kernels are started directly; tools/host_path.py adds one that computes nothing
_LIMIT = 8192  # kept kernels by key; a run with ever new shapes starts over instead of growing
_PLAIN = frozenset((int, float, bool, type(None)))
ALIGNMENT = 16  # bytes, a power of two; Triton reads wider where a pointer is a multiple of it
_LOW = ALIGNMENT - 1
_Tensor = torch.Tensor
_HIP = torch.version.hip is not None


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 3, registers: int = 0, **constants: Any
) -> None:
    """Start `kernel` on `grid` with positional run-time arguments and `constants` as its compile-time ones.

    On NVIDIA GPUs a thread takes at most so many `registers`; 0: as many as the compiler likes.

    An empty grid starts nothing. fp fusion is asked for by name, since its default differs between Triton versions.
    """
    if 0 in grid:
        return
    device = None
    key: list[Any] = [id(kernel), num_warps, num_stages, registers, *constants.values()]
    for a in args:
        kind = type(a)
        if kind in _PLAIN:
            key.append(a)
        elif isinstance(a, _Tensor):
            if device is None:
                device = a.device
            key += (a.dtype, a.data_ptr() & _LOW)
        else:
            described = _described(a)
            if described is None:
                device = None
                break
            key += described
    kept, found = None, None
    if device is not None and device.type in DIRECT and not _HIP:  # not meta tensors, the interpreter; AMD specialises on more
        index = device.index
        key.append(index)
        kept = tuple(key)
        found = _COMPILED.get(kept)
    if found is None:
        compiled = _start(kernel, grid, args, (num_warps, num_stages, registers), constants)
        if kept is not None:
            found = _keep(kept, kernel, compiled, len(args), constants)
    else:
        run, function, metadata, tail = found
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, features.raw_stream(index), function, metadata, None, None, None, *args, *tail)
    if _TAPE.starts is not None:
        _TAPE.starts.append((found, grid, args))


def innermost(kept: Kept) -> tuple[Any, tuple[Any, ...], bool]:
    """What Triton's launcher calls in C, where all it does before that is to pass constants on: the function, its arguments after grid and
    stream, and whether it takes the kernel's own ones together. Else the launcher itself. It is known of exact versions only."""
    run = kept.run
    usual = kept.function, kept.metadata, None, None, None
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    version = triton_minor()
    if type(run).__name__ != "CudaLauncher" or scratch or getattr(run, "gsan_enabled", False) or version not in ("3.6", "3.9"):
        return run, usual, False
    start = kept.function, run.launch_cooperative_grid, run.launch_pdl
    if version == "3.6":
        return run.launch, (*start, None, None, *usual[1:]), False
    return run.launch, (*start, *usual[1:], None, None, run.arg_annotations, run.kernel_signature), True


def triton_minor() -> str:
    """Triton's version without its last number: what its compiler makes of a kernel, and what its launcher takes, go with it."""
    import triton

    return ".".join(str(triton.__version__).split(".")[:2])


def _described(a: Any) -> tuple[Any, ...] | None:
    """What a kernel may be specialised for of a tensor descriptor (its launcher encodes it anew at each start); None for anything else."""
    if type(a).__name__ != "TensorDescriptor":
        return None
    fields = (tuple(value) if isinstance(value, list | tuple) else value for name, value in vars(a).items() if name != "base")
    return (type(a), a.base.dtype, a.base.data_ptr() & _LOW, *fields)


@contextmanager
def taped() -> Iterator[list[Any]]:
    """The launches of this thread from here on: (what is kept of the kernel, or None; grid; arguments)."""
    before, _TAPE.starts = _TAPE.starts, []
    try:
        yield _TAPE.starts
    finally:
        _TAPE.starts = before


def forget() -> None:
    """Drop every kept kernel: what they were compiled for is gone."""
    _COMPILED.clear()


def _start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: tuple[int, int, int], constants: dict[str, Any]) -> Any:
    STARTED.add(kernel)
    num_warps, num_stages, registers = options
    on_cpu = any(isinstance(a, _Tensor) and a.device.type == "cpu" for a in args)  # the interpreter knows no limit
    limit = {"maxnreg": registers} if registers and not on_cpu else {}
    return kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True, **limit, **constants)


def _keep(key: tuple[Any, ...], kernel: Any, compiled: Any, num_args: int, constants: dict[str, Any]) -> Kept | None:
    """Keep a compiled kernel where it can be started directly: constants follow run-time arguments, and nothing watches launches."""
    from triton import knobs

    names = kernel.arg_names[num_args:]
    direct = all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")) and set(names) == set(constants)
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    if not direct or any(getattr(hook, "calls", hook) for hook in hooks):  # a chain of hooks, or one where Triton has no chains
        return None
    if len(_COMPILED) >= _LIMIT:
        _COMPILED.clear()
    _COMPILED[key] = found = Kept(compiled.run, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in names))
    return found
