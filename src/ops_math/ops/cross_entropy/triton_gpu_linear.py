"""The linear layer and its loss on a GPU: cuBLAS products by chunks, and Triton kernels that turn logits into their gradient in place.

Where gradients are computed in the forward, a chunk is some rows with the whole vocabulary: three products a chunk, and the weight's
gradient is added up in fp32. Where they are computed in the backward, from factors, a chunk is all rows with a slice of the vocabulary:
a slice's weight gradient is one product, rounded once, and no fp32 copy of the weight exists.

Roundings are those of eager_linear. Where a PyTorch cannot multiply 16-bit operands into fp32, products are rounded to 16 bits before
they are added in fp32. A vocabulary that is not a multiple of `vocab_multiple` is padded in a working copy of the weight: cuBLAS
multiplies [16384, 1024] with 30,522 columns at 259 TFLOP/s and with 30,528 at 690 (H200, bf16, 2026-11-29).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math import features
from ops_math.backends.launch import launch
from ops_math.layout import as_rows, copied, dense
from ops_math.ops._tiles.class_target import read_target, reference_of, row_results
from ops_math.ops._tiles.log_sum_exp import lane_finish, soft_capped, tanh
from ops_math.ops.cross_entropy import triton_gpu as kernels
from ops_math.ops.cross_entropy.eager_linear import factor_of, finish, row_scales
from ops_math.ops.cross_entropy.problem_linear import LinearCrossEntropyProblem
from ops_math.ops.cross_entropy.triton_gpu import visit
from ops_math.spec import DTYPE_OF, ITEM_SIZE, Device, cdiv

PASSES = 1.2
CALLS = 20
CHUNK_BYTES = 2**28  # of logits at least, if there are as many rows: below, adding the weight's gradient up costs as much as the product
SLICE_BYTES = 2**26  # of logits of all rows and a slice of the vocabulary: [16384, 2048] x 128,256 then needs 0.2 GiB beside its gradients
LOSS_BYTES = 2**27  # of logits where only the loss is computed
SCALED = 4096  # values a program
ADDED_ROWS = 8192  # rows of the weight's gradient added at a time where addmm cannot add to fp32


class Config(NamedTuple):
    """Rows a chunk (gradients in the forward, or loss only), columns a slice (gradients in the backward), the multiple that the
    vocabulary is padded to, whether one kernel makes loss and gradient in one visit of a row, its tile and warps."""

    chunk_rows: int
    slice_cols: int
    vocab_multiple: int
    one_visit: bool
    block_n: int
    num_warps: int


def supports(p: LinearCrossEntropyProblem, device: Device, phase: str) -> str | None:
    """fp64 has no kernel; everything else does."""
    if "fp64" in (p.store, p.weight, p.bias, p.class_weight):
        return "has no fp64 kernel"
    return None


def _rounded(n: int, multiple: int) -> int:
    return max(multiple, n // multiple * multiple)


def _even(total: int, most: int) -> int:
    """A chunk of at most about `most` rows such that all chunks are equal to within 128."""
    count = -(-total // most)
    return max(128, -(-total // max(count, 1) // 128) * 128)


def configs(p: LinearCrossEntropyProblem, device: Device, phase: str) -> tuple[Config, ...]:
    """Chunks as large as the weight in 16 bits, which takes their place when the gradient is rounded, so that they do not count."""
    row, hip = p.cols * ITEM_SIZE[p.store], device.kind == "hip"
    if p.when == "forward":
        rows = _rounded(max(CHUNK_BYTES, p.cols * p.hidden * ITEM_SIZE[p.store]) // row, 128)
    else:
        rows = _rounded(LOSS_BYTES // row, 128)
    rows = _even(p.rows, rows)
    cols = _rounded(SLICE_BYTES // max(1, p.rows * ITEM_SIZE[p.store]), 512)
    tile = (8192, 8 if hip else 16) if p.cols > 4096 else (4096, 4)
    first = Config(rows, cols, 64, False, *tile)
    others = [first._replace(one_visit=True), first._replace(vocab_multiple=8), first._replace(vocab_multiple=1)]
    others += [
        first._replace(chunk_rows=_rounded(rows // 2, 128)),
        first._replace(chunk_rows=rows * 2),
        first._replace(slice_cols=cols * 2),
    ]
    return tuple(dict.fromkeys([first, *others]))


@triton.jit
def _loss_gradient_kernel(
    logits_ptr, target_ptr, class_weight_ptr, weight_sum_ptr, loss_ptr, factors_ptr, divisor_ptr, num_cols, num_stored, logits_stride,
    ignore_index, smoothing, smooth, z_loss, softcap,
    HAS_WEIGHT: tl.constexpr, SMOOTHING: tl.constexpr, HAS_CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    LANES: tl.constexpr = BLOCK_N // GROUP
    offsets = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]

    target = tl.load(target_ptr + row)
    kept, index, one = read_target(target, num_cols, ignore_index)
    weight = one
    if HAS_WEIGHT:
        weight = one * tl.load(class_weight_ptr + index).to(tl.float32)
    z_target = tl.load(logits_ptr + index).to(tl.float32)  # before the row is overwritten: lane_finish waits for all threads
    if HAS_CAP:
        z_target = soft_capped(z_target, softcap)

    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    smooth_lanes = tl.zeros([LANES], tl.float32)
    reference = reference_of(z_target)
    read = tl.where(kept, num_cols, 0)  # an ignored row is not read
    first = index.to(tl.int32) // BLOCK_N * BLOCK_N  # the target's tile goes first, so that no other one looks for it
    top, total, smooth_lanes = visit(
        logits_ptr, class_weight_ptr, first + offsets, read, index.to(tl.int32), reference, softcap, top, total, smooth_lanes,
        HAS_WEIGHT, SMOOTHING, HAS_CAP, "evict_last",
    )  # fmt: skip
    for start in range(0, read - BLOCK_N, BLOCK_N):
        cols = tl.where(start < first, start, start + BLOCK_N) + offsets
        top, total, smooth_lanes = visit(
            logits_ptr, class_weight_ptr, cols, read, None, reference, softcap, top, total, smooth_lanes,
            HAS_WEIGHT, SMOOTHING, HAS_CAP, "evict_last",
        )  # fmt: skip
    row_top, below, others = lane_finish(top, total, z_target)
    smooth_total, smooth_sum = smoothing, tl.sum(smooth_lanes, 0)
    if SMOOTHING:
        if HAS_WEIGHT:
            smooth_total = smooth * tl.load(weight_sum_ptr).to(tl.float32)
    loss, row_top, on_other, on_target = row_results(
        row_top, below, others, smooth_sum, smooth_total, kept, weight, one, smoothing, smooth, z_loss, SMOOTHING
    )
    on_all = one * smooth

    num_tiles = tl.cdiv(num_stored, BLOCK_N)
    for i in range(num_tiles):  # from the end, which the caches still hold
        cols = (num_tiles - 1 - i) * BLOCK_N + offsets
        z = tl.load(logits_ptr + cols, mask=cols < read, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if HAS_CAP:
            t = tanh(z / softcap)
            z = softcap * t
        dz = tl.where(cols == index.to(tl.int32), on_target, tl.exp(z - row_top) * on_other)
        if SMOOTHING:
            if HAS_WEIGHT:
                dz -= on_all * tl.load(class_weight_ptr + cols, mask=cols < read, other=0.0).to(tl.float32)
            else:
                dz -= on_all
        if HAS_CAP:
            dz *= 1.0 - t * t
        dz = tl.where(cols < read, dz, 0.0)
        tl.store(logits_ptr + cols, dz.to(logits_ptr.dtype.element_ty), mask=cols < num_stored)

    tl.store(loss_ptr + row, loss)
    tl.store(factors_ptr + 3 * row, row_top)
    tl.store(factors_ptr + 3 * row + 1, on_other)
    tl.store(factors_ptr + 3 * row + 2, on_target)
    tl.store(divisor_ptr + row, weight)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = a b, with `out` in fp32."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if features.widens("mm", a.device):
        return features.aten("mm", "dtype_out")(a, b, out.dtype, out=out)
    return out.copy_(torch.mm(a, b)) if a.is_cuda else torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _accumulate(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out += a b, with `out` in fp32."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif features.widens("addmm", a.device):
        features.aten("addmm", "dtype_out")(out, a, b, out.dtype, out=out)
    else:
        for part, sums in zip(a.split(ADDED_ROWS), out.split(ADDED_ROWS), strict=True):
            sums.add_(_multiply(part, b, torch.empty_like(sums)))


class _Layer:
    """The operands of the products in the storage dtype; weight and bias padded with zeros to `width` rows."""

    def __init__(
        self, p: LinearCrossEntropyProblem, config: Config, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        self.store, self.x = DTYPE_OF[p.store], as_rows(x)
        self.width = -(-p.cols // config.vocab_multiple) * config.vocab_multiple
        self.weight = self._padded(weight)
        self.bias = None if bias is None else self._padded(bias)

    def _padded(self, t: torch.Tensor) -> torch.Tensor:
        if t.shape[0] == self.width:
            return dense(t.to(self.store), "weight of a loss", "the products read it without gaps")
        made = torch.empty((self.width, *t.shape[1:]), dtype=self.store, device=t.device)
        made[: t.shape[0]].copy_(t)
        made[t.shape[0] :].zero_()
        return copied(made, "weight of a loss", "padded to whole tiles of classes")

    def logits(self, x: torch.Tensor, first: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """x weight^T + bias of the classes first to stop."""
        weight = self.weight[first:stop].t()
        return torch.mm(x, weight, out=out) if self.bias is None else torch.addmm(self.bias[first:stop], x, weight, out=out)


def launch_fwd(
    p: LinearCrossEntropyProblem,
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    num_tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The loss, factors [rows, 3], the divisor of the mean, and (where `when` is forward) dx, dweight, dbias of the sum of losses."""
    layer, target_M = _Layer(p, config, x, weight, bias), target.reshape(-1)
    loss, factors, row_divisor = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (p.rows, (p.rows, 3), p.rows))
    o = kernels.operands(p.loss, class_weight, loss)
    now = p.when == "forward"
    shapes = (
        (p.rows, p.hidden) if p.need_dx else (0,),
        (layer.width, p.hidden) if p.need_dw else (0,),
        (layer.width,) if p.need_db else (0,),
    )
    dx, dw, db = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes)
    if p.rows == 0:
        dw.zero_()
        db.zero_()
    chunk = min(config.chunk_rows, p.rows)
    buffer = torch.empty((chunk, layer.width), dtype=layer.store, device=x.device)
    for start in range(0, p.rows, max(chunk, 1)):
        stop = min(start + chunk, p.rows)
        xs, logits = layer.x[start:stop].to(layer.store), buffer[: stop - start]
        layer.logits(xs, 0, layer.width, logits)
        _loss(p, config, now, logits, target_M[start:stop], o, tuple(t[start:stop] for t in (loss, factors, row_divisor)))
        if p.need_dx:
            _multiply(logits, layer.weight, dx[start:stop])
        if p.need_dw:
            _multiply(logits.t(), xs, dw) if start == 0 else _accumulate(logits.t(), xs, dw)
        if p.need_db:
            torch.sum(logits, 0, dtype=torch.float32, out=db) if start == 0 else db.add_(logits.sum(0, dtype=torch.float32))
    grads = dx, dw[: p.cols], db[: p.cols]
    if p.reduction == "none":
        return loss.view(target.shape), factors, loss.new_empty(0), *grads
    reduced, divisor = kernels.launch_reduce(p.loss, target_M, num_tokens, loss, row_divisor)
    return reduced, factors, divisor, *grads


