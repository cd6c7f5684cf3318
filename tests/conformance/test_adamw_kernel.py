"""The AdamW kernels without a GPU: their arithmetic and their tables in the interpreter, their resources for four devices.

Run as a program with TRITON_INTERPRET=1, it checks the kernels and prints one JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math import backends
from ops_math.backends import null
from ops_math.ops.adamw import op_tables
from ops_math.ops.adamw.problem import CASES, AdamWProblem, Scaling, StepCase
from ops_math.spec import DTYPE_OF
from ops_math.testing import Budget

triton = pytest.importorskip("triton", reason="missing capability: Triton")
DEVICES = ("a100", "h100", "b200", "mi300x")
SOURCE = Path(__file__).parents[2] / "src"
KERNELS = SOURCE / "ops_math" / "ops" / "adamw" / "triton_gpu.py"
STEPS, BORDER, GUARD = 3, 16, 123.0
SMALL_TILES = ("found.append(Config(block, tiles, num_warps))", "found.append(Config(256, 4, num_warps))")

# What is planted in the kernels' source, each of which must break a limit somewhere.
FAULTS = {
    "a bias correction of the first step for ever": ("t = count.to(tl.float64)", "t = count.to(tl.float64) * 0.0 + 1.0"),
    "a stale step count": ("other=1.0) + 1.0", "other=1.0) + 0.5"),
    "a step count that is not kept": ("tl.store(step_ptr, count,", "tl.store(step_ptr, count - 1.0,"),
    "corrections swapped": ("(lr / correction1)", "(lr / correction2)"),
    "eps inside the root": ("tl.sqrt_rn(v) * root + eps", "tl.sqrt_rn(v * root * root + eps)"),
    "decay after the step": ("p -= decay * p + size * ", "p = p * (1.0 - decay) - (1.0 - decay) * size * "),
    "no decay": ("decay * p +", "0.0 * p +"),
    "rates swapped": ("m += rate1 * (g - m)", "m += rate2 * (g - m)"),
    "the gradient's factor forgotten": ("g = g * factor", "g = g * 1.0"),
    "a direction forgotten": (" * tl.load(hyper_ptr + SIGN))", ")"),
    "another group's learning rate": ("lr = tl.load(hyper_ptr + LR)", "lr = tl.load(hyper_ptr + LR) * 1.0001"),
    "the last tile left out": ("if rest > 0:", "if rest > BLOCK:"),
    "the last tile not masked": ("places < left if MASKED", "places < left + 1 if MASKED"),
    "the first tile again and again": ("first += BLOCK", "first += 0"),
    "every chunk the first": (".to(tl.int64) * (BLOCK * TILES)", ".to(tl.int64) * 0"),
    "an infinity that stops nothing": ("tl.where(changes, count, 0.0)", "tl.where(changes, count, count)"),
    "an infinity that is counted": ("mask=mask & changes", "mask=mask"),
    "one word's half for both roundings": ("_stochastic_tile(v, words, 16)", "_stochastic_tile(v, words, 0)"),
    "words that do not know the step": ("zero + count.to(tl.uint32)", "zero + 1"),
    "words that do not know the tensor": ("groups, zero + row,", "groups, zero,"),
    "a master copy no wider than its parameter": (
        "tl.store(w_ptr + first + places, p, mask=mask)",
        "tl.store(w_ptr + first + places, p.to(tl.bfloat16).to(tl.float32), mask=mask)",
    ),
}


class Model:
    """Tensors of a case inside larger buffers whose borders must stay as they are."""

    def __init__(self, case: StepCase, seed: int, device: str = "cpu", wide: bool = False, nudge: float = 0.0) -> None:
        self.device = device
        make = torch.Generator().manual_seed(seed)
        self.buffers: list[tuple[torch.Tensor, int]] = []

        def draw(dtype: str, scale: float = 1.0) -> list[torch.Tensor]:
            found = []
            for shape in case.shapes:
                values = (torch.randn(shape, generator=make) * scale).to(DTYPE_OF[dtype])
                values = values.double() * (1 + nudge * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double())
                found.append(self._place(values, torch.float64 if wide else DTYPE_OF[dtype], case.shift))
            return found

        self.params, self.gradients = draw(case.param), [draw(case.param, 0.1) for _ in range(STEPS)]
        self.exp_avgs, self.exp_avg_sqs = draw(case.state, 0.1), [v.abs_() for v in draw(case.state, 0.1)]
        self.masters = [self._place(p, torch.float32, case.shift) for p in self.params] if case.master and not wide else []
        self.steps = [torch.tensor(float(i % 7), device=device) for i in range(len(case.shapes))]

    def _place(self, values: torch.Tensor, dtype: torch.dtype, shift: int) -> torch.Tensor:
        buffer = torch.full((values.numel() + 2 * BORDER,), GUARD, dtype=dtype, device=self.device)
        self.buffers.append((buffer, BORDER + shift))
        inside = buffer[BORDER + shift : BORDER + shift + values.numel()].view(values.shape)
        return inside.copy_(values)

    def groups(self, step: int, lr: float = 1e-2) -> list[om.AdamWGroup]:
        """Two groups that differ in all their numbers, the second ascending with a learning rate in a tensor."""
        half = len(self.params) // 2
        lists = (self.params, self.gradients[step], self.exp_avgs, self.exp_avg_sqs, self.steps)
        first, second = ([t[:half] for t in lists], [t[half:] for t in lists])
        other = {
            "lr": torch.tensor(3 * lr, device=self.device),
            "beta1": 0.8,
            "beta2": 0.99,
            "eps": 1e-3,
            "weight_decay": 0.3,
            "maximize": True,
        }
        return [
            om.AdamWGroup(*first, lr=lr, masters=self.masters[:half]),
            om.AdamWGroup(*second, masters=self.masters[half:], **other),
        ]

    def walk(self, case: StepCase, implementation: str) -> list[torch.Tensor]:
        tables = om.AdamWTables()
        scales = {"grad_scale": torch.tensor(8.0), "clip": torch.tensor(5.0), "rng": om.Rng(3) if case.stochastic else None}
        with om.force(adamw=implementation):
            for step in range(STEPS):
                om.adamw(self.groups(step), tables=tables, found_inf=torch.tensor(float(step == 1)), **scales)
        lists = [tensors for tensors in (self.params, self.exp_avgs, self.exp_avg_sqs, self.masters) if tensors]
        return [torch.cat([t.flatten() for t in tensors]).cpu() for tensors in lists]

    def borders_held(self) -> bool:
        inside = [(b, at, b.numel() - 2 * BORDER) for b, at in self.buffers]
        return all((b[:at] == GUARD).all() and (b[at + n :] == GUARD).all() for b, at, n in inside)


def broken(case: StepCase, device: str = "cpu") -> list[str]:
    """Every limit that the kernels pass on a case. A master is what its wide parameter is."""
    steady = case._replace(stochastic=False)
    exact = [Model(case, seed, wide=True).walk(steady, "eager") for seed in (1, 2)]
    nudged = [Model(case, seed, wide=True, nudge=2.0**-24).walk(steady, "eager") for seed in (1, 2)]
    yardstick = [Model(case, seed, device).walk(case, "eager") for seed in (1, 2)]
    if case.master:
        exact, nudged = ([[*found, found[0]] for found in runs] for runs in (exact, nudged))
    names = ("params", "exp_avgs", "exp_avg_sqs", "masters")[: len(yardstick[0])]
    limits = Budget(exact, yardstick, nudged, names)
    model, eager = Model(case, 1, device), Model(case, 1, device)
    values = model.walk(case, "triton_gpu")
    eager.walk(case, "eager")
    found = [f"{case.name}: {b}" for b in limits.broken(values, exact[0])]
    if model.steps != eager.steps:
        found.append(f"{case.name}: step counts differ")
    if not model.borders_held():
        found.append(f"{case.name}: a border was written")
    if case.stochastic:  # the same words round alike, but where fp32 noise of 2^-22 crosses a threshold: once in 2^14 values of 8 bits
        rounded = [(a, b) for a, b in zip(values, yardstick[0], strict=True) if a.dtype == torch.bfloat16]  # fp32 averages never are
        differ = sum(int((a != b).sum()) for a, b in rounded)
        if differ > 3 + 4 * values[0].numel() * 2.0**-14:
            found.append(f"{case.name}: {differ} values are rounded by other words")
    return found


def moving_tables(device: str = "cpu") -> list[str]:
    """A walk in which everything moves, beside the same walk of eager: addresses, learning rate, alignment, groups, infinities."""
    case = StepCase("moving", ((300,), (7,), (2000,)))
    uploads = []
    make = op_tables._packet
    op_tables._packet = lambda *args: uploads.append(1) or make(*args)
    results, counts = [], {}
    for implementation in ("triton_gpu", "eager"):
        model, tables = Model(case, 5, device), om.AdamWTables()
        kept = []  # what was dropped stays alive, so that nothing new gets its address

        def go(what: str, *, lr: float = 1e-2, model=model, tables=tables, implementation=implementation) -> None:
            before = len(uploads)
            with om.force(adamw=implementation):
                om.adamw(model.groups(0, lr), tables=tables)
            counts[implementation, what] = len(uploads) - before

        go("first")
        go("same again")
        go("another rate", lr=2e-2)
        kept.append(model.gradients[0])
        model.gradients[0] = [g.clone() for g in model.gradients[0]]
        go("moved gradients")
        odd = torch.empty(301, device=device)[1:].copy_(model.gradients[0][0])
        model.gradients[0][0] = odd
        go("a gradient off the grid")
        kept += [model.params, model.exp_avgs]
        model.params = [p * 2 for p in model.params]
        model.exp_avgs = [m.clone() for m in model.exp_avgs]
        go("moved parameters and averages")
        model.gradients[0] = [g.to(torch.float64).to(torch.float32) for g in model.gradients[0]]
        go("back on the grid")
        results.append([torch.cat([t.flatten() for t in ts]) for ts in (model.params, model.exp_avgs, model.exp_avg_sqs, model.steps)])
    op_tables._packet = make
    found = [f"moving: {float((a - b).abs().max())}" for a, b in zip(*results, strict=True) if (a - b).abs().max() > 4e-6]
    reserve = int(device == "cuda")  # the memory set aside for a capture is a packet too
    expected = {"first": 1 + reserve, "same again": 0, "another rate": 0, "moved gradients": 1}
    return found + [f"{what}: {counts['triton_gpu', what]} uploads" for what, n in expected.items() if counts["triton_gpu", what] != n]


def planted(folder: Path, *changes: tuple[str, str]) -> object:
    """The kernels' module with pieces of its source replaced."""
    source = KERNELS.read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    file = folder / f"planted_{len(list(folder.iterdir()))}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(folder: Path) -> None:
    """Check every case with the default tiles and with several small tiles a chunk, then every fault with those."""
    from ops_math.testing import interpreter

    interpreter.repair()
    torch.set_num_threads(1)
    target = op_tables.IMPLEMENTATIONS[0]
    result = {"broken": [], "escaped": [], "ran": 0}
    for module in (target.module, planted(folder, SMALL_TILES)):
        target._module = module
        result["broken"] += [line for case in CASES for line in broken(case)] + moving_tables()
        result["ran"] += len(CASES)
    for fault, change in FAULTS.items():
        target._module = planted(folder, SMALL_TILES, change)
        if not any(broken(case) for case in CASES if case.name != "many tensors"):
            result["escaped"].append(fault)
    sys.stdout.write(json.dumps(result) + "\n")


