"""Kernels for wide rows that do not start on 16-byte boundaries, as in a vocabulary of 50,257 or 30,522 in 16 bits.

Threads would read such rows value by value. Here they read whole aligned groups of 16 bytes and drop what belongs to a neighbour. A
group that holds one byte of the tensor lies in its allocation whole. The backward goes over the matrix as one line; a tile of it is
narrower than a row and so lies in two rows at most.
"""

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.layout import copied
from ops_math.ops._tiles.class_target import read_target, reference_of, row_results, taken_in
from ops_math.ops._tiles.log_sum_exp import lane_finish, soft_capped, tanh


@triton.jit
def _visit(
    groups_ptr, class_weight_ptr, group, num_groups, lead, num_cols, hidden, reference, softcap, top, total, smooth_lanes,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The lanes of a row after its groups `group`, without the value at `hidden`; None hides none, and costs nothing."""
    within = tl.arange(0, GROUP)
    offsets = group[:, None] * GROUP + within[None, :]
    some = (group < num_groups)[:, None] & (within < GROUP)[None, :]  # the same for a whole group, so that it is one load
    z = tl.load(groups_ptr + offsets, mask=some, other=float("-inf")).to(tl.float32)
    cols = offsets - lead
    mask = (cols >= 0) & (cols < num_cols)
    if HAS_CAP:
        z = soft_capped(z, softcap)
    z = tl.where(mask, z, float("-inf"))
    return taken_in(z, mask, cols, offsets, hidden, class_weight_ptr, reference, top, total, smooth_lanes, HAS_WEIGHT, SMOOTHING)


@triton.jit
def _fwd_kernel(
    base_ptr, target_ptr, class_weight_ptr, weight_sum_ptr, loss_ptr, factors_ptr, divisor_ptr, num_cols, first, logits_stride,
    ignore_index, smoothing, smooth, z_loss, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = row * logits_stride + first
    lead = (begin % GROUP).to(tl.int32)
    groups_ptr = base_ptr + (begin // GROUP) * GROUP
    LANES: tl.constexpr = BLOCK_N // GROUP
    lanes = tl.arange(0, LANES)

    kept, index, one = read_target(tl.load(target_ptr + row), num_cols, ignore_index)
    z_target = tl.load(base_ptr + begin + index).to(tl.float32)
    weight = one
    if HAS_WEIGHT:
        weight = one * tl.load(class_weight_ptr + index).to(tl.float32)
    if HAS_CAP:
        z_target = soft_capped(z_target, softcap)

    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    smooth_lanes = tl.zeros([LANES], tl.float32)
    reference = reference_of(z_target)
    num_groups = tl.where(kept, tl.cdiv(lead + num_cols, GROUP), 0)  # an ignored row is not read
    hidden = index.to(tl.int32) + lead
    first = hidden // BLOCK_N * LANES  # the target's tile goes first, so that no other one looks for it
    top, total, smooth_lanes = _visit(
        groups_ptr, class_weight_ptr, first + lanes, num_groups, lead, num_cols, hidden, reference, softcap, top, total, smooth_lanes,
        HAS_WEIGHT, SMOOTHING, HAS_CAP, GROUP,
    )  # fmt: skip
    for start in range(0, num_groups - LANES, LANES):
        group = tl.where(start < first, start, start + LANES) + lanes
        top, total, smooth_lanes = _visit(
            groups_ptr, class_weight_ptr, group, num_groups, lead, num_cols, None, reference, softcap, top, total, smooth_lanes,
            HAS_WEIGHT, SMOOTHING, HAS_CAP, GROUP,
        )  # fmt: skip
    row_top, below, others = lane_finish(top, total, z_target)
    smooth_total, smooth_sum = smoothing, tl.sum(smooth_lanes, 0)
    if SMOOTHING:
        if HAS_WEIGHT:
            smooth_total = smooth * tl.load(weight_sum_ptr).to(tl.float32)
    loss, row_top, on_other, on_target = row_results(
        row_top, below, others, smooth_sum, smooth_total, kept, weight, one, smoothing, smooth, z_loss, SMOOTHING
    )

    tl.store(loss_ptr + row, loss)
    tl.store(factors_ptr + 3 * row, row_top)
    tl.store(factors_ptr + 3 * row + 1, on_other)
    tl.store(factors_ptr + 3 * row + 2, on_target)
    tl.store(divisor_ptr + row, weight)


@triton.jit
def _of_row(pair, second):
    """Of a pair of row values, the one of each element's row."""
    both = tl.arange(0, 2)
    of_first = tl.sum(tl.where(both == 0, pair, 0), 0)
    of_second = tl.sum(tl.where(both == 1, pair, 0), 0)
    return tl.where(second, of_second, of_first)


@triton.jit
def _bwd_kernel(
    scale_ptr, logits_ptr, target_ptr, class_weight_ptr, factors_ptr, dlogits_ptr, num_rows, num_cols, scale_stride,
    ignore_index, smooth, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    first_row = begin // num_cols
    offsets = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    left = ((first_row + 1) * num_cols - begin).to(tl.int32)  # values of the tile in its first row
    second = offsets >= left
    cols = tl.where(second, offsets - left, offsets + (num_cols - left))
    some = begin // GROUP + tl.arange(0, BLOCK // GROUP) < tl.cdiv(tl.cast(num_rows, tl.int64) * num_cols, GROUP)
    some = some[:, None] & (tl.arange(0, GROUP) < GROUP)[None, :]

    rows = first_row + tl.arange(0, 2)
    here = rows < num_rows
    kept, index, one = read_target(tl.load(target_ptr + rows, mask=here, other=ignore_index), num_cols, ignore_index)
    top = tl.load(factors_ptr + 3 * rows, mask=here, other=0.0)
    on_other = tl.load(factors_ptr + 3 * rows + 1, mask=here, other=0.0)
    on_target = tl.load(factors_ptr + 3 * rows + 2, mask=here, other=0.0)
    scale = tl.load(scale_ptr + rows * scale_stride, mask=here, other=0.0).to(tl.float32)
    z = tl.load(logits_ptr + begin + offsets, mask=some, other=0.0).to(tl.float32)

    if HAS_CAP:
        t = tanh(z / softcap)
        z = softcap * t
    dz = tl.exp(z - _of_row(top, second)) * _of_row(on_other * scale, second)
    dz = tl.where(cols == _of_row(index.to(tl.int32), second), _of_row(on_target * scale, second), dz)
    if SMOOTHING:
        on_all = one * scale * smooth
        if HAS_WEIGHT:
            dz -= _of_row(on_all, second) * tl.load(class_weight_ptr + cols, mask=some & (cols < num_cols), other=0.0).to(tl.float32)
        else:
            dz -= _of_row(on_all, second)
    if HAS_CAP:
        dz *= 1.0 - t * t
    dz = tl.where(_of_row(kept.to(tl.int32), second) != 0, dz, 0.0)  # an ignored row is 0 whatever it holds, NaN too

    tl.store(dlogits_ptr + begin + offsets, dz.to(dlogits_ptr.dtype.element_ty), mask=some)


def is_aligned(logits: torch.Tensor) -> bool:
    """Whether every row starts on a 16-byte boundary."""
    size = logits.element_size()
    return logits.data_ptr() % 16 == 0 and logits.stride(0) * size % 16 == 0


def is_aligned_line(logits: torch.Tensor) -> bool:
    """Whether the matrix is one line of values from a 16-byte boundary on."""
    return logits.is_contiguous() and logits.data_ptr() % 16 == 0


def empty_line(like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of this shape whose allocation ends with a whole group."""
    group = 16 // like.element_size()
    return torch.empty(-(-like.numel() // group) * group, dtype=like.dtype, device=like.device)[: like.numel()].view(like.shape)


def launch_rows(
    num_cols: int, logits: torch.Tensor, target: torch.Tensor, tensors: tuple[torch.Tensor, ...], scalars: tuple[float, ...],
    flags: dict[str, bool], block_n: int, num_warps: int,
) -> None:  # fmt: skip
    """Row losses, factors and divisors of a matrix of logits; `tensors` are class weights, their sum, and the three results."""
    size = logits.element_size()
    first = logits.data_ptr() % 16 // size
    if first > logits.storage_offset():  # memory of another library, which may start anywhere
        logits, first = copied(logits.clone(), "logits", "their memory starts off the 16-byte grid"), 0
    base = logits.as_strided((1,), (1,), logits.storage_offset() - first)  # a view that starts on a boundary, as its storage does
    launch(
        _fwd_kernel, (logits.shape[0],), base, target, *tensors, num_cols, first, logits.stride(0), *scalars, **flags,
        GROUP=16 // size, BLOCK_N=block_n, num_warps=num_warps,
    )  # fmt: skip


def launch_gradient(
    scale: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor, factors: torch.Tensor,
    dlogits: torch.Tensor, scalars: tuple[float, ...], flags: dict[str, bool], block_n: int, num_warps: int,
) -> None:  # fmt: skip
    """dlogits of a contiguous matrix into an `empty_line`; rows must be wider than `block_n`."""
    launch(
        _bwd_kernel, (triton.cdiv(logits.numel(), block_n),), scale, logits, target, class_weight, factors, dlogits, *logits.shape,
        scale.stride(0) if scale.dim() else 0, *scalars, **flags, GROUP=16 // logits.element_size(), BLOCK=block_n, num_warps=num_warps,
    )  # fmt: skip
