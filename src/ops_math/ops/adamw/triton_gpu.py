"""Triton kernels for NVIDIA and AMD GPUs: every tensor of a model in one launch, through a table of addresses.

`_prepare_kernel` moves the step counts and works out, in fp64 and once a tensor, what the update needs of them. `_step_kernel` runs one
program a chunk: it looks up which tensor the chunk belongs to, reads parameter, gradient and both averages once and writes what
changed. Tensors of one kind (dtypes, alignment) share a launch; `op_tables.py` builds the tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ops_math.backends.launch import launch
from ops_math.ops._tiles.philox import philox_tile
from ops_math.ops.adamw.problem import AdamWProblem
from ops_math.spec import Device, cdiv

# Columns of the tables; `op_tables.py` fills them. A row of addresses is one cache line, a row of scalars one sector of it.
ADDRESS_COLUMNS = tl.constexpr(16)
PARAM, EXP_AVG, EXP_AVG_SQ, MASTER, STEP, SIZE, GROUP, NUMBER = (tl.constexpr(i) for i in range(8))
SCALAR_COLUMNS = tl.constexpr(8)
STEP_SIZE, ROOT, DECAY, EPS, RATE1, RATE2, FACTOR, COUNT = (tl.constexpr(i) for i in range(8))
HYPER_COLUMNS = tl.constexpr(8)
LR, LOG_BETA1, LOG_BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2, HYPER_EPS, WEIGHT_DECAY, SIGN = (tl.constexpr(i) for i in range(8))
CALLS = 2
PREPARED = 128  # tensors a program of the first kernel

DTYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


class Config(NamedTuple):
    """Elements a tile, tiles a chunk (one program), warps."""

    block: int
    tiles: int
    num_warps: int

    @property
    def chunk(self) -> int:
        """Elements a program."""
        return self.block * self.tiles


def supports(p: AdamWProblem, device: Device, phase: str = "step") -> str | None:
    """Any mixture of fp32, bf16 and fp16, but not amsgrad."""
    if "fp64" in (p.param, p.grad, p.state):
        return "has no fp64 kernel"
    if p.amsgrad:
        return "has no amsgrad"
    return None if p.dense else "needs a parameter and its averages without gaps and of equal strides"


def configs(p: AdamWProblem, device: Device, phase: str = "step") -> tuple[Config, ...]:
    """Eight elements a thread (16 bytes of bf16); up to 2 tiles a program, served by one look-up, while 16 programs a core are left.

    Small chunks win: an H200 moves 4,229 GB/s with 2 tiles of 512, 4,067 with 16 (1.2 billion bf16 parameters, 2026-11-29).
    """
    found = []
    lanes = 64 if device.kind == "hip" else 32
    for num_warps, per_thread in ((2, 8), (4, 8), (4, 4), (8, 4)):
        block, tiles = per_thread * lanes * num_warps, 2
        while tiles > 1 and p.num_elements < 16 * device.num_cores * block * tiles:
            tiles //= 2
        found.append(Config(block, tiles, num_warps))
    return tuple(found)


@triton.jit
def _prepare_kernel(addresses_ptr, hyper_ptr, grad_scale_ptr, clip_ptr, found_inf_ptr, scalars_ptr, num_tensors, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_tensors
    row_ptr = addresses_ptr + rows * ADDRESS_COLUMNS
    out_ptr = scalars_ptr + rows * SCALAR_COLUMNS

    step_ptr = tl.load(row_ptr + STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    hyper_ptr += tl.load(row_ptr + GROUP, mask=mask, other=0) * HYPER_COLUMNS
    changes = tl.zeros([BLOCK], tl.float32) + tl.load(found_inf_ptr) == 0.0
    factor = tl.load(clip_ptr).to(tl.float64) / tl.load(grad_scale_ptr).to(tl.float64)
    lr = tl.load(hyper_ptr + LR)

    count = tl.load(step_ptr, mask=mask, other=1.0) + 1.0
    t = count.to(tl.float64)
    correction1 = 1.0 - tl.exp(t * tl.load(hyper_ptr + LOG_BETA1))
    correction2 = 1.0 - tl.exp(t * tl.load(hyper_ptr + LOG_BETA2))

    tl.store(step_ptr, count, mask=mask & changes)
    tl.store(out_ptr + STEP_SIZE, (lr / correction1).to(tl.float32), mask=mask)
    tl.store(out_ptr + ROOT, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=mask)
    tl.store(out_ptr + DECAY, (lr * tl.load(hyper_ptr + WEIGHT_DECAY)).to(tl.float32), mask=mask)
    tl.store(out_ptr + EPS, tl.load(hyper_ptr + HYPER_EPS).to(tl.float32), mask=mask)
    tl.store(out_ptr + RATE1, tl.load(hyper_ptr + ONE_MINUS_BETA1).to(tl.float32), mask=mask)
    tl.store(out_ptr + RATE2, tl.load(hyper_ptr + ONE_MINUS_BETA2).to(tl.float32), mask=mask)
    tl.store(out_ptr + FACTOR, (factor * tl.load(hyper_ptr + SIGN)).to(tl.float32), mask=mask)
    tl.store(out_ptr + COUNT, tl.where(changes, count, 0.0), mask=mask)


@triton.jit
def _pointer(address_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address that stands in a table, as a pointer."""
    pointer = tl.load(address_ptr).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _stochastic_tile(value, words, SHIFT: tl.constexpr):
    """fp32 rounded to bf16, up with the probability of the part that is cut off: 16 bits of the word are added to it, and what does not
    carry is dropped. NaN goes the other way, since the carry could run through its bits."""
    noise = ((words >> SHIFT) & 0xFFFF).to(tl.int32)
    bits = (value.to(tl.int32, bitcast=True) + noise) & -65536
    finite = tl.abs(value) < float("inf")
    return tl.where(finite, bits.to(tl.float32, bitcast=True), value).to(tl.bfloat16)