@pytest.mark.interpreter
@pytest.mark.timeout(1200)
def test_interpreted_kernels_are_within_the_budget_and_every_planted_fault_is_seen():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"broken": [], "escaped": [], "ran": 2 * len(CASES)}


MIXTURES = [
    AdamWProblem(10**9, 300, "fp32", "fp32", "fp32"),
    AdamWProblem(10**9, 300, "bf16", "bf16", "bf16"),
    AdamWProblem(10**9, 300, "bf16", "bf16", "fp32"),
    AdamWProblem(10**9, 300, "fp16", "fp16", "fp16"),
    AdamWProblem(10**9, 300, "bf16", "bf16", "fp32", master=True),
    AdamWProblem(10**9, 300, "bf16", "bf16", "bf16", stochastic=True),
    AdamWProblem(10**9, 300, "bf16", "bf16", "fp32", stochastic=True),
    AdamWProblem(10**9, 300, "fp32", "fp32", "fp32", aligned=False),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("device", DEVICES)
def test_every_configuration_compiles_within_the_device_without_spills_and_moves_16_bytes_at_once(device):
    from ops_math.ops.adamw import triton_gpu

    facts = backends.NAMED[device]
    for problem in MIXTURES:
        for config in triton_gpu.configs(problem, facts):
            found = compiled(problem, config, facts)
            assert [name for name, _, _ in found] == ["_step_kernel", "_prepare_kernel"]
            for name, used, _ in found:
                assert used.spilled == 0, (name, problem, config, used)
                assert used.registers <= (512 if facts.kind == "hip" else 255)
                assert used.shared <= facts.shared_bytes
            per_thread = config.block // (config.num_warps * (64 if facts.kind == "hip" else 32))
            widest = r"(?:global|buffer)_load_dwordx4" if facts.kind == "hip" else r"ld\.global[\w.:]*\.v4\.b32"
            wide = bool(re.search(widest, found[0][2]))
            if problem.aligned and _reaches_16(problem, per_thread):
                assert wide, (problem, config)
            elif not problem.aligned:  # which shows that the search can fail
                assert not wide or facts.kind == "hip", (problem, config)


def compiled(problem: AdamWProblem, config: object, facts: backends.Device) -> list[tuple[str, null.Resources, str]]:
    """Name, resources and assembly of the kernels of a step; the kernels themselves must not outlive the device that is not there."""
    from ops_math.ops.adamw import triton_gpu

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    one, scalars = empty(dtype=torch.float32), empty(300, 8, dtype=torch.float32)
    with null.pretend(facts) as kernels:
        triton_gpu.launch_step(problem, config, empty(7, 2, dtype=torch.int32), empty(300, 16), empty(300), scalars, empty(3))
        triton_gpu.launch_prepare(empty(300, 16), empty(2, 8, dtype=torch.float64), one, one, one, scalars)
        text = "amdgcn" if facts.kind == "hip" else "ptx"
        found = [(name, null.resources(kernel), kernel.asm[text]) for name, kernel in kernels]
        kernels.clear()
    return found


def _reaches_16(problem: AdamWProblem, per_thread: int) -> bool:
    """Whether some tensor's share of a thread is 16 bytes or more."""
    sizes = {"fp32": 4, "bf16": 2, "fp16": 2}
    return per_thread * max(sizes[problem.param], sizes[problem.state]) >= 16


def a_table() -> op_tables.Table:
    case = StepCase("one", ((8,), (5,)))
    groups = [g._replace(numbers=(i,)) for i, g in enumerate(Model(case, 1).groups(0))]
    target = op_tables.IMPLEMENTATIONS[0]
    problem = AdamWProblem(13, 2, "fp32", "fp32", "fp32")
    config = target.module.configs(problem, backends.NAMED["h200"])[0]
    part = op_tables.Part(target, config, problem, None, 0, ((0, (0,)), (1, (0,))))
    return op_tables.Table(torch.device("cpu"), [part], groups)


def test_a_captured_step_has_a_packet_of_its_own_and_needs_memory_set_aside():
    table = a_table()
    hyper = [float(n) for n in range(16)]
    assert table._uploaded([16, 32], hyper) is table.packet
    with pytest.raises(om.UnsupportedError) as error:
        table._captured([48, 64], hyper)
    assert str(error.value) == (
        "adamw under CUDA graph capture: no pinned memory is left for it, and none can be made while capturing. "
        "Take one step outside before each capture, with the same parameters."
    )
    table.reserve = torch.zeros_like(table.packet)
    packet = table._captured([48, 64], hyper)
    table._uploaded([80, 96], [n + 1 for n in hyper])
    assert packet[16:].tolist() == [48, 64]
    assert packet[:16].view(torch.float64).tolist() == hyper
    assert table.packet[16:].tolist() == [80, 96]
    assert table.reserve is None


def test_a_changed_rate_alone_is_filled_in_and_a_gradient_off_the_grid_is_refused():
    table = a_table()
    hyper = [float(n) for n in range(16)]
    table._uploaded([16, 32], hyper)
    table._uploaded([16, 32], [7.5, *hyper[1:]])
    assert table.packet[:16].view(torch.float64).tolist() == [7.5, *hyper[1:]]
    aligned, odd = torch.empty(8), torch.empty(9)[1:]
    assert table.addresses_of([aligned, aligned]) == [aligned.data_ptr()] * 2
    assert table.addresses_of([aligned, odd]) is None


def test_a_table_is_in_the_kernels_order_of_columns():
    from ops_math.ops.adamw import triton_gpu as k

    model = Model(StepCase("one", ((8,), (5,)), master=True), 1)
    group = model.groups(0)[1]._replace(numbers=(42,))
    row = op_tables._row(group, 1, 0, 0)
    tensors = {
        k.PARAM: group.params,
        k.EXP_AVG: group.exp_avgs,
        k.EXP_AVG_SQ: group.exp_avg_sqs,
        k.MASTER: group.masters,
        k.STEP: group.steps,
    }
    assert all(row[column.value] == found[0].data_ptr() for column, found in tensors.items())
    assert (row[k.SIZE.value], row[k.GROUP.value], row[k.NUMBER.value], len(row)) == (5, 1, 42, k.ADDRESS_COLUMNS.value)
    hyper = op_tables._hyper(group)
    columns = (k.LR, k.LOG_BETA1, k.ONE_MINUS_BETA2, k.HYPER_EPS, k.WEIGHT_DECAY, k.SIGN)
    expected = [float(group.lr), math.log(0.8), 1 - 0.99, 1e-3, 0.3, -1.0]
    assert [hyper[c.value] for c in columns] == expected
    assert len(hyper) == k.HYPER_COLUMNS.value
    assert op_tables._hyper(group._replace(beta1=0.0))[k.LOG_BETA1.value] == -math.inf


def test_chunks_cover_every_tensor_once():
    found = op_tables._chunks([5, 0, 1024, 1025, 1], 7, 1024).tolist()
    assert found == [[7, 0], [9, 0], [10, 0], [10, 1], [11, 0]]


def test_a_plan_is_not_made_anew_while_nothing_moved_and_is_when_something_did():
    model, tables = Model(StepCase("one", ((8,), (5,))), 1), om.AdamWTables()
    groups = [g._replace(numbers=(i,)) for i, g in enumerate(model.groups(0))]
    first = tables.plan(groups, Scaling())
    assert tables.plan(groups, Scaling()) is first
    assert tables.plan(groups, Scaling(clip=torch.ones(()))) is not first
    moved = [groups[0]._replace(exp_avgs=[model.exp_avgs[0].clone()]), groups[1]]
    second = tables.plan(groups, Scaling())
    assert tables.plan(moved, Scaling()) is not second


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
