"""The operator in plain torch: the CPU implementation, and the yardstick of rounding for the others.

`Apart` is the form whose bits follow nothing but a row and a weight: every call of PyTorch has one size and operands of its own, a row
and 64 outputs at a time, and the weight's gradient 64 by 64 elements a token block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ops_math.layout import as_rows
from ops_math.ops.linear.problem import LinearProblem, cost
from ops_math.spec import DTYPE_OF, Device, compute_dtype

TILE = 64  # outputs of one call


class Apart(NamedTuple):
    """Rows whose gradients are added together before they are added to those of the rows before."""

    token_block: int


def invariant_configs(p: LinearProblem, device: Device, phase: str) -> tuple[Apart, ...]:
    """One, for the token block of the policy, which is the number of rows of the problem that is asked."""
    return (Apart(p.rows),)


def predict_us(p: LinearProblem, device: Device, phase: str) -> float:
    """The products at the device's rate, and twice: PyTorch's own has no conversions."""
    return 2 * cost(p, phase).total_flops / (device.product_tflops * 1e6) + 4 * device.launch_us


def _operand(p: LinearProblem, t: torch.Tensor) -> torch.Tensor:
    """Rounded to the dtype of the product, in the dtype of arithmetic."""
    store = DTYPE_OF[p.store]
    return t.to(store).to(compute_dtype(store))


def launch_fwd(p: LinearProblem, config: Apart | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y [..., N]."""
    x_MK, weight_NK = _operand(p, as_rows(x)), _operand(p, weight)
    y_MN = x_MK @ weight_NK.t() if config is None else _product_apart(x_MK, weight_NK, p.parts_k)
    if bias is not None:
        y_MN = y_MN + bias.to(y_MN.dtype)
    return y_MN.to(DTYPE_OF[p.out]).view(*x.shape[:-1], p.outputs)


def launch_bwd(
    p: LinearProblem, config: Apart | None, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx = dy weight, dweight = dy^T x, dbias = the sum of dy over rows; empty where not needed."""
    dy_MN = _operand(p, as_rows(dy, p.outputs))
    dx, dw, db = x.new_empty(0), weight.new_empty(0), x.new_empty(0, dtype=DTYPE_OF[p.bias or p.weight])
    if p.need_dx:
        weight_NK = _operand(p, weight)
        made = dy_MN @ weight_NK if config is None else _product_apart(dy_MN, weight_NK.t(), p.parts_n)
        dx = made.to(x.dtype).view(x.shape)
    if p.need_dw:
        x_MK = _operand(p, as_rows(x))
        made = dy_MN.t() @ x_MK if config is None else _gradient_apart(dy_MN, x_MK, config.token_block)
        dw = made.to(weight.dtype)
    if p.need_db:
        whole = as_rows(dy, p.outputs).to(compute_dtype(dy.dtype))  # as it came: only operands of products are rounded
        made = whole.sum(0) if config is None else _sums_apart(whole, config.token_block)
        db = made.to(db.dtype)
    return dx, dw, db


def _own(t: torch.Tensor) -> torch.Tensor:
    """A copy that lies dense in a buffer of its own."""
    return t.clone(memory_format=torch.contiguous_format)


def _in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of 2^n parts: neighbours first, then their sums."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _product_apart(a_MK: torch.Tensor, b_NK: torch.Tensor, parts: int) -> torch.Tensor:
    """a b^T: each call is one row and 64 rows of b, those beyond the last being zeros; sums in `parts` parts."""
    (rows, inputs), outputs = a_MK.shape, b_NK.shape[0]
    length = inputs // parts
    tiles = []
    for first in range(0, outputs, TILE):
        filled = b_NK.new_zeros((TILE, inputs))
        filled[: min(TILE, outputs - first)] = b_NK[first : first + TILE]
        tiles.append([_own(piece) for piece in filled.split(length, 1)] if length else [filled])
    y_MN = a_MK.new_empty((rows, outputs))
    for m in range(rows):
        pieces = [_own(piece) for piece in a_MK[m].split(length)] if length else [a_MK[m]]
        for first, tile in zip(range(0, outputs, TILE), tiles, strict=True):
            made = _in_pairs([torch.mv(w, x) for w, x in zip(tile, pieces, strict=True)])
            y_MN[m, first : first + TILE] = made[: outputs - first]
    return y_MN


def _blocks(rows: int, token_block: int) -> Iterator[slice]:
    return (slice(first, min(first + token_block, rows)) for first in range(0, rows, token_block))


def _columns(t: torch.Tensor) -> list[torch.Tensor]:
    """64 columns at a time, each dense, the last filled up with zeros."""
    found = []
    for first in range(0, t.shape[1], TILE):
        tile = t.new_zeros((t.shape[0], TILE))
        tile[:, : min(TILE, t.shape[1] - first)] = t[:, first : first + TILE]
        found.append(tile)
    return found


def _gradient_apart(dy_MN: torch.Tensor, x_MK: torch.Tensor, token_block: int) -> torch.Tensor:
    """dy^T x, block by block, 64 by 64 elements a call."""
    (rows, outputs), inputs = dy_MN.shape, x_MK.shape[1]
    dw_NK = dy_MN.new_zeros((outputs, inputs))
    for number, block in enumerate(_blocks(rows, token_block)):
        columns = _columns(x_MK[block])
        for n, left in zip(range(0, outputs, TILE), _columns(dy_MN[block]), strict=True):
            for k, right in zip(range(0, inputs, TILE), columns, strict=True):
                made = (left.t() @ right)[: outputs - n, : inputs - k]
                at = dw_NK[n : n + TILE, k : k + TILE]
                at.copy_(made) if number == 0 else at.add_(made)
    return dw_NK


def _sums_apart(dy_MN: torch.Tensor, token_block: int) -> torch.Tensor:
    """The sum over rows, block by block, 64 columns a call."""
    total = dy_MN.new_zeros(dy_MN.shape[1])
    for number, block in enumerate(_blocks(dy_MN.shape[0], token_block)):
        for n, tile in zip(range(0, dy_MN.shape[1], TILE), _columns(dy_MN[block]), strict=True):
            made, at = tile.sum(0)[: dy_MN.shape[1] - n], total[n : n + TILE]
            at.copy_(made) if number == 0 else at.add_(made)
    return total
