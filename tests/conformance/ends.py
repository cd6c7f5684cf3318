"""Kernels of rows off the 16-byte grid, in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.conformance.ends`.

Prints a JSON object: what is wrong as they stand, and how many checks fail with each fault planted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from ops_math.backends import NAMED
from ops_math.ops._tiles import ends
from ops_math.ops.glu import triton_gpu as glu
from ops_math.ops.glu.problem import GluProblem
from ops_math.ops.layer_norm import eager as layer_eager
from ops_math.ops.layer_norm import triton_gpu as layer
from ops_math.ops.layer_norm import triton_gpu_choice as layer_choice
from ops_math.ops.layer_norm.problem import LayerNormProblem
from ops_math.ops.rms_norm import eager as rms_eager
from ops_math.ops.rms_norm import triton_gpu as rms
from ops_math.ops.rms_norm.problem import RmsNormProblem
from ops_math.ops.softmax import eager as soft_eager
from ops_math.ops.softmax import triton_gpu as soft
from ops_math.ops.softmax.problem import SoftmaxProblem
from ops_math.testing import conformance, interpreter

SMALL = NAMED["h200"]._replace(num_cores=2)  # so that tiles have several rows and programs several tiles
ROWS = 19  # two rows of one place among eight, and three of another
LIMIT = 1e-4  # fp32, widths up to 1,164, gradients of parameters included
WIDTHS = (69, 101, 1164)
# A body of whole blocks, in which no fault writes behind the last row, with more rows than programs and fewer; a body that ends in a block.
WIDE = ((19, 301), (2, 301), (19, 250))
Layout = Callable[[torch.Tensor], torch.Tensor]


def _beside(extra: int, before: int = 0) -> Layout:
    """The same values with NaN beside each row, `extra` columns in all, `before` of them in front."""

    def change(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((t.shape[0], t.shape[1] + extra), float("nan"), dtype=t.dtype)
        wide[:, before : before + t.shape[1]] = t
        return wide[:, before : before + t.shape[1]]

    return change


# Rows apart by a multiple of eight keep the cut; others go value by value.
LAYOUTS: dict[str, Layout] = {"dense": lambda t: t, "same cut": _beside(16), "another cut": _beside(3), "off the grid": _beside(8, 1)}


def _distinct(configs: tuple[Any, ...]) -> list[Any]:
    """Those that differ by more than warps and rows loaded ahead, which an interpreter does not know."""
    return list({c._replace(num_warps=1, **({"num_stages": 1} if hasattr(c, "num_stages") else {})): c for c in configs if c.ends}.values())


def _gap(got: Any, want: Any) -> float:
    got, want = (t if isinstance(t, tuple) else (t,) for t in (got, want))
    gaps = [(a - b).abs().max().item() for a, b in zip(got, want, strict=True) if a.numel() or b.numel()]
    return max(float("inf") if g != g else g for g in gaps)


def _rms(cols: int, change: Layout, add: bool) -> Iterator[tuple[str, float]]:
    problem = RmsNormProblem(ROWS, cols, "fp32", "fp32" if add else "", "fp32", "fp32", 1e-6, 0.5)
    x, residual, dy, dsum = (torch.randn(ROWS, cols) for _ in range(4))
    weight, second, third = torch.randn(cols), residual if add else None, dsum if add else None
    want = rms_eager.launch_fwd(problem, None, x, second, weight)
    total = want[1] if add else x
    gradients = rms_eager.launch_bwd(problem, None, dy, third, total, weight, want[2])
    for config in _distinct(rms._cut_configs(problem, SMALL, "fwd")):
        yield f"fwd {config}", _gap(rms.launch_fwd(problem, config, change(x), change(residual) if add else None, weight), want)
    for config in _distinct(rms._cut_configs(problem, SMALL, "bwd")):
        got = rms.launch_bwd(problem, config, change(dy), change(dsum) if add else None, change(total), weight, want[2])
        yield f"bwd {config}", _gap(got, gradients)


def _layer(cols: int, change: Layout, add: bool) -> Iterator[tuple[str, float]]:
    problem = LayerNormProblem(ROWS, cols, "fp32", "fp32" if add else "", "fp32", "fp32", "", "fp32", 1e-5, 0.0, "fp32" if add else "")
    x, residual, dy, dsum = torch.randn(ROWS, cols) + 2.0, *(torch.randn(ROWS, cols) for _ in range(3))
    weight, bias = torch.randn(cols), torch.randn(cols)
    second, third = residual if add else None, dsum if add else None
    want = layer_eager.launch_fwd(problem, None, x, second, weight, bias, None, None)
    total = want[1] if add else x
    gradients = layer_eager.launch_bwd(problem, None, dy, None, third, total, weight, want[2], want[3], None)
    for config in _distinct(layer_choice._cut_configs(problem, SMALL, "fwd")):
        got = layer.launch_fwd(problem, config, change(x), change(residual) if add else None, weight, bias, None, None)
        yield f"fwd {config}", _gap(got, want)
    for config in _distinct(layer_choice._cut_configs(problem, SMALL, "bwd")):
        third = change(dsum) if add else None
        got = layer.launch_bwd(problem, config, change(dy), None, third, change(total), weight, want[2], want[3], None)
        yield f"bwd {config}", _gap(got, gradients)


def _soft(cols: int, change: Layout, add: bool) -> Iterator[tuple[str, float]]:
    problem = SoftmaxProblem(ROWS, cols, "fp32", "fp32")
    x, dy = torch.randn(ROWS, cols), torch.randn(ROWS, cols)
    want = soft_eager.launch_fwd(problem, None, x)
    gradient = soft_eager.launch_bwd(problem, None, dy, want)
    for config in _distinct(soft.configs(problem, SMALL, "fwd")):
        yield f"fwd {config}", _gap(soft.launch_fwd(problem, config, change(x)), want)
    for config in _distinct(soft.configs(problem, SMALL, "bwd")):
        yield f"bwd {config}", _gap(soft.launch_bwd(problem, config, change(dy), change(want)), gradient)


def numbers(widths: tuple[int, ...], layouts: tuple[str, ...]) -> list[str]:
    """Where results are not those of eager."""
    found = []
    torch.manual_seed(0)
    for name, checks in (("rms_norm", _rms), ("layer_norm", _layer), ("softmax", _soft)):
        for cols in widths:
            for layout in layouts:
                for add in (False, True)[: 1 if name == "softmax" else 2]:
                    for what, gap in checks(cols, LAYOUTS[layout], add):
                        if not gap <= LIMIT:
                            found.append(f"{name} {cols} {layout} {what}: off by {gap:.2g}")
    return found


def neighbours(cols: int) -> list[str]:
    """Whose bytes besides its own rows' a kernel writes: the first row alone, then the last alone, between others that must stay."""
    found = []
    body, width = ends.widths(cols)
    for row in (0, 1, 7):
        x, y = torch.randn(8 + 1, cols), torch.full((8 + 1, cols), 7.0)
        rstd = torch.full((8 + 1,), 7.0)
        rms.cut._fwd_kernel[(8,)](
            x, None, torch.ones(cols), y, None, rstd, row + 1, cols, cols, 0, 1e-6, 0.0, BLOCK_M=1, BLOCK_N=body, ENDS=width, STAGES=1
        )  # fmt: skip
        if not bool((y[row + 1 :] == 7.0).all()) or not bool((rstd[row + 1 :] == 7.0).all()):
            found.append(f"{cols}: behind row {row}")
        if not bool((y[: row + 1] != 7.0).all()):
            found.append(f"{cols}: row {row} or one before it is not whole")
    return found


