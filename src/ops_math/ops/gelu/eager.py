"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

It works in chunks of rows that stay in the cache, so that its passes cost about what one pass over memory does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops_math import features
from ops_math.ops.gelu.problem import GeluProblem
from ops_math.spec import DTYPE_OF, compute_dtype

PASSES = 1.3
CALLS = 4
CHUNK = 32768  # values a thread and chunk: 128 KiB in fp32


def _chunks(p: GeluProblem, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors as matrices, piece by piece; the whole at once where it is small or on a GPU."""
    rows = [t.reshape(p.rows, p.cols) for t in tensors]
    size = CHUNK * torch.get_num_threads()
    if tensors[0].device.type != "cpu" or p.rows * p.cols <= 2 * size:
        return iter((tuple(rows),))
    return zip(*(t.split(max(1, size // p.cols)) for t in rows), strict=True)


def _shifted(x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if bias is None else torch.add(x.to(dtype), bias.to(dtype))


def launch_fwd(p: GeluProblem, config: None, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    dtype, gelu = compute_dtype(x.dtype), features.aten("gelu", "out")
    y = torch.empty(x.shape, dtype=DTYPE_OF[p.out], device=x.device)
    for x_part, y_part in _chunks(p, x, y):
        wide = y_part if y.dtype == dtype else torch.empty(y_part.shape, dtype=dtype, device=y.device)
        gelu(_shifted(x_part, bias, dtype), approximate=p.approximate, out=wide)
        if wide is not y_part:
            y_part.copy_(wide)
    return y


def launch_bwd(p: GeluProblem, config: None, dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dbias and y; empty where not asked for."""
    dtype = compute_dtype(x.dtype)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if p.need_dx else x.new_empty(0)
    y = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device) if p.need_y else dy.new_empty(0)
    dbias = torch.zeros(p.cols, dtype=dtype, device=x.device) if p.need_dbias else None
    outputs = ([dx] if p.need_dx else []) + ([y] if p.need_y else [])
    for dy_part, x_part, *parts in _chunks(p, dy, x, *outputs):
        z = _shifted(x_part, bias, dtype)
        if p.need_y:
            parts[-1].copy_(torch.nn.functional.gelu(z, approximate=p.approximate))
        if p.need_dx or dbias is not None:
            in_place = p.need_dx and dx.dtype == dtype
            wide = parts[0] if in_place else torch.empty(z.shape, dtype=dtype, device=z.device)
            features.aten("gelu_backward", "grad_input")(dy_part.to(dtype), z, approximate=p.approximate, grad_input=wide)
            if dbias is not None:
                dbias += wide.sum(0)
            if p.need_dx and not in_place:
                parts[0].copy_(wide)
    return dx, x.new_empty(0) if dbias is None or bias is None else dbias.to(bias.dtype), y