@triton.jit
def _words_tile(key_ptr, number, count, first, BLOCK: tl.constexpr):
    """A random word for each of BLOCK elements from `first`, a multiple of 4: the words of `eager.uniform_words`."""
    seed, offset, first_row = tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    groups = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    row, stream = (number + first_row).to(tl.uint32), offset.to(tl.uint32)
    w0, w1, w2, w3 = philox_tile(seed, groups, zero + row, zero + count.to(tl.uint32), zero + stream)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def _update_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, size, root, decay, eps, rate1, rate2, factor, count, number, key_ptr, first, left,
    MASTER_COPY: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one tensor: elements from `first`, of which `left` are there where MASKED. Pointers are those of the tensor's start."""
    places = tl.arange(0, BLOCK)
    mask = places < left if MASKED else None

    g = tl.load(g_ptr + first + places, mask=mask).to(tl.float32)
    m = tl.load(m_ptr + first + places, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + first + places, mask=mask).to(tl.float32)
    if MASTER_COPY:
        p = tl.load(w_ptr + first + places, mask=mask)
    else:
        p = tl.load(p_ptr + first + places, mask=mask).to(tl.float32)

    g = g * factor
    m += rate1 * (g - m)  # a gain of exactly 1, which beta and 1 - beta, each rounded, do not have
    v += rate2 * (g * g - v)
    p -= decay * p + size * tl.div_rn(m, tl.sqrt_rn(v) * root + eps)

    new_v = v.to(v_ptr.dtype.element_ty)
    new_p = p.to(p_ptr.dtype.element_ty)
    if STOCHASTIC:
        words = _words_tile(key_ptr, number, count, first, BLOCK)
        new_p = _stochastic_tile(p, words, 0)
        if v_ptr.dtype.element_ty == tl.bfloat16:
            new_v = _stochastic_tile(v, words, 16)
    tl.store(p_ptr + first + places, new_p, mask=mask)
    tl.store(m_ptr + first + places, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + first + places, new_v, mask=mask)
    if MASTER_COPY:
        tl.store(w_ptr + first + places, p, mask=mask)


