"""Puts right what Triton's interpreter gets wrong with bf16, so that kernels' bf16 arithmetic can be run on a CPU, and makes it faster.

Triton 3.9 truncates fp32 to bf16 where hardware rounds to nearest even, and multiplies bf16 bit patterns as integers in `tl.dot`.
At each call of a device function it looks through Triton's language for what it has replaced already, a third of its time.
Call `repair()` in a process with TRITON_INTERPRET=1 after importing Triton.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def _widen(bits: Any) -> Any:
    """bf16 bit patterns (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values: Any) -> Any:
    """float32 as bf16 bit patterns, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint64(0x7FC0), rounded).astype(np.uint16)


def repair() -> None:
    """Replace the interpreter's bf16 casts and products, and let it prepare a launch once. Safe to call twice."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "bf16_repaired", False):
        return
    handle, cast, dot = interpreter.TensorHandle, builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 and target == tl.float32:
            return handle(_widen(src.data), target)
        if source == tl.float32 and target == tl.bfloat16:
            return handle(_round(src.data), target)
        if tl.bfloat16 in (source, target) and source != target:  # through fp32, e.g. bf16 to fp16
            return (
                cast_impl(self, cast_impl(self, src, tl.float32), dst_type)
                if source == tl.bfloat16
                else cast_impl(self, cast(self, src, tl.float32), dst_type)
            )
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        def wide(h: Any) -> Any:
            return handle(_widen(h.data), tl.float32) if h.dtype.scalar == tl.bfloat16 else h

        return dot(self, wide(a), wide(b), *rest)

    builder.cast_impl, builder.create_dot, builder.bf16_repaired = cast_impl, create_dot, True
    _prepare_once(interpreter)


def _prepare_once(interpreter: Any) -> None:
    """Replace the language's functions at the start of a launch, and for its device functions only where they see other modules of it."""
    import triton.language as tl

    start, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    done: set[frozenset[str]] = set()

    def index(self: Any) -> int:
        return int(self.handle.data.squeeze())

    @functools.wraps(start)
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()  # the end of the launch before put the functions back
        return start(self, *args, **kwargs)

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        seen = frozenset(name for name, module in (("tl", tl), ("core", tl.core)) if any(v is module for v in fn.__globals__.values()))
        if seen in done:
            return None
        done.add(seen)
        scope = patch(fn)
        tl.tensor.__index__ = index  # Triton 3.6 asks NumPy for the number of an array of one element, which NumPy 2.4 refuses
        return scope

    looked_up = interpreter._get_np_dtype
    of_scalar = functools.cache(looked_up)

    def dtype_of(t: Any) -> Any:
        scalar = t.element_ty if isinstance(t, tl.block_type) else t
        return looked_up(t) if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    interpreter.GridExecutor.__call__, interpreter._patch_lang, interpreter._get_np_dtype = launch, patch_once, dtype_of
