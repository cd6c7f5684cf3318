"""Gate and up as halves of one contiguous tensor of 16-bit values, where the width of a half is odd.

Gate, up and result of a row then start at three places between two boundaries, and no tile of columns suits all of them. Four values are
handled at a time: eight bytes of one tensor on its grid, and of the others two neighbouring words put together by a shift, of which the
second is a neighbour's first and lies in the L1 cache. That takes 30 instructions a value forward and 42 backward, where value by value it
takes 37 to 43 and 49 to 59, a fifth of them on idle lanes (sm_90, Triton 3.6, eight values a thread). One program walks a row; the fewer
than twelve values that are in no four at its ends come value by value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.ops._tiles.activation import activate, activate_with_slope
from ops_math.ops.glu.problem import GluProblem
from ops_math.ops.glu.triton_gpu_config import Config
from ops_math.spec import ITEM_SIZE

LEAST = 256  # columns; narrower rows leave most threads idle
ENDS = tl.constexpr(16)


@triton.jit
def _words(ptr, first, lanes, fours):
    """Values first + 4 lane .. first + 4 lane + 3 of a tensor of 16-bit values, in words of 64 bits."""
    shift = first % 4 * 16
    at = ptr.to(tl.pointer_type(tl.uint64)) + first // 4 + lanes
    low = tl.load(at, mask=lanes < fours, other=0)
    high = tl.load(at + 1, mask=lanes < tl.where(shift > 0, fours, 0), other=0)
    return (low >> shift.to(tl.uint64)) | ((high << 1) << (63 - shift).to(tl.uint64))


@triton.jit
def _value(words, ptr, PLACE: tl.constexpr):
    """One of the four values of each word in fp32."""
    return (words >> (16 * PLACE)).to(tl.uint16).to(ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _placed(value, ptr, PLACE: tl.constexpr):
    """A value in its place of a word."""
    return value.to(ptr.dtype.element_ty).to(tl.uint16, bitcast=True).to(tl.uint64) << (16 * PLACE)


@triton.jit
def _cut(row, num_cols, begin):
    """(columns before the first four of a row that begins at `begin`, fours): three values at least are left behind the last four, so
    that no word lies beyond the tensor."""
    head = (4 - begin % 4) % 4
    return head, (num_cols - head - 3) // 4


@triton.jit
def _end_columns(head, fours, num_cols):
    """The columns [ENDS] that are in no four, and whether they exist."""
    place = tl.arange(0, ENDS)
    return tl.where(place < head, place, place + 4 * fours), place < num_cols - 4 * fours


@triton.jit
def _fwd_kernel(packed_ptr, y_ptr, num_cols, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin, gate_begin = row * num_cols, 2 * row * num_cols
    up_begin = gate_begin + num_cols
    head, fours = _cut(row, num_cols, begin)
    y_words = y_ptr.to(tl.pointer_type(tl.uint64)) + (begin + head) // 4
    for start in tl.range(0, fours, BLOCK, num_stages=1):
        lanes = start + tl.arange(0, BLOCK)
        gates, ups = _words(packed_ptr, gate_begin + head, lanes, fours), _words(packed_ptr, up_begin + head, lanes, fours)
        words = tl.zeros([BLOCK], tl.uint64)
        for i in tl.static_range(4):
            words |= _placed(activate(_value(gates, packed_ptr, i), ACTIVATION) * _value(ups, packed_ptr, i), y_ptr, i)
        tl.store(y_words + lanes, words, mask=lanes < fours)
    cols, mask = _end_columns(head, fours, num_cols)
    gate = tl.load(packed_ptr + gate_begin + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed_ptr + up_begin + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + begin + cols, (activate(gate, ACTIVATION) * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bwd_kernel(dy_ptr, packed_ptr, dpacked_ptr, num_cols, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin, gate_begin = row * num_cols, 2 * row * num_cols
    up_begin = gate_begin + num_cols
    head, fours = _cut(row, num_cols, gate_begin)
    dgate_words = dpacked_ptr.to(tl.pointer_type(tl.uint64)) + (gate_begin + head) // 4
    for start in tl.range(0, fours, BLOCK, num_stages=1):
        lanes = start + tl.arange(0, BLOCK)
        mask = lanes < fours
        dys = _words(dy_ptr, begin + head, lanes, fours)
        gates, ups = _words(packed_ptr, gate_begin + head, lanes, fours), _words(packed_ptr, up_begin + head, lanes, fours)
        dgates = tl.zeros([BLOCK], tl.uint64)
        for i in tl.static_range(4):
            dy = _value(dys, dy_ptr, i)
            act, slope = activate_with_slope(_value(gates, packed_ptr, i), ACTIVATION)
            dgates |= _placed(dy * _value(ups, packed_ptr, i) * slope, dpacked_ptr, i)
            tl.store(dpacked_ptr + up_begin + head + i + 4 * lanes, (dy * act).to(dpacked_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_words + lanes, dgates, mask=mask)
    cols, mask = _end_columns(head, fours, num_cols)
    dy = tl.load(dy_ptr + begin + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(packed_ptr + gate_begin + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed_ptr + up_begin + cols, mask=mask, other=0.0).to(tl.float32)
    act, slope = activate_with_slope(gate, ACTIVATION)
    tl.store(dpacked_ptr + gate_begin + cols, (dy * up * slope).to(dpacked_ptr.dtype.element_ty), mask=mask)
    tl.store(dpacked_ptr + up_begin + cols, (dy * act).to(dpacked_ptr.dtype.element_ty), mask=mask)


def suits(p: GluProblem) -> bool:
    """Whether a problem may be handled by fours: a forward, or a backward that is to give dgate and nothing but gradients."""
    same = ITEM_SIZE[p.gate] == ITEM_SIZE[p.out] == 2
    return p.packing == "halves" and p.cols % 2 == 1 and p.cols >= LEAST and same and p.need_dgate and not p.need_y


def lies_right(*tensors: torch.Tensor) -> bool:
    """Whether tensors are contiguous and begin with a word."""
    return all(t.is_contiguous() and t.data_ptr() % 8 == 0 for t in tensors)


def launch_fwd(p: GluProblem, config: Config, packed: torch.Tensor, y: torch.Tensor) -> None:
    """y = activation(gate) up."""
    launch(_fwd_kernel, (p.rows,), packed, y, p.cols, ACTIVATION=p.activation, BLOCK=config.block // 4, num_warps=config.num_warps)


def launch_bwd(p: GluProblem, config: Config, dy: torch.Tensor, packed: torch.Tensor, dpacked: torch.Tensor) -> None:
    """The gradients of gate and up, packed as they are."""
    launch(
        _bwd_kernel, (p.rows,), dy, packed, dpacked, p.cols,
        ACTIVATION=p.activation, BLOCK=config.block // 4, num_warps=config.num_warps,
    )  # fmt: skip