@triton.jit
def _step_kernel(
    chunks_ptr, addresses_ptr, gradients_ptr, scalars_ptr, key_ptr,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    MASTER_COPY: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(chunks_ptr + 2 * chunk)
    first = tl.load(chunks_ptr + 2 * chunk + 1).to(tl.int64) * (BLOCK * TILES)
    row_ptr = addresses_ptr + tensor * ADDRESS_COLUMNS
    scalar_ptr = scalars_ptr + tensor * SCALAR_COLUMNS

    p_ptr = _pointer(row_ptr + PARAM, P, ALIGNED)
    g_ptr = _pointer(gradients_ptr + tensor, G, ALIGNED)
    m_ptr = _pointer(row_ptr + EXP_AVG, S, ALIGNED)
    v_ptr = _pointer(row_ptr + EXP_AVG_SQ, S, ALIGNED)
    w_ptr = _pointer(row_ptr + MASTER, tl.float32, ALIGNED)
    left = tl.minimum(tl.load(row_ptr + SIZE) - first, BLOCK * TILES).to(tl.int32)
    number = tl.load(row_ptr + NUMBER)
    size, root, decay, eps = (
        tl.load(scalar_ptr + STEP_SIZE),
        tl.load(scalar_ptr + ROOT),
        tl.load(scalar_ptr + DECAY),
        tl.load(scalar_ptr + EPS),
    )
    rate1, rate2, factor = tl.load(scalar_ptr + RATE1), tl.load(scalar_ptr + RATE2), tl.load(scalar_ptr + FACTOR)
    count = tl.load(scalar_ptr + COUNT)

    if count > 0.0:  # 0 where a scaler found an infinity: nothing is read, nothing written
        for _ in range(left // BLOCK):
            _update_tile(
                p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, size, root, decay, eps, rate1, rate2, factor, count, number, key_ptr, first, BLOCK,
                MASTER_COPY, STOCHASTIC, False, BLOCK,
            )  # fmt: skip
            first += BLOCK
        rest = left % BLOCK
        if rest > 0:  # a mask would make every access narrow, so only the last tile has one
            _update_tile(
                p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, size, root, decay, eps, rate1, rate2, factor, count, number, key_ptr, first, rest,
                MASTER_COPY, STOCHASTIC, True, BLOCK,
            )  # fmt: skip


def launch_prepare(
    addresses: torch.Tensor,
    hyper: torch.Tensor,
    grad_scale: torch.Tensor,
    clip: torch.Tensor,
    found_inf: torch.Tensor,
    scalars: torch.Tensor,
) -> None:
    """Count the step and fill `scalars` [T, 8] for the T tensors of `addresses` [T, 16]; three scalars stand at 1, 1, 0 where unused."""
    count = addresses.shape[0]
    grid = (cdiv(count, PREPARED),)
    launch(_prepare_kernel, grid, addresses, hyper, grad_scale, clip, found_inf, scalars, count, BLOCK=PREPARED)


def launch_step(
    p: AdamWProblem,
    config: Config,
    chunks: torch.Tensor,
    addresses: torch.Tensor,
    gradients: torch.Tensor,
    scalars: torch.Tensor,
    key: torch.Tensor,
) -> None:
    """Update every chunk of `chunks` [C, 2]: (tensor, number of the chunk in it); the tensors are those of the addresses."""
    launch(
        _step_kernel, (chunks.shape[0],), chunks, addresses, gradients, scalars, key,
        P=DTYPES[p.param], G=DTYPES[p.grad], S=DTYPES[p.state], MASTER_COPY=p.master, STOCHASTIC=p.stochastic, ALIGNED=p.aligned,
        BLOCK=config.block, TILES=config.tiles, num_warps=config.num_warps,
    )  # fmt: skip