def _wide_rms(rows: int, cols: int, change: Layout, ahead: int = 1, **options: Any) -> float:
    """How far off a wide backward of eight programs is, which sums the weight's gradient on the way."""
    problem = RmsNormProblem(rows, cols, "fp32", "fp32", "fp32", "fp32", 1e-6, 0.5)
    x, dy, dsum, weight = torch.randn(rows, cols), torch.randn(rows, cols), torch.randn(rows, cols), torch.randn(cols)
    rstd = (x.square().mean(1) + 1e-6).rsqrt()
    want = rms_eager.launch_bwd(problem, None, dy, dsum, x, weight, rstd)
    with conformance.poisoned():
        config = rms.Config(1, 128, 4, 8, ahead, **options)
        return _gap(rms.launch_bwd(problem, config, change(dy), change(dsum), change(x), weight, rstd), want)


def _wide_layer(rows: int, cols: int, change: Layout, ahead: int = 1, **options: Any) -> float:
    """The same of layer_norm, whose rows have a common offset."""
    problem = LayerNormProblem(rows, cols, "fp32", "fp32", "fp32", "fp32", "", "fp32", 1e-5, 0.0, "fp32")
    x, dy, dsum, weight = torch.randn(rows, cols) + 2.0, torch.randn(rows, cols), torch.randn(rows, cols), torch.randn(cols)
    mean, rstd = x.mean(1), (x.var(1, correction=0) + 1e-5).rsqrt()
    want = layer_eager.launch_bwd(problem, None, dy, None, dsum, x, weight, mean, rstd, None)
    with conformance.poisoned():
        config = layer.Config(1, 128, 4, 8, ahead, **options)
        got = layer.launch_bwd(problem, config, change(dy), None, change(dsum), change(x), weight, mean, rstd, None)
        return _gap(got, want)


