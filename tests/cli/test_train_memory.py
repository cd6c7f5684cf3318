"""Peak memory, operator calls, saved bytes; what fits and what to say when it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ops_math import UnsupportedError
from ops_math.cli.train import capacity, memory, variants
from ops_math.cli.train.capacity import Need
from ops_math.cli.train.config import OPS_MATH, PLAIN
from ops_math.cli.train.data import Batch
from ops_math.cli.train.engine import Run
from ops_nn.models import ModelOutput
from tests.cli import train_fixtures as fixtures

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(autouse=True)
def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    fixtures.add_presets(monkeypatch)


class Cubes(torch.nn.Module):
    """Saves exactly two tensors as large as its weight besides the weight: exp's result and sin's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000, 10))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        return ModelOutput((self.weight * 2.0).sin().exp().sum(), None)


def cubes() -> tuple[Run, Batch]:
    model = Cubes()
    return Run(PLAIN, model, model, fixtures.config()), Batch(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))


def test_the_highest_sum_is_of_records_in_the_order_of_their_times() -> None:
    assert memory.highest_sum([(3, -50), (1, 100), (2, 30), (4, 60)]) == 140
    assert memory.highest_sum([(1, -10)]) == 0


def test_saved_bytes_are_distinct_storages_without_parameters() -> None:
    assert memory.saved_bytes(*cubes()) == 2 * 40_000


def test_the_peak_on_the_cpu_is_what_arithmetic_says() -> None:
    run, batch = cubes()
    for step in range(2):
        run.step(batch, step)
    peak, _ = memory.cpu_peak_and_calls(run, batch)
    weight_moments_steps = 3 * 40_000
    least, most = weight_moments_steps + 3 * 40_000, weight_moments_steps + 6 * 40_000
    assert least < peak < most


def test_only_outermost_operators_and_compiled_kernels_count() -> None:
    def event(name: str, parent: object = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, cpu_parent=parent)

    linear = event("aten::linear")
    engine = event("autograd::engine::evaluate_function: MmBackward0")
    node = event("MmBackward0", engine)
    events = [linear, event("aten::mm", event("inner", linear)), engine, node, event("aten::mm", node)]
    events += [
        event("ops_math::rms_norm_fwd"),
        event("graph_0_cpp_fused_add_1"),
        event("cpp_fused_mul_0"),
        event("Torch-Compiled Region: 0/0"),
    ]
    assert memory.outermost_operators(events) == 5


@pytest.mark.slow
def test_a_run_measured_apart_needs_what_it_needs_here() -> None:
    used = fixtures.config(model="llama-tiny", batch=1, seq=16)
    ids = torch.randint(0, 8192, (1, 16), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids.roll(1))
    apart = memory.measure_apart(PLAIN, used, batch)
    assert apart.error == ""
    here = memory.measure(variants.make(PLAIN, used)[0], batch)
    assert apart.saved_bytes == here.saved_bytes
    assert apart.calls == here.calls
    assert apart.peak_bytes == pytest.approx(here.peak_bytes, rel=0.01)
    assert apart.peak_bytes > 12 * 10_458_368


@pytest.mark.slow
def test_a_measurement_that_dies_says_how() -> None:
    used = fixtures.config(model="llama-tiny", batch=1, seq=16)
    ids = torch.full((1, 16), 9000)
    assert (
        "its process ended with code 1: IndexError: index out of range" in memory.measure_apart(PLAIN, used, Batch(ids, ids.clone())).error
    )


def test_ops_math_saves_less_than_plain_pytorch() -> None:
    used = fixtures.config(model="llama-tiny", batch=2, seq=128)
    ids = torch.randint(0, 8192, (2, 128), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, ids.roll(1))
    plain, ours = (memory.saved_bytes(variants.make(name, used)[0], batch) for name in (PLAIN, OPS_MATH))
    assert ours < 0.9 * plain


def test_the_estimate_counts_what_plain_pytorch_really_saves() -> None:
    used = fixtures.config(batch=3)
    needed = capacity.need(used)
    ids = torch.zeros(3, 16, dtype=torch.int64)
    run = variants.make(PLAIN, used)[0]
    logits = 3 * 2 * 4 * 16 * 300
    assert 3 * needed.per_sequence - logits == pytest.approx(memory.saved_bytes(run, Batch(ids, ids.clone())), rel=0.02)
    parameters = sum(p.numel() for p in run.model.parameters())
    assert needed.fixed == parameters * 16
    assert capacity.need(fixtures.config(compare=True)).fixed == parameters * (3 * 12 + 4)


@pytest.mark.parametrize(
    ("free", "compare", "said"),
    [
        (1000 + 700, False, "--batch 7 would fit"),
        (1000 + 99_999, False, "--batch 7 would fit"),
        (16 * 25 + 15, True, "Choose a smaller model (`--model help` lists them)"),
        (16 * 25 + 250, True, "--no-compare --batch 2 would fit"),
        (16 * 62 + 50, False, "--batch 1 --seq 45 would fit"),
        (16 * 25 + 50, True, "--no-compare --batch 1 --seq 45 would fit"),
    ],
)
def test_the_advice_is_what_fits(free: int, compare: bool, said: str) -> None:
    used = fixtures.config(batch=8, seq=100, compare=compare)
    needed = Need(1000, 100)
    assert capacity.advice(used, needed, free) == said


def test_a_run_that_cannot_fit_on_the_cpu_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available", lambda device: 100 * 2**20)
    used = fixtures.config(model="llama-tiny", batch=4, seq=256, compare=True)
    sentence = (
        r"^train: out of memory for llama-tiny with batches of 4 x 256: it needs about 0\.7 GiB and 0\.1 GiB are available\. "
        r"Choose a smaller model \(`--model help` lists them\)$"
    )
    with pytest.raises(UnsupportedError, match=sentence):
        capacity.check(used)


@pytest.mark.slow
def test_an_allocation_that_fails_is_told_in_words() -> None:
    code = (
        "import resource, torch\n"
        "from ops_math.cli.train import capacity, config\n"
        "names = ['model', 'steps', 'batch', 'seq', 'seed', 'lr', 'device', 'dtype', 'precision', 'compare']\n"
        "used = config.resolve(dict.fromkeys(names))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))\n"
        "try:\n"
        "    torch.empty(2**36, dtype=torch.uint8)\n"
        "except RuntimeError as error:\n"
        "    capacity.explain(error, used, 2**29)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=SRC, capture_output=True, text=True, check=False)
    assert child.stderr.strip().splitlines()[-1] == (
        "ops_math.checks.UnsupportedError: train: out of memory for llama-tiny with batches of 4 x 256: an allocation of 64.0 GiB failed; "
        "the run needs about 0.5 GiB, and 0.5 GiB were available. --batch 3 would fit"
    )


def test_any_other_error_is_left_alone() -> None:
    capacity.explain(RuntimeError("shapes do not match"), fixtures.config(), 1)
