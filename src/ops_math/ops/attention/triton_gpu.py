"""Triton implementation for NVIDIA and AMD GPUs: configurations and launches; the kernels are in triton_gpu_fwd and triton_gpu_bwd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ops_math.backends.launch import launch
from ops_math.layout import copied
from ops_math.ops.attention.problem import AttentionProblem, cost, gradients
from ops_math.ops.attention.triton_gpu_bwd import _bwd_dkdv_kernel, _bwd_dq_kernel, _prepare_kernel
from ops_math.ops.attention.triton_gpu_drop import Bits, bits_view, by_bits, draw_bits
from ops_math.ops.attention.triton_gpu_fwd import _fwd_kernel
from ops_math.ops.attention.triton_gpu_masked_bwd import _bwd_dkdv_masked_kernel, _bwd_dq_masked_kernel
from ops_math.ops.attention.triton_gpu_masked_fwd import _fwd_masked_kernel
from ops_math.rng import honoured, threshold
from ops_math.spec import ITEM_SIZE, Device, cdiv, next_power_of_2

WIDEST = 256
UNIT = 8  # elements: kernels take strides in these, as head widths are multiples of it
NO_BOUND = 2**30  # where the kernels with masks take a window bound as a number
REST = 32  # rows at a time of those that fill no tile
MARGIN = 2048  # shared memory [B] left for barriers and for exchanging results between warps


class Tile(NamedTuple):
    """One kernel's configuration.

    Queries and keys a tile, warps, stages of the software pipeline; `view`: tiles that stream by come through tensor descriptors (TMA);
    `registers` a thread where the compiler is to take no more (0: as it likes); `vectors`: so do the numbers that each query has.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    view: bool = False
    registers: int = 0
    vectors: bool = False


class Backward(NamedTuple):
    """The two kernels of the backward: dK and dV, and dQ."""

    dkdv: Tile
    dq: Tile