def on_the_way(sizes: tuple[tuple[int, int], ...]) -> list[str]:
    """Where a wide backward that sums on the way is wrong: more rows than programs, and fewer, whose partial sums are zero."""
    found = []
    for rows, cols in sizes:
        for name, layout in LAYOUTS.items():
            gaps = {
                f"{title}, {ahead} ahead": check(rows, cols, layout, ahead, ends=64, blocks=2)
                for title, check in (("rms_norm", _wide_rms), ("layer_norm", _wide_layer))
                for ahead in (1, 2)  # read again, and kept
            }
            found += [f"{title}, {rows} x {cols}, {name}, cut: off by {gap:.2g}" for title, gap in gaps.items() if not gap <= LIMIT]
        gaps = {
            "rms_norm in memory": _wide_rms(rows, cols, LAYOUTS["dense"], sums_on_the_way=True),
            "rms_norm held": _wide_rms(rows, cols + 3, LAYOUTS["same cut"], 2, blocks=3),
            "rms_norm kept": _wide_rms(rows, cols + 3, LAYOUTS["same cut"], 3, blocks=3),
            "layer_norm held": _wide_layer(rows, cols + 3, LAYOUTS["same cut"], 2, blocks=3),
            "layer_norm kept": _wide_layer(rows, cols + 3, LAYOUTS["same cut"], 3, blocks=3),
            "layer_norm by columns": _wide_layer(rows, cols, LAYOUTS["another cut"], by_columns=True),
        }
        found += [f"{title}, {rows} x {cols}: off by {gap:.2g}" for title, gap in gaps.items() if not gap <= LIMIT]
    return found


def halves() -> list[str]:
    """Where halves of an odd width have other bits by fours than value by value: rows that start at all four places."""
    found = []
    for rows, cols, activation in ((9, 257, "silu"), (4, 259, "gelu_tanh"), (3, 1027, "silu")):
        problem = GluProblem(rows, cols, "fp16", "", "fp16", activation, "halves")
        packed, dy = torch.randn(rows, 2 * cols).half(), torch.randn(rows, cols).half()
        fours = next(c for c in glu.configs(problem, SMALL, "fwd") if c.by_fours)
        plain = fours._replace(by_fours=False)
        with conformance.poisoned():
            forward = [glu.launch_fwd(problem, c, packed, None)[0] for c in (fours, plain)]
            backward = [glu.launch_bwd(problem, c, dy, packed, None, None)[0] for c in (fours, plain)]
        found += [f"{rows} x {cols} {what}" for what, pair in (("fwd", forward), ("bwd", backward)) if not torch.equal(*pair)]
    return found


