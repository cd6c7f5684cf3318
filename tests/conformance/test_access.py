"""How wide the elementwise kernels read and write, in the PTX of a device that is not there: a value at a time is half a copy's speed."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton", reason="missing capability: Triton")

from ops_math import backends, catalog
from ops_math.backends import null
from ops_math.spec import DTYPE_OF
from ops_math.testing import Draw
from ops_math.testing.crosscompile import calls_of, like_on

DEVICE = backends.NAMED["h100"]
NARROW = {"fp32": "b32", "bf16": "b16", "fp16": "b16"}
ODD = (511, 753)


def matrix(dtype, rows, cols, stride=None):
    return torch.empty_strided((rows, cols), (stride or cols, 1), dtype=DTYPE_OF[dtype], device="meta")


def kernels(name, phase, *args):
    """Name and PTX of the kernels that a call starts in the default configuration."""
    operator = catalog.operators()[name]
    implementation = next(i for i in operator.implementations() if i.name == "triton_gpu")
    problem = operator.phases[phase].problem_of(*args)
    with null.pretend(DEVICE) as compiled:
        config = implementation.module.configs(problem, DEVICE, phase)[0]
        implementation.launcher(phase)(problem, config, *args[: operator.phases[phase].num_tensors])
        found = [(kernel_name, kernel.asm["ptx"]) for kernel_name, kernel in compiled]
        compiled.clear()
    return found


def accesses(name, phase, *args):
    """Reads and writes of values in the PTX of the kernels that a call starts: (`ld` or `st`, width)."""
    seen = Counter()
    for _, ptx in kernels(name, phase, *args):
        seen.update(re.findall(r"\b(ld|st)\.global\.(?:L1::evict_\w+\.)?([.\w]+)", ptx))
    return {" ".join(key): count for key, count in seen.items() if key[1] != "b64"}  # 64 bits: dropout's state


def glu(dtype, phase, rows, cols, stride=None, need_dup=True, need_y=False):
    tensors = [matrix(dtype, rows, cols, stride) for _ in range(3)]
    if phase == "fwd":
        return accesses("glu", "fwd", *tensors[:2], "silu", "", False, DTYPE_OF[dtype])
    return accesses("glu", "bwd", *tensors, None, "silu", "", True, need_dup, need_y)


def gelu(dtype, phase, rows, cols, stride=None, need_y=False):
    x = matrix(dtype, rows, cols, stride)
    if phase == "fwd":
        return accesses("gelu", "fwd", x, None, "none", DTYPE_OF[dtype])
    return accesses("gelu", "bwd", matrix(dtype, rows, cols, stride), x, None, "none", True, False, need_y)


def dropout(dtype, rows, cols, stride=None):
    return accesses("dropout", "fwd", matrix(dtype, rows, cols, stride), torch.empty(3, dtype=torch.int64, device="meta"), 0.1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("call", "loads", "stores"),
    [
        (lambda d, *s: glu(d, "fwd", *s), 2, 1),
        (lambda d, *s: glu(d, "bwd", *s), 3, 2),
        (lambda d, *s: glu(d, "bwd", *s, need_dup=False), 3, 1),
        (lambda d, *s: glu(d, "bwd", *s, need_y=True), 3, 3),
        (lambda d, *s: gelu(d, "fwd", *s), 1, 1),
        (lambda d, *s: gelu(d, "bwd", *s), 2, 1),
        (lambda d, *s: gelu(d, "bwd", *s, need_y=True), 2, 2),
        (dropout, 1, 1),
    ],
    ids=["glu", "glu bwd", "glu bwd, dgate alone", "glu bwd with y", "gelu", "gelu bwd", "gelu bwd with y", "dropout"],
)
def test_an_odd_number_of_values_is_moved_sixteen_bytes_at_a_time_but_for_the_last(call, loads, stores, dtype):
    seen = call(dtype, *ODD)
    one = NARROW[dtype]
    assert seen.pop(f"ld {one}") == loads  # the tail: one value a thread
    assert seen.pop(f"st {one}") == stores
    assert set(seen) == {"ld v4.b32", "st v4.b32"}
    assert seen["ld v4.b32"] % loads == seen["st v4.b32"] % stores == 0


@pytest.mark.parametrize(("cols", "stride", "width"), [(1000, 1016, "v4.b32"), (1004, 2012, "v2.b32"), (1006, 2010, "b32")])
@pytest.mark.parametrize("call", [lambda *a: glu("bf16", "fwd", *a), lambda *a: glu("bf16", "bwd", *a), lambda *a: gelu("bf16", "bwd", *a)])
def test_rows_are_read_by_as_many_values_as_divide_widths_and_strides(call, cols, stride, width):
    assert set(call(512, cols, stride)) == {f"ld {width}", f"st {width}"}


@pytest.mark.parametrize(("cols", "stride", "width"), [(1000, 1016, "v4.b32"), (1004, 2012, "v2.b32"), (1006, 2010, "b32")])
def test_dropout_reads_rows_by_as_many_values_as_divide_widths_and_strides(cols, stride, width):
    assert set(dropout("bf16", 512, cols, stride)) == {f"ld {width}", f"st {width}"}


def test_the_aligned_walk_has_no_tail():
    assert set(glu("bf16", "bwd", 512, 4096, need_y=True)) == set(gelu("bf16", "bwd", 512, 4096)) == {"ld v4.b32", "st v4.b32"}


@pytest.mark.parametrize(("rows", "cols", "kernel"), [(4096, 4096, "_kernel"), (9, 4095, "_flat_kernel"), (1, 300_000_000, "_flat_kernel")])
def test_dropout_walks_rows_off_eights_flat_and_rows_of_more_tiles_than_a_grid_has(rows, cols, kernel):
    state = torch.empty(3, dtype=torch.int64, device="meta")
    assert [name for name, _ in kernels("dropout", "fwd", matrix("bf16", rows, cols), state, 0.1)] == [kernel]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "dropout"])
def test_a_stride_beyond_2_to_the_31_reaches_the_kernel_whole(name, monkeypatch):
    operator, stride = catalog.operators()[name], 2**31 + 8
    target = next(i for i in operator.implementations() if i.name == "triton_gpu")
    case = next(c for c in operator.file("problem").CASES if c.fn == name and len(c.make(Draw(1, "bf16")).args[0].shape) == 2)
    call = calls_of(operator, case, "bf16")[0]
    tensors = [like_on(t, "meta") for t in call.args[: operator.phases["fwd"].num_tensors]]
    tensors[0] = torch.empty_strided((3, 1000), (stride, 1), dtype=torch.bfloat16, device="meta")
    problem = operator.phases["fwd"].problem_of(*call.args)._replace(rows=3, cols=1000)
    handed = []
    monkeypatch.setattr(target.module, "launch", lambda kernel, grid, *args, **constants: handed.append((args, constants["ALIGN"])))
    target.launcher("fwd")(problem, target.module.configs(problem, backends.NAMED["h100"], "fwd")[0], *tensors)
    args, align = handed[0]
    assert align == 8
    assert stride in [a for a in args if type(a) is int]
