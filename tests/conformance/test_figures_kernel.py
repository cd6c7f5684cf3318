"""The kernels of `om.FigureTable` without a GPU: their arithmetic in the interpreter, their resources for four devices.

Run as a program with TRITON_INTERPRET=1, it checks the kernels and prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ops_math import backends
from ops_math.backends import null
from ops_math.ops.figures import eager
from ops_math.ops.figures.problem import CHUNK_BYTES, COLUMNS, HASH_AT, LENGTH, SAMPLES_AT, SKETCH_AT

triton = pytest.importorskip("triton", reason="missing capability: Triton")
DEVICES = ("a100", "h100", "b200", "mi300x")
SOURCE = Path(__file__).parents[2] / "src"
FOLDER = SOURCE / "ops_math" / "ops" / "figures"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.bool)

KERNEL_FAULTS = {
    "a column too few": ("(columns < NARROW) & (behind", "(columns < NARROW - 1) & (behind"),
    "both widths alike": ("columns, (row + rows) * NARROW + columns", "columns, (row + rows) * WIDE + columns"),
    "both widths of whole chunks alike": ("rows * WIDE + columns, rows * NARROW + columns", "rows * WIDE + columns, rows * WIDE + columns"),
    "steps of whole chunks of one width": ("step * (SLAB_ROWS * NARROW) + behind", "step * (SLAB_ROWS * WIDE) + behind"),
    "the last row forgotten": ("tl.cdiv(left, NARROW).to(tl.int32)", "(left // NARROW).to(tl.int32)"),
    "the last row of whole chunks forgotten": ("mask=column < CHUNK_WORDS - last", "mask=column < 0"),
    "the last row of whole chunks too long": ("mask=column < CHUNK_WORDS - last", "mask=column <= CHUNK_WORDS - last"),
    "the last bytes forgotten": ("- 1\n        words = tl.where", "- 1 & 0\n        words = tl.where"),
    "bytes behind the end": ("if (rest > 0) & (first", "if (rest > 8) & (first"),
    "a chunk that is not whole taken for one": ("(first + CHUNK_WORDS) * 8 > num_bytes", "(first + CHUNK_WORDS // 2) * 8 > num_bytes"),
    "one step for all": ("tl.minimum(step + 1, CHUNK_SLABS - 1)", "tl.minimum(step + 1, 1)"),
    "high bits forgotten": ("+ (wide >> 32) *", "+ (wide >> 63) *"),
    "high bits of one width forgotten": ("(narrow >> 32) *", "(narrow >> 63) *"),
    "halves alike": ("factors_ptr + half * 2 * (WIDE + NARROW)", "factors_ptr + half * 0 * (WIDE + NARROW)"),
    "chunks alike": ("_mixed(2 * chunk + half)", "_mixed(half + 0 * chunk)"),
    "every chunk the first": ("first = chunk * CHUNK_WORDS", "first = chunk * 0"),
    "the second piece twice": ("(words >> (PIECE * 16)) << 16)", "(words >> (PIECE // 2 * 32)) << 16)"),
    "a sign that counts": ("& 0x7FFFFFFF\n", "& -1\n"),
    "a sign that counts in whole chunks": ("else tl.abs(value)", "else value"),
    "NaN as infinity": ("(bits > end).to", "(bits >= end).to"),
    "NaN overlooked": ("again = not sound", "again = (peak > 0) & ((total < SMALL) | (total >= LARGE))"),
    "what is not finite is kept": ("value = tl.where(bits >= end, 0.0, value)", "value = tl.where(bits > end, 0.0, value)"),
    "the largest is not finite": ("tl.where(bits >= end, 0, bits)", "tl.where(bits > end, 0, bits)"),
    "squares lost below the range": ("(total >= SMALL)", "(total > 0)"),
    "all squares lost below the range": ("& (peak == 0)", "& (peak >= 0)"),
    "squares lost above the range": ("(total < LARGE)", "(total >= 0)"),
    "slabs of one sign": ("_mixed(slab + row // SLAB_ROWS)", "_mixed(slab + row * 0)"),
    "slabs of whole chunks of one sign": ("_mixed(slab + step)", "_mixed(slab + step * 0)"),
    "chunks of one sign": ("chunk * CHUNK_SLABS, num_bytes, KIND", "chunk * 0, num_bytes, KIND"),
    "whole chunks of one sign": ("chunk * CHUNK_SLABS, KIND", "chunk * 0, KIND"),
    "blocks of one sign": ("(rows * WIDE + columns) * PIECES // SKETCH", "(rows * WIDE + columns) * PIECES // SKETCH * 0"),
    "blocks of whole chunks of one sign": ("places * PIECES // SKETCH)", "places * PIECES // SKETCH * 0)"),
    "pieces in one place": ("* PIECES + PIECE, together", "* PIECES, together"),
    "the third piece in the place of the second": (
        "s2 += t2 * sign\n                s3 += t3 * sign\n            squares",
        "s1 += t2 * sign\n                s3 += t3 * sign\n            squares",
    ),
    "the last sample missed": ("(count - 1) // (SAMPLES - 1)", "(count - 1) // SAMPLES"),
    "samples of every chunk": ("if chunk == 0:", "if chunk >= 0:"),
    "parts of another tensor": ("(first_float + start + parts)", "(start + parts)"),
    "hashes of another tensor": ("(first_hash + start + parts)", "(start + parts)"),
    "largest added up": ("tl.arange(0, COLUMNS) == 1", "tl.arange(0, COLUMNS) == -1"),
    "chunks of one tensor for all": ("begins.repeat_interleave(repeats)", "0 * begins.repeat_interleave(repeats)"),
    "squares of one column": ("tl.store(out_ptr, tl.sum(squares, 0))", "tl.store(out_ptr, tl.max(squares, 0))"),
    "squares of one row": ("squares += tl.sum(some, 0)", "squares += tl.max(some, 0)"),
}
GATHER_FAULTS = {
    "neighbours": ("places * step, mask", "places, mask"),
    "one block for all": ("+= number * GATHERED * steps * size", "+= number * 0"),
    "blocks on top of each other": ("gather[:, 3] += number * GATHERED", "gather[:, 3] += number * 0"),
    "a block too short": (".clamp(max=GATHERED)", ".clamp(max=GATHERED - 1)"),
    "tensors on top of each other": ("step, 0, begin * 8 // size]", "step, 0, 0]"),
    "an element too few": ("counts = [-(-length // step)", "counts = [length // step"),
    "rows of another tensor": ("[found[n] for n in range(len(tensors))]", "list(found.values())"),
    "always the first places": ("places = tuple((tensors[n].data_ptr()", "places = tuple((tensors[numbers[0]].data_ptr()"),
}
HOST_FAULTS = {
    "the rest of a row forgotten": (".add_(words.as_strided(", ".mul_(1 + 0 * words.as_strided("),
    "an old end in the scratch": ("whole[length:].zero_()", "whole[length:].view(-1)"),
    "chunks alike": ("chunk_factor(chunk, half)", "chunk_factor(0, half)"),
    "high bits forgotten": ("low[0] + torch.mv(high, g0)", "low[0]"),
    "hashes of another tensor": ("[row for row, _ in self.chunks]", "[row * 0 for row, _ in self.chunks]"),
    "slabs of one sign": ("_slab_signs(slab, count", "_slab_signs(0 * slab, count"),
    "a sketch of what is not finite": ("            sketches.rows.pop()\n", ""),
    "a sketch that nobody asked for": ("[[float(item.sketch)] for", "[[1.0] for"),
    "small tensors mixed up": ("found.append(([item.row for item in items]", "found.append((sorted((i.row for i in items), reverse=True)"),
    "small tensors not cleared": ("        self.words.zero_()\n", ""),
    "small tensors cut": ("_row_sizes(values)\n            blocks", "_row_sizes(values[:, :64])\n            blocks"),
    "a second chunk forgotten": ("(row, chunk + n) for n in range(whole)", "(row, chunk) for n in range(whole)"),
    "what follows whole chunks forgotten": (
        "        if rest:\n            self._columns",
        "        if rest and not whole:\n            self._columns",
    ),
    "squares lost below the range": ("not SMALL < squares < math.inf", "not -1 < squares < math.inf"),
    "the smallest forgotten": ("top = max(-low, high)", "top = high"),
}


def drawn(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count + seed)) * 40
    return x > 0 if dtype == torch.bool else x.to(dtype)


def cases() -> list[tuple[list[list[torch.Tensor]], bool]]:
    """Lists of tensors that are added together, one list after the other, and whether with sketches; first one of each kind, then the
    others, since the interpreter takes seconds for all and most faults are seen by any of a kind."""
    singly = [([[drawn(n, dtype)] for n in (0, 1, 3, 1025, 9001)], True) for dtype in DTYPES]
    together = [([[drawn(5, dtype), drawn(9001, dtype), drawn(0, dtype), drawn(77, dtype, 1)]], True) for dtype in DTYPES]
    not_finite, of_chunks, whole_chunks = [], [], []
    for dtype in DTYPES[:4]:
        z = drawn(5000, dtype)
        z[77] = -math.inf
        z[78] = math.nan
        not_finite.append(([[z], [z[1:]], [z[1:3000]]], True))
    for dtype in DTYPES[:2]:  # of three chunks and of two, which the interpreter takes half a second for
        x = drawn(2 * CHUNK_BYTES // dtype.itemsize + 57001, dtype)
        y = x[: CHUNK_BYTES // dtype.itemsize + 57001].clone()
        x[7], y[-1] = math.nan, math.inf
        of_chunks.append(([[x, drawn(3000, dtype)], [y]], True))
    for dtype in DTYPES[2:6]:  # a whole chunk, and the first words of another
        whole_chunks.append(([[drawn(CHUNK_BYTES // dtype.itemsize + 3, dtype)]], True))
    whole = drawn(CHUNK_BYTES // 4, torch.float32)
    sizes = [
        ([[drawn(3001, torch.float32) * 1e-30, drawn(3001, torch.float32) * 1e30]], False),
        ([[whole[: 3 * whole.numel() // 4]]], True),  # behind its end there is more
        ([[whole * 2e-24], [whole * 1e-25], [whole * 1e25], [whole * 0], [-whole.abs()]], True),
    ]
    many = [
        ([[drawn(3000, torch.float32)], [-drawn(3000, torch.float32).abs()], [drawn(5, torch.float32)]], False),
        ([[drawn(2001, torch.float32)] * eager.KEPT + [drawn(700, torch.float32)]], True),
    ]
    kinds = (singly, together, not_finite, many, sizes, whole_chunks, of_chunks)
    return [case for of_each in itertools.zip_longest(*kinds) for case in of_each if case is not None]


def differences(one: torch.Tensor, other: torch.Tensor) -> list[str]:
    """Where two tables part: bits, counts, sizes and samples alike; sums of floats to their rounding."""
    found = []
    for what, part in {"fingerprints": slice(HASH_AT, LENGTH), "sizes": slice(1, SKETCH_AT), "samples": slice(SAMPLES_AT, HASH_AT)}.items():
        if not torch.equal(one[:, part].contiguous().view(torch.int64), other[:, part].contiguous().view(torch.int64)):
            if what != "samples" or not torch.equal(one[:, part].nan_to_num(7.0), other[:, part].nan_to_num(7.0)):
                found.append(what)
    size = one[:, :1].clamp(min=1e-300)
    if not ((one[:, :1] - other[:, :1]).abs() <= 1e-5 * size).all():
        found.append("squares")
    if not ((one[:, SKETCH_AT:SAMPLES_AT] - other[:, SKETCH_AT:SAMPLES_AT]).abs() <= 3e-7 * size.sqrt()).all():
        found.append("sketches")
    return found


def filled(make: Callable[[], Any]) -> Iterator[torch.Tensor]:
    """The rows of every case, one case after the other."""
    for groups, sketch in cases():
        rows = make()
        for tensors in groups:
            rows.add(tensors, sketch)
        yield rows.fetch()


def thinned(make: Callable[[], Any]) -> Iterator[torch.Tensor]:
    """Rows of every so-many-th element: twice of the same places, then of others that hold other values."""
    shapes = ((torch.float32, 9001, 7), (torch.bfloat16, 20001, 5), (torch.float32, 5, 1), (torch.bfloat16, 3, 251), (torch.int64, 50, 3))
    tensors = [drawn(count, dtype) for dtype, count, _ in shapes] + [torch.empty(0), drawn(9000, torch.bfloat16)[1:]]
    steps = [step for _, _, step in shapes] + [9, 4]
    others = [drawn(t.numel(), t.dtype, 5) for t in tensors]
    for some in (tensors, tensors, others):
        rows = make()
        rows.add_every(some, steps, True)
        rows.add([some[0]], True)
        yield rows.fetch()
        tensors[0].neg_()
    exotic = make()
    exotic.add_every([drawn(900, torch.int8), drawn(900, torch.float32)], [3, 4], True)
    yield exotic.fetch()


def tables(here: Iterable[torch.Tensor], there: Iterable[torch.Tensor]) -> Iterator[str]:
    """Every difference between two implementations."""
    for number, pair in enumerate(zip(here, there, strict=True)):
        yield from (f"case {number}: {what}" for what in differences(*pair))


def planted(folder: Path, file: str, *changes: tuple[str, str]) -> types.ModuleType:
    """A module of this operator with pieces of its source replaced."""
    source = (FOLDER / f"{file}.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    place = folder / f"planted_{len(list(folder.iterdir()))}.py"
    place.write_text(source)
    spec = importlib.util.spec_from_file_location(place.stem, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path) -> None:
    """Check every case with every configuration, then every fault with the first."""
    import numpy as np

    from ops_math.ops.figures import triton_gpu
    from ops_math.testing import interpreter

    interpreter.repair()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    result = {"broken": [], "escaped": []}
    host = list(filled(eager.Rows))
    made = list(filled(lambda: triton_gpu.Rows(CPU)))
    result["broken"] += list(tables(host, made))
    for config in triton_gpu.CONFIGS[1:]:
        result["broken"] += list(tables(host, filled(lambda config=config: triton_gpu.Rows(CPU, config))))
    single = planted(folder, "triton_gpu", ("FOLDED = 16", "FOLDED = 1"))
    result["broken"] += list(tables(host, filled(lambda: single.Rows(CPU))))
    for fault, change in KERNEL_FAULTS.items():
        wrong = planted(folder, "triton_gpu", change)
        if not any(tables(host, filled(lambda wrong=wrong: wrong.Rows(CPU)))):
            result["escaped"].append(f"kernel: {fault}")
    result["broken"] += list(tables(thinned(eager.Rows), thinned(lambda: triton_gpu.Rows(CPU))))
    for fault, change in GATHER_FAULTS.items():
        wrong = planted(folder, "triton_gpu", change)
        if not any(tables(thinned(eager.Rows), thinned(lambda wrong=wrong: wrong.Rows(CPU)))):
            result["escaped"].append(f"gather: {fault}")
    for fault, change in HOST_FAULTS.items():
        if not any(tables(filled(planted(folder, "eager", change).Rows), made)):
            result["escaped"].append(f"host: {fault}")
    sys.stdout.write(json.dumps(result) + "\n")


@pytest.mark.interpreter
@pytest.mark.timeout(1200)
def test_kernels_and_host_have_the_same_bits_and_every_planted_fault_is_seen():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"broken": [], "escaped": []}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
def test_every_configuration_compiles_within_the_device_and_the_first_without_spills(device):
    from ops_math.ops.figures import triton_gpu

    facts = backends.NAMED[device]
    for config in triton_gpu.CONFIGS:
        for kind, size in ((1, 4), (2, 8), (3, 2), (4, 2), (5, 4), (0, 1)):
            for name, used in compiled(kind, size, config, facts):
                assert used.spilled == 0 or config != triton_gpu.CONFIGS[0], (name, kind, config, used)
                assert used.registers <= (512 if facts.kind == "hip" else 255)
                assert used.shared <= facts.shared_bytes


def compiled(kind: int, size: int, config: object, facts: backends.Device) -> list[tuple[str, null.Resources]]:
    """Name and resources of every kernel, with a table of several tensors and without."""
    from ops_math.ops.figures import triton_gpu

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    floats = empty(9, HASH_AT, dtype=torch.float64)
    with null.pretend(facts) as kernels:
        for table in (False, True):
            arguments = (empty(99), empty(3, 4), empty(2, 2, COLUMNS), empty(512, dtype=torch.float32), empty(9, 2), floats, 792)
            constants = {"KIND": kind, "PIECES": 8 // size if kind else 1, "SKETCHED": True, "TABLE": table, "AHEAD": config.ahead}
            triton_gpu.launch(triton_gpu._chunk_kernel, (3,), *arguments, num_warps=config.num_warps, **constants)
        out = empty(3, LENGTH, dtype=torch.float64)
        triton_gpu.launch(triton_gpu._fold_kernel, (3,), empty(9, 2), floats, empty(3, 4), out, PARTS=triton_gpu.FOLDED, COLUMNS=128)
        words = torch.empty(9, dtype=torch.int64, device="meta")
        triton_gpu.launch(triton_gpu._gather_kernel, (3,), empty(9, 4), words, SIZE=max(size, 2), BLOCK=triton_gpu.GATHERED)
        assert len(kernels) == 4
        found = [(name, null.resources(kernel)) for name, kernel in kernels]
        kernels.clear()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_has_the_bits_of_the_host(dtype):
    import ops_math as om

    tensors = [drawn(n, dtype) for n in (0, 1, 3, 4099, 2 * CHUNK_BYTES // dtype.itemsize + 1029)]
    here, there = om.FigureTable(), om.FigureTable()
    for t in tensors:
        here.add(t)
        there.add(t.cuda())
    here.add_all(tensors)
    there.add_all([t.cuda() for t in tensors])
    assert there.copied_from == set()
    assert differences(here.fetch(), there.fetch()) == []


@pytest.mark.gpu
def test_a_gpu_reads_every_so_many_th_element_where_it_is_now():
    import ops_math as om

    tensors = [drawn(200 * 300, torch.bfloat16).view(200, 300), drawn(50 * 300, torch.float32).view(50, 300), drawn(64, torch.bfloat16)]
    there = [t.cuda() for t in tensors]
    turned = torch.randn(400, 90).t()
    for scale in (1.0, 1.0, 2.0):
        for t in (*tensors, *there):
            t.mul_(scale)
        here, gpu = om.FigureTable(), om.FigureTable()
        here.add_all([*tensors, turned], steps=[299, 251, 1, 7])
        gpu.add_all([*there, turned.cuda()], steps=[299, 251, 1, 7])
        assert differences(here.fetch(), gpu.fetch()) == []


@pytest.mark.gpu
def test_a_tensor_of_more_than_2_31_elements_is_seen_to_its_end():
    import ops_math as om

    x = torch.zeros(2**31 + 2**20 + 1, dtype=torch.bfloat16, device="cuda")
    table = om.FigureTable()
    table.add(x)
    x[-1] = 3.0
    table.add(x)
    x[-1], x[-2] = 0.0, 3.0
    table.add(x)
    rows = table.fetch()
    assert len({tuple(row.tolist()) for row in rows[:, HASH_AT:].contiguous().view(torch.int64)}) == 3
    assert rows[:, 0].tolist() == [0.0, 9.0, 9.0]
    assert rows[1, HASH_AT - 1].item() == 3.0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