@triton.jit
def _first_word(ptr, first, lanes, fours):
    shift = first % 4 * 16
    low = tl.load(ptr.to(tl.pointer_type(tl.uint64)) + first // 4 + lanes, mask=lanes < fours, other=0)
    return low >> shift.to(tl.uint64)


@triton.jit
def _late_head(program, num_cols, BODY: tl.constexpr):
    head = (9 - (program % 8) * num_cols % 8) % 8
    return head, tl.minimum((num_cols - head) // 8, BODY // 8) * 8


@triton.jit
def _long_body(program, num_cols, BODY: tl.constexpr):
    head = (8 - (program % 8) * num_cols % 8) % 8
    return head, tl.minimum((num_cols - head + 7) // 8, BODY // 8) * 8


@triton.jit
def _shifted_ends(head, whole, ENDS: tl.constexpr):
    place = tl.arange(0, ENDS)
    return tl.where(place < head, place, place + whole - 1)


@triton.jit
def _unshifted(ptr, room_ptr, head, whole, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr):
    return ptr


@triton.jit
def _body_alone(body, ends):
    return tl.sum(body, 1)


@triton.jit
def _neighbouring_rows(tile, BLOCK_M: tl.constexpr):
    return tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _late_boundary(begin, lanes):
    return ((begin + 8) // 8 * 8)[:, None] + lanes


@contextmanager
def planted(name: str, fault: Any) -> Iterator[None]:
    """The tile function replaced in all kernels that have it."""
    modules: tuple[ModuleType, ...] = (rms.cut, layer.cut, soft.cut, rms.triton_gpu_held, layer.triton_gpu_held, glu.halves)
    before = {m: getattr(m, name) for m in modules if hasattr(m, name)}
    for m in before:
        setattr(m, name, fault)
    try:
        yield
    finally:
        for m, old in before.items():
            setattr(m, name, old)


def misses(same_cut: Any) -> list[str]:
    """What is wrong where tensors that start elsewhere are taken for such as start together."""
    before = rms.same_cut
    rms.same_cut = same_cut
    try:
        return numbers((101,), ("another cut",))
    finally:
        rms.same_cut = before


FAULTS: dict[str, tuple[str, Any]] = {
    "lead late by one": ("cut_of", _late_head),
    "a body that takes the neighbour's values": ("cut_of", _long_body),
    "ends shifted by one": ("end_columns", _shifted_ends),
    "rows of several leads in one tile": ("rows_of", _neighbouring_rows),
    "a body from the second boundary on": ("body_offsets", _late_boundary),
    "sums without the ends": ("sum_of_row", _body_alone),
    "parameters where they are": ("shifted", _unshifted),
}


def main() -> None:
    """Check, then plant."""
    interpreter.repair()
    found: dict[str, Any] = {"wrong": numbers(WIDTHS, ("dense",)) + numbers((101,), tuple(LAYOUTS)[1:]), "written": []}
    for cols in WIDTHS:
        found["written"] += neighbours(cols)
    found["on the way"] = on_the_way(WIDE)
    found["halves"] = halves()
    with planted("_words", _first_word):
        found["halves of one word"] = halves()
    found["caught"] = {}
    for title, (name, fault) in FAULTS.items():
        with planted(name, fault):
            wide = len(on_the_way(WIDE[:1]))
            found["caught"][title] = {"numbers": len(numbers((101,), ("dense",))), "neighbours": len(neighbours(101)), "wide": wide}
    found["caught"]["tensors that start elsewhere"] = {"numbers": len(misses(lambda *_: True)), "neighbours": 0, "wide": 0}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