# Best guess first. Keys: kernel and padded head width. Hopper and newer, older NVIDIA GPUs, AMD (all 16-bit), and fp32.
HOPPER = {  # in the order that an H200 measured on causal and full attention of 512 to 16,384 queries (torch 2.11, 2026-11-29)
    ("fwd", 64): (Tile(64, 128, 4, 2, True), Tile(64, 64, 4, 3, True), Tile(64, 64, 4, 2, True), Tile(128, 64, 4, 3, True),
        Tile(128, 128, 4, 3, True)),
    ("fwd", 128): (Tile(128, 64, 4, 2, True), Tile(128, 128, 8, 3, True), Tile(64, 64, 4, 3, True), Tile(64, 128, 4, 2, True),
        Tile(128, 64, 8, 3)),
    ("fwd", 256): (Tile(128, 64, 8, 2, True), Tile(64, 64, 4, 2, True), Tile(128, 32, 8, 3, True)),
    ("dkdv", 64): (Tile(64, 64, 4, 3, True, 168), Tile(64, 64, 4, 3, True), Tile(32, 64, 4, 3, True, 128),
        Tile(64, 64, 4, 2, True), Tile(64, 128, 8, 3, True)),
    ("dkdv", 128): (Tile(64, 64, 4, 2, True), Tile(64, 128, 8, 2, True), Tile(64, 128, 8, 3, True), Tile(32, 128, 8, 3, True),
        Tile(128, 64, 8, 2, True)),
    ("dkdv", 256): (Tile(32, 32, 8, 2, True), Tile(16, 64, 8, 2, True), Tile(32, 64, 8, 2, True)),
    ("dq", 64): (Tile(64, 64, 4, 3, True), Tile(64, 64, 4, 2, True), Tile(64, 128, 4, 2, True), Tile(128, 64, 8, 3, True),
        Tile(128, 64, 4, 2, True)),
    ("dq", 128): (Tile(64, 64, 4, 2, True), Tile(64, 64, 4, 3, True), Tile(128, 64, 8, 3, True), Tile(64, 128, 4, 1, True),
        Tile(128, 128, 8, 2, True)),
    ("dq", 256): (Tile(64, 32, 8, 2, True), Tile(64, 64, 8, 1, True), Tile(64, 32, 8, 1)),
}  # fmt: skip
BLACKWELL = {("fwd", 256): (Tile(128, 32, 8, 2, True), Tile(64, 64, 8, 2, True))}  # where Hopper's first choice spills
RAGGED = {  # in Hopper's place where a sequence may end inside a tile (H200, documents of 128 to 2,048 tokens, 2026-11-30)
    ("fwd", 64): (Tile(64, 64, 4, 2, True), Tile(64, 64, 4, 3, True), Tile(128, 64, 4, 3, True)),
    ("fwd", 128): (Tile(64, 64, 4, 3, True), Tile(128, 64, 4, 2, True), Tile(128, 128, 8, 3, True)),
    ("dkdv", 64): (Tile(64, 64, 4, 2, True), Tile(64, 64, 4, 3, True), Tile(32, 64, 4, 3, True, 128)),
}
POINTERS = {  # Hopper and newer where tiles cannot come through descriptors
    ("fwd", 64): (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    ("fwd", 128): (Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    ("fwd", 256): (Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
    ("dkdv", 64): (Tile(64, 64, 8, 2), Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)),
    ("dkdv", 128): (Tile(32, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 128, 8, 2), Tile(64, 128, 8, 2)),
    ("dkdv", 256): (Tile(32, 32, 8, 2), Tile(16, 64, 8, 2)),
    ("dq", 64): (Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 3)),
    ("dq", 128): (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("dq", 256): (Tile(64, 32, 8, 2), Tile(64, 64, 8, 1)),
}
AMPERE = {
    ("fwd", 64): (Tile(128, 64, 8, 3), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3)),
    ("fwd", 128): (Tile(128, 64, 8, 2), Tile(128, 32, 4, 3), Tile(64, 64, 4, 2)),
    ("fwd", 256): (Tile(64, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
    ("dkdv", 64): (Tile(32, 128, 8, 2), Tile(64, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("dkdv", 128): (Tile(32, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 128, 8, 1)),
    ("dkdv", 256): (Tile(32, 32, 8, 1), Tile(16, 32, 4, 1)),
    ("dq", 64): (Tile(128, 32, 4, 3), Tile(128, 64, 8, 2), Tile(64, 32, 4, 3)),
    ("dq", 128): (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2), Tile(128, 64, 8, 1)),
    ("dq", 256): (Tile(32, 32, 8, 1), Tile(32, 16, 4, 1)),
}
CDNA = {
    ("fwd", 64): (Tile(64, 64, 4, 1), Tile(128, 64, 4, 1), Tile(64, 32, 4, 1)),
    ("fwd", 128): (Tile(64, 32, 4, 1), Tile(128, 32, 8, 1), Tile(128, 64, 8, 1)),
    ("fwd", 256): (Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    ("dkdv", 64): (Tile(32, 64, 4, 1), Tile(64, 64, 8, 1)),
    ("dkdv", 128): (Tile(32, 64, 8, 1), Tile(32, 32, 4, 1)),
    ("dkdv", 256): (Tile(16, 32, 8, 1), Tile(16, 16, 4, 1)),
    ("dq", 64): (Tile(64, 32, 4, 1), Tile(64, 64, 8, 1)),
    ("dq", 128): (Tile(64, 32, 8, 1), Tile(32, 32, 4, 1)),
    ("dq", 256): (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
}
WIDE = {
    ("fwd", 64): (Tile(64, 32, 4, 1), Tile(32, 32, 4, 2), Tile(64, 32, 8, 1)),
    ("fwd", 128): (Tile(32, 32, 8, 1), Tile(32, 16, 8, 2), Tile(64, 32, 8, 2)),
    ("fwd", 256): (Tile(32, 16, 8, 1), Tile(16, 16, 4, 1)),
    ("dkdv", 64): (Tile(32, 32, 8, 1), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1)),
    ("dkdv", 128): (Tile(16, 16, 8, 1), Tile(16, 32, 8, 1), Tile(32, 32, 8, 1)),
    ("dkdv", 256): (Tile(16, 16, 8, 1),),
    ("dq", 64): (Tile(32, 32, 8, 1), Tile(32, 32, 4, 2), Tile(32, 16, 4, 1)),
    ("dq", 128): (Tile(32, 16, 8, 2), Tile(16, 16, 8, 2), Tile(16, 16, 8, 1)),
    ("dq", 256): (Tile(16, 16, 8, 1),),
}
# The kernels with masks and dropout need registers for those: smaller tiles, on every NVIDIA GPU.
MASKED = {
    ("fwd", 64): (Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 8, 2)),
    ("fwd", 128): (Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("fwd", 256): (Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    ("dkdv", 64): (Tile(32, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("dkdv", 128): (Tile(32, 64, 8, 2), Tile(32, 128, 8, 2), Tile(32, 64, 8, 1)),
    ("dkdv", 256): (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
    ("dq", 64): (Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("dq", 128): (Tile(64, 32, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 1)),
    ("dq", 256): (Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
}
INTERPRETER = {"fwd": Tile(32, 32, 4, 1), "dkdv": Tile(32, 32, 4, 1), "dq": Tile(32, 32, 4, 1)}
# Rates [TFLOP/s] to expect of forward and backward on an H200 (770 TFLOP/s of products), 16-bit, head width above 64 and up to 64.
RATES = ((510.0, 420.0), (360.0, 340.0))


def supports(p: AttentionProblem, device: Device, phase: str) -> str | None:
    """16-bit and fp32, head widths in steps of 8 up to 256; everything else is a feature."""
    if "fp64" in (p.dtype, p.mask):
        return "has no fp64 kernel"
    if p.head_dim % 8 or not 8 <= p.head_dim <= WIDEST:
        return f"takes head widths in steps of 8 from 8 to {WIDEST}"
    return None


def _masked(p: AttentionProblem) -> bool:
    """Whether the kernels that look masks up, or draw inside their loops, are needed."""
    return bool(p.mask or p.key_padding or (p.dropout_p and not by_bits(p)))


def _tiles(p: AttentionProblem, device: Device, kernel: str) -> tuple[Tile, ...]:
    """Tiles that fit the device's shared memory, best guess first; the smallest one where none does."""
    if device.kind == "interpreter":
        return (INTERPRETER[kernel],)
    width, item = max(64, _block_d(p)), ITEM_SIZE[p.dtype]
    listed = _table(p, device)[kernel, width]
    if listed[0].view and _ragged(p) and (kernel, width) in RAGGED:
        listed = RAGGED[kernel, width]
    if listed[0].view and int(device.arch) >= 100 and (kernel, width) in BLACKWELL:
        listed = BLACKWELL[kernel, width]
    if kernel == "dkdv" and device.kind == "cuda" and int(device.arch) >= 90:
        listed = tuple(t._replace(vectors=True) for t in listed)
    if kernel == "dkdv" and width == 64 and p.dropout_p and device.kind == "cuda":  # else ptxas (3.9) spills to fit 2 x 256 threads
        listed = tuple(t._replace(registers=248) if t.num_warps == 8 and not t.registers else t for t in listed)
    if p.mask:  # whose rows may begin anywhere, so that each value is a load of its own: few a thread first
        listed = tuple(sorted(listed, key=lambda t: t.block_m * t.block_n // t.num_warps))
    fitting = tuple(t for t in listed if _shared_bytes(t, kernel, width, item) <= device.shared_bytes - MARGIN)
    return fitting or (min(listed, key=lambda t: _shared_bytes(t, kernel, width, item)),)


def _table(p: AttentionProblem, device: Device) -> dict[tuple[str, int], tuple[Tile, ...]]:
    if p.dtype == "fp32":
        return WIDE
    if device.kind == "hip":
        return CDNA
    if _masked(p):
        return MASKED
    if int(device.arch) < 90:
        return AMPERE
    return HOPPER if _block_d(p) == p.head_dim else POINTERS


def _ragged(p: AttentionProblem) -> bool:
    """Whether a sequence may end inside a tile."""
    return p.documents >= 0 or bool(p.q_len % 128 or p.k_len % 128)


def _shared_bytes(t: Tile, kernel: str, width: int, item: int) -> int:
    """Tiles held in shared memory: what stays, and what streams by in stages."""
    stays = {"fwd": t.block_m, "dkdv": 2 * t.block_n, "dq": 2 * t.block_m}[kernel]
    streams = 2 * t.num_stages * (t.block_m if kernel == "dkdv" else t.block_n)
    return (stays + streams) * width * item


def configs(p: AttentionProblem, device: Device, phase: str) -> tuple[Tile, ...] | tuple[Backward, ...]:
    """Tiles, best guess first. The backward's two kernels are independent: configuration i takes choice i of each, or its first."""
    if phase == "fwd":
        return _tiles(p, device, "fwd")
    dkdv, dq = _tiles(p, device, "dkdv"), _tiles(p, device, "dq")
    return tuple(Backward(dkdv[i if i < len(dkdv) else 0], dq[i if i < len(dq) else 0]) for i in range(max(len(dkdv), len(dq))))


def predict_us(p: AttentionProblem, device: Device, phase: str) -> float:
    """From the rates above in proportion to the device's products; fp32 products at a sixteenth (ieee) or a half (tf32) of 16-bit."""
    rate = RATES[p.head_dim <= 64][phase == "bwd"] * device.product_tflops / 770.0
    if p.dtype == "fp32":
        rate /= 16.0 if p.products == "ieee" else 2.0
    return cost(p, phase).total_flops / (rate * 1e6) + (1 if phase == "fwd" else 3) * device.launch_us


def _block_d(p: AttentionProblem) -> int:
    return max(16, next_power_of_2(p.head_dim))


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, sequence and head, in units of 8 elements."""
    return (x.stride(0) // UNIT if x.dim() == 4 else 0, x.stride(-3) // UNIT, x.stride(-2) // UNIT)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies; a copy only where the last dimension has a stride, or another one that is no multiple of 8."""
    steps = all(n == 1 or step % UNIT == 0 for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    return x if x.stride(-1) == 1 and steps else copied(x.contiguous(), "an operand of attention", "its strides are not multiples of 8")


def _num_tiles(p: AttentionProblem, length: int, block: int) -> int:
    """Tiles of a sequence; with documents, as many as they may need whatever their lengths are."""
    return cdiv(length, block) if p.documents < 0 else length // block + p.documents


def _views(p: AttentionProblem, wanted: bool, rows: int, *streams: torch.Tensor) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of the tensors that stream by, [rows, heads x D] as they lie, or None for each where one has no such shape.

    That needs a batch that follows its neighbour, 16-byte steps, places in 32 bits and a head as wide as its tile. Kernels with masks take
    none.
    """
    if _masked(p):
        return ()
    if not (wanted and _block_d(p) == p.head_dim and all(_describable(x) for x in streams)):
        return (None,) * len(streams)
    return tuple(TensorDescriptor(x, list(_spans(x)), [x.stride(-3), 1], [rows, p.head_dim]) for x in streams)


def _vectors(p: AttentionProblem, t: Tile, *vectors: torch.Tensor) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of what holds one number a query, where the tile's device has them and tiles begin at multiples of 16 bytes."""
    if not t.vectors or p.documents >= 0 or p.q_len % 4 or p.batch * p.heads * p.q_len >= 2**31 or p.empty:
        return (None,) * len(vectors)
    return tuple(TensorDescriptor(x.view(-1), [x.numel()], [1], [t.block_m]) for x in vectors)


def _spans(x: torch.Tensor) -> tuple[int, int]:
    """Rows of all sequences, and elements from the first one of a row's first head to the last one of its last head."""
    return x.shape[-3] * (x.shape[0] if x.dim() == 4 else 1), (x.shape[-2] - 1) * x.stride(-2) + x.shape[-1]


def _describable(x: torch.Tensor) -> bool:
    """Heads that lie one behind the other are a span of the whole tensor: 128 of width 128 leave 32 bits at 132,105 tokens. Rows that are
    one and the same, as in the gradient of a sum over them, are no matrix in memory."""
    follows = x.dim() == 3 or x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    counted = max(_spans(x)) < 2**31 and x.stride(-3) > 0
    return follows and counted and x.numel() > 0 and x.data_ptr() % 16 == 0 and x.stride(-3) * x.element_size() % 16 == 0


def _features(p: AttentionProblem, views: tuple[object, ...], length: int, block: int) -> dict[str, object]:
    """`length` of the sequences that stream by, in tiles of `block`: what a descriptor reads past their ends is the next one's."""
    view = None not in views
    rest = min(block, REST) if view and (p.documents >= 0 or length % block) else 0
    own: dict[str, object] = {"LEFT": p.left >= 0, "RIGHT": p.right >= 0, "VIEW": view, "REST": rest}
    if _masked(p):
        own = {"MASK": 0 if not p.mask else 1 if p.mask == "bool" else 2, "PADDING": p.key_padding, "DROPOUT": p.dropout_p > 0}
    shared = {
        "SOFTCAP": p.softcap > 0,
        "PACKED": p.documents >= 0,
        "WIDTH": p.head_dim,
        "BLOCK_D": _block_d(p),
        "PRECISION": p.products or "tf32",
    }
    return {**own, **shared}


def _sizes(p: AttentionProblem) -> tuple[int, ...]:
    """Heads, heads a key head, lengths, documents, steps of the bisection over documents."""
    return p.heads, p.group, p.q_len, p.k_len, max(p.documents, 0), max(p.documents, 0).bit_length()


class _Lookup(NamedTuple):
    """What hides and drops scores, in the order in which the kernels of the problem take it."""

    pointers: tuple[torch.Tensor | None, ...]
    strides: tuple[int, ...]
    scalars: tuple[float, ...]


def _lookup(
    p: AttentionProblem, q: torch.Tensor, mask: torch.Tensor | None, keep: torch.Tensor | None, cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None, state: torch.Tensor | None, bits: Bits,
) -> _Lookup:  # fmt: skip
    scalars = (p.scale, p.softcap, int(p.bottom_right))
    if not _masked(p):
        return _Lookup((cu_q, cu_k), (), (*scalars, p.left, p.right, *bits[1:]))
    seen = q if mask is None else mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    kept = q if keep is None else keep.view(torch.uint8)
    strides = (mask.stride() if mask is not None else (0,) * 4) + (keep.stride() if keep is not None else (0,) * 2)
    bounds = (p.left if p.left >= 0 else NO_BOUND, p.right if p.right >= 0 else NO_BOUND)
    return _Lookup(
        (seen, kept, cu_q, cu_k, state), strides, (*scalars, *bounds, threshold(p.dropout_p), 1.0 / (1.0 - honoured(p.dropout_p)))
    )


def launch_fwd(
    p: AttentionProblem, config: Tile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lookups: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out, contiguous, and lse [B, H, Sq] or [H, T]."""
    q, k, v = _unit(q), _unit(k), _unit(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((*q.shape[:-3], p.heads, p.q_len), dtype=torch.float32, device=q.device)
    bits = draw_bits(p, q, lookups[-1])
    tiles, extra = _num_tiles(p, p.q_len, config.block_m), _lookup(p, q, *lookups, bits)
    views = _views(p, config.view, config.block_n, k, v)
    launch(
        _fwd_masked_kernel if _masked(p) else _fwd_kernel, (tiles * p.heads * p.batch,), q, k, v, *views,
        *_drawn(p, bits, config, views), *extra.pointers, out, lse, tiles, *_sizes(p),
        *_strides(q), *_strides(k), *_strides(v), *extra.strides, *extra.scalars,
        **_features(p, views, p.k_len, config.block_n), **_shape(config),
    )  # fmt: skip
    return out, lse


def launch_bwd(
    p: AttentionProblem, config: Backward, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, *lookups: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk, dv, or the gradient of one projection, written through strides."""
    q, k, v, dout = _unit(q), _unit(k), _unit(v), _unit(dout)
    results, (dq, dk, dv) = gradients(p, q, k, v)
    delta, offset = torch.empty((2, *lse.shape), dtype=torch.float32, device=q.device)
    bits = draw_bits(p, q, lookups[-1])
    num_rows, width, extra = p.batch * p.q_len * p.heads, _block_d(p), _lookup(p, q, *lookups, bits)
    block = max(1, 8192 // width)
    launch(
        _prepare_kernel, (cdiv(num_rows, block),), dout, out, lse, delta, offset, num_rows, p.q_len, p.heads, *_strides(dout),
        1.0 / bits.raised, WIDTH=p.head_dim, BLOCK_D=width, BLOCK_M=block, num_warps=4,
    )  # fmt: skip
    inputs = (dout, q, k, v, offset, delta)
    strides = (*_strides(dout), *_strides(q), *_strides(k), *_strides(v), *extra.strides)
    if p.need_dk or p.need_dv:
        tiles = _num_tiles(p, p.k_len, config.dkdv.block_n)
        dk, dv = (x if x.dim() > 1 else torch.empty(k.shape, dtype=k.dtype, device=k.device) for x in (dk, dv))
        views, vectors = _views(p, config.dkdv.view, config.dkdv.block_m, q, dout), _vectors(p, config.dkdv, offset, delta)
        launch(
            _bwd_dkdv_masked_kernel if _masked(p) else _bwd_dkdv_kernel, (tiles * p.kv_heads * p.batch,), *inputs, *views, *vectors,
            *_drawn(p, bits, config.dkdv, views), *extra.pointers, dk, dv, tiles, *_sizes(p), *strides, *_strides(dk), *_strides(dv),
            *extra.scalars, **_features(p, views, p.q_len, config.dkdv.block_m), ROWS=vectors[0] is not None,
            **_shape(config.dkdv),
        )  # fmt: skip
    if p.need_dq:
        tiles = _num_tiles(p, p.q_len, config.dq.block_m)
        views = _views(p, config.dq.view, config.dq.block_n, k, v)
        launch(
            _bwd_dq_masked_kernel if _masked(p) else _bwd_dq_kernel, (tiles * p.heads * p.batch,), *inputs, *views,
            *_drawn(p, bits, config.dq, views), *extra.pointers, dq, tiles, *_sizes(p), *strides, *_strides(dq), *extra.scalars,
            **_features(p, views, p.k_len, config.dq.block_n), **_shape(config.dq),
        )  # fmt: skip
    return results


def _drawn(p: AttentionProblem, bits: Bits, t: Tile, views: tuple[object, ...]) -> tuple[object, ...]:
    """What the kernels without masks read decisions from: a pointer and a descriptor, or None for each."""
    if _masked(p):
        return ()
    return bits.words, bits_view(bits, t.block_n, t.block_m, None not in views)


def _shape(t: Tile) -> dict[str, int]:
    return {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "num_warps": t.num_warps, "num_stages": t.num_stages, "registers": t.registers}
