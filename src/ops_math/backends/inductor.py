"""Several passes over memory as one: plain functions compiled for the CPU by PyTorch's Inductor.

An operator hands in a function of tensors; it is traced and compiled once for each set of dtypes, widths and options, with the number of
rows left open, so that new lengths compile nothing. Neither Dynamo nor its guards take part: the launcher knows what its function depends
on, and a user's `torch.compile`, its stance and its limits have nothing to do with ours. Through Dynamo a call of 93 us takes 195 (1,024 x
256, one core). A compilation takes seconds, which is why candidates of this kind run where they were measured or asked for, and never by
the model's guess.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ops_math import checks, settings
from ops_math.spec import Device

ON_REQUEST = "compiles C++ for seconds at its first call: it runs where it was measured (om.calibrate) or asked for (force)"
# Casts that PyTorch would make are made, so that what is stored is what was computed with.
OPTIONS = {"emulate_precision_casts": True}
MOST_SHAPES = 4096  # remembered; ever new lengths start over instead of growing
Function = Callable[..., Sequence[torch.Tensor]]


class _Compiled(NamedTuple):
    """What was compiled, and what it assumes of the open sizes `t0`, `t1`, ... as Python, empty where nothing."""

    run: Callable[[list[Any]], Any]
    assumes: Any

    def takes(self, sizes: Sequence[int]) -> bool:
        """Whether these sizes are as it assumes."""
        return self.assumes is None or bool(self.assumes(sizes))


_COMPILED: dict[Hashable, list[_Compiled]] = {}  # by all but the open sizes
_BY_SHAPE: dict[Hashable, Callable[[list[Any]], Any]] = {}
_LOCK = threading.RLock()


@functools.lru_cache(maxsize=1)
def _missing() -> str | None:
    if importlib.util.find_spec("torch._inductor") is None:
        return "this PyTorch has no Inductor"
    compiler = settings.environment(["CXX"]).get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler.split()[0]) is None:
        return f"Inductor needs a C++ compiler, and there is no {compiler}: install one, or name yours in CXX"
    return None


def unavailable(device: Device) -> str | None:
    """Why nothing can be compiled for this device, in words, or None. It imports no part of the compiler, which takes seconds."""
    if device.kind != "cpu":
        return f"is for CPUs, this is {device.kind}"
    return _missing()


def call(key: Hashable, function: Function, tensors: Sequence[torch.Tensor], open_dims: Sequence[Sequence[int]]) -> Any:
    """`function(*tensors)`, compiled.

    Args:
        key: all that the function depends on beside its tensors.
        function: pure, returns a tuple of tensors; a value that it rounds to 16 bits and widens again it returns as well, or the C++ of
            PyTorch 2.11 goes on with the value before rounding.
        tensors: contiguous.
        open_dims: of each tensor the dimensions whose size is left open; 0 and 1 are sizes of their own all the same.

    Returns: what the function returns, as a sequence.

    Raises: UnsupportedError where this PyTorch's compiler cannot be called as this one expects.
    """
    shapes = tuple([(t.dtype, t.shape) for t in tensors])
    sizes = [t.shape[n] for t, free in zip(tensors, open_dims, strict=True) for n in free if t.shape[n] > 1]
    threads = torch.get_num_threads()  # the compiler writes their number into the code
    run = _BY_SHAPE.get((key, threads, shapes))
    if run is None:
        with _LOCK:
            run = _found_or_compiled((key, threads), function, tensors, open_dims, sizes)
            if len(_BY_SHAPE) >= MOST_SHAPES:
                _BY_SHAPE.clear()
            _BY_SHAPE[key, threads, shapes] = run
    return run([*sizes, *tensors])


def _found_or_compiled(
    key: Hashable, function: Function, tensors: Sequence[torch.Tensor], open_dims: Sequence[Sequence[int]], sizes: Sequence[int]
) -> Callable[[list[Any]], Any]:
    """What was compiled for other lengths, where it holds for these."""
    pattern = [
        (t.dtype, tuple(-1 if n in free and size > 1 else size for n, size in enumerate(t.shape)))
        for t, free in zip(tensors, open_dims, strict=True)
    ]
    known = _COMPILED.setdefault((key, tuple(pattern)), [])
    found = next((one for one in known if one.takes(sizes)), None)
    if found is None:
        found = _compile(function, tensors, open_dims)
        known.append(found)
    return found.run


def _compile(function: Function, tensors: Sequence[torch.Tensor], open_dims: Sequence[Sequence[int]]) -> _Compiled:
    """Trace and compile. Open sizes are inputs of the graph: PyTorch's own cache knows a graph's assumptions by them."""
    try:
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError as error:
        checks.refuse("inductor", f"this PyTorch's compiler is made otherwise ({error})", "Use another implementation.")
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False), config.patch(OPTIONS):
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes)
        fakes: list[Any] = []
        for t, free in zip(tensors, open_dims, strict=True):
            dims = [DimDynamic.DYNAMIC if n in free else DimDynamic.STATIC for n in range(t.dim())]
            fakes.append(mode.from_tensor(t.detach(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)))
        sizes = [f.shape[n] for f, free in zip(fakes, open_dims, strict=True) for n in free if not isinstance(f.shape[n], int)]
        count = len(sizes)
        with tracing(TracingContext(mode)):
            traced = make_fx(lambda *args: function(*args[count:]), decomposition_table=select_decomp_table(), tracing_mode="symbolic")
            graph = traced(*sizes, *fakes)
            run = compile_fx_inner(graph, [*sizes, *fakes])
        words = shapes.produce_guards_expression(sizes)
        evaluate = shapes.evaluate_guards_expression
    return _Compiled(run, None if words is None else functools.partial(evaluate, words))