def _loss(
    p: LinearCrossEntropyProblem,
    config: Config,
    now: bool,
    logits: torch.Tensor,
    target: torch.Tensor,
    o: kernels.Operands,
    per_row: tuple[torch.Tensor, ...],
) -> None:
    """Row losses; and, where wanted now, dlogits of their sum over the logits."""
    if now and config.one_visit:
        launch(
            _loss_gradient_kernel, (logits.shape[0],), logits, target, o.class_weight, o.weight_sum, *per_row,
            p.cols, logits.shape[1], logits.stride(0), *o.scalars,
            **o.flags, GROUP=kernels.lanes(p.store), BLOCK_N=config.block_n, num_warps=config.num_warps,
        )  # fmt: skip
        return
    kernels.launch_rows(p.loss, kernels.row_tile(p.loss), logits, target, o, per_row)
    if now:
        kernels.launch_gradient(p.loss, _pieces(logits.shape[1]), _one(logits), logits, target, per_row[1], logits, o)


@triton.jit
def _scale_kernel(wide_ptr, factor_ptr, out_ptr, num_values, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_values

    value = tl.load(wide_ptr + places, mask=mask) * tl.load(factor_ptr).to(tl.float32)

    tl.store(out_ptr + places, value.to(out_ptr.dtype.element_ty), mask=mask)


def _scaled(wide: torch.Tensor, factor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """out = wide * factor, rounded once; out contiguous. PyTorch's product into another dtype takes three times as long as memory
    would (H200: 1.31 ms for both gradients of [16384, 2048] x [128256, 2048] to bf16)."""
    num_values = wide.numel()
    wide = dense(wide, "gradient of a loss", "it is scaled without regard to rows")
    launch(_scale_kernel, (cdiv(num_values, SCALED),), wide, factor, out, num_values, BLOCK=SCALED, num_warps=8)
    return out


def _one(like: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)


def _pieces(width: int) -> kernels.Config:
    """The element-wise kernel's tile: 4,096 values, 16 a thread."""
    block_n = min(triton.next_power_of_2(width), 4096)
    return kernels.Config(min(4096 // block_n, 128), block_n, 8)


def launch_bwd(
    p: LinearCrossEntropyProblem,
    config: Config,
    dloss: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    factors: torch.Tensor,
    divisor: torch.Tensor | None,
    dx: torch.Tensor | None,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dweight, dbias: those of the forward scaled, or computed anew from recomputed logits, slice by slice of the vocabulary."""
    if p.when == "forward":
        return finish(p, x, dloss, divisor, dx, dweight, dbias, _scaled)
    layer, target_M = _Layer(p, config, x, weight, bias), target.reshape(-1)
    per_row, common = row_scales(p, dloss, target, torch.float32)
    scale = _one(x) if per_row is None else per_row
    factor = factor_of(common, divisor)
    o = kernels.operands(p.loss, class_weight, factors, loss=False)
    xs, width = layer.x.to(layer.store), min(config.slice_cols, layer.width)
    wide_dx = torch.empty((p.rows, p.hidden) if p.need_dx else (0,), dtype=torch.float32, device=x.device)
    out_dw = weight.new_empty((p.cols, p.hidden) if p.need_dw else (0,))
    out_db = x.new_empty((p.cols,) if p.need_db else (0,), dtype=DTYPE_OF[p.bias or p.weight])
    buffer = torch.empty((p.rows, width), dtype=layer.store, device=x.device)
    dw = torch.empty((width, p.hidden) if p.need_dw else (0,), dtype=torch.float32, device=x.device)
    for first in range(0, layer.width, width):
        stop, last = min(first + width, layer.width), min(first + width, p.cols)
        logits = buffer[:, : stop - first]
        layer.logits(xs, first, stop, logits)
        kernels.launch_gradient(p.loss, _pieces(stop - first), scale, logits, target_M, factors, logits, o, first)
        if p.need_dx:
            _multiply(logits, layer.weight[first:stop], wide_dx) if first == 0 else _accumulate(logits, layer.weight[first:stop], wide_dx)
        if p.need_dw and last > first:
            _scaled(_multiply(logits[:, : last - first].t(), xs, dw[: last - first]), factor, out=out_dw[first:last])
        if p.need_db and last > first:
            torch.mul(logits[:, : last - first].sum(0, dtype=torch.float32), factor, out=out_db[first:last])
    out_dx = torch.empty(x.shape if p.need_dx else (0,), dtype=x.dtype, device=x.device)
    if p.need_dx:
        _scaled(wide_dx, factor, out=out_dx)
    return out_dx, out_dw, out_db
