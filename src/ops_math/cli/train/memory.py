"""Memory, operator calls and saved bytes of one training step, measured in a process of its own.

`python -m ops_math.cli.train.memory SPEC RESULT` builds one variant, warms it up, measures one step and writes JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops_math import settings
from ops_math.cli.train import variants
from ops_math.cli.train.batches import Batch
from ops_math.cli.train.config import TrainConfig
from ops_math.cli.train.engine import Run, synchronise

WARMUP_STEPS = 2
PATIENCE = 900.0
CPU_METHOD = (
    "weights, optimizer state and batch, plus the highest running sum of the CPU allocator's records (torch.profiler) over one step"
)
CUDA_METHOD = "torch.cuda.max_memory_allocated over one step"
OPERATOR = re.compile(r"(?!autograd::|torch::)\w+::|(graph_\d+_)?cpp_fused")
LAUNCH = ("cudaLaunch", "cuLaunch", "hipLaunch", "hipExtLaunch", "hipModuleLaunch", "hipExtModuleLaunch")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one training step needs.

    Attributes:
        peak_bytes: most memory held at any time in the step [B].
        method: how that was found.
        calls: outermost operator calls on the CPU, kernel launches on a GPU.
        saved_bytes: what the forward keeps for the backward besides parameters [B].
        error: why there are no numbers, or "".
    """

    peak_bytes: int = 0
    method: str = ""
    calls: int = 0
    saved_bytes: int = 0
    error: str = ""


def measure_apart(name: str, config: TrainConfig, batch: Batch) -> Measurement:
    """Measure one variant in a fresh process, so that nothing another one left behind is counted."""
    with tempfile.TemporaryDirectory(prefix="ops-math-memory-") as folder:
        spec, result = Path(folder, "spec.json"), Path(folder, "result.json")
        spec.write_text(json.dumps({"variant": name, "config": config.to_json()}))
        save_file({name: t.cpu() for name, t in batch.named().items()}, Path(folder, "batch.safetensors"))
        # `-m` looks in the working folder first: the child finds the same ops_math wherever this one was imported from.
        sources = Path(__file__).parents[3]
        command = [sys.executable, "-m", __name__, str(spec), str(result)]
        try:
            child = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            return Measurement(error=f"no answer within {PATIENCE:.0f} s")
        if child.returncode or not result.exists():
            lines = [line for line in child.stderr.splitlines() if line.strip()]
            return Measurement(error=f"its process ended with code {child.returncode}: {lines[-1] if lines else 'no message'}")
        return Measurement(**json.loads(result.read_text()))


def measure(run: Run, batch: Batch) -> Measurement:
    """Measure one step of a run, after a warm-up that compiles and fills caches."""
    for step in range(WARMUP_STEPS):
        run.step(batch, step)
    saved = saved_bytes(run, batch)
    if run.device.type == "cuda":
        return Measurement(cuda_peak(run, batch), CUDA_METHOD, kernel_launches(run, batch), saved)
    peak, calls = cpu_peak_and_calls(run, batch)
    return Measurement(peak, CPU_METHOD, calls, saved)


def saved_bytes(run: Run, batch: Batch) -> int:
    """Bytes of the distinct storages that the forward saves for the backward, without parameters and buffers [B].

    Custom `autograd.Function`s and compiled graphs save through the same hooks and are counted alike.
    """
    own = {_address(tensor) for tensor in (*run.model.parameters(), *run.model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _address(tensor) not in own:
            kept[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # The loss holds the graph, the graph the storages: none is freed and its address used again while we count.
        loss = run.loss(batch)
        total = sum(kept.values())
    del loss
    return total


def cpu_peak_and_calls(run: Run, batch: Batch) -> tuple[int, int]:
    """Peak bytes and outermost operator calls of one step on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run.step(batch, WARMUP_STEPS)
    records = ((event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    state = (value for record in run.optimizer.state.values() for value in record.values())
    before = resident_bytes((*run.model.parameters(), *run.model.buffers(), *state, *batch.named().values()))
    return before + highest_sum(records), outermost_operators(profile.events())


def highest_sum(records: Iterable[tuple[int, int]]) -> int:
    """Largest running sum of allocations [B], at least 0, of (time, bytes) records; a release has negative bytes."""
    total = highest = 0
    for _, size in sorted(records, key=lambda record: record[0]):
        total += size
        highest = max(highest, total)
    return highest


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind the tensors."""
    return sum({_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def outermost_operators(events: Iterable[Any]) -> int:
    """Operators and compiled kernels that are not called by another operator: what Python and autograd ask for."""
    return sum(1 for event in events if OPERATOR.match(event.name) and not any(OPERATOR.match(parent.name) for parent in _parents(event)))


def cuda_peak(run: Run, batch: Batch) -> int:
    """Peak bytes that PyTorch's allocator held during one step on a GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(run.device)
    run.step(batch, WARMUP_STEPS)
    synchronise(run.device)
    return torch.cuda.max_memory_allocated(run.device)


def kernel_launches(run: Run, batch: Batch) -> int:
    """Launches that the host makes during one step; a CUDA graph counts as one."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        run.step(batch, WARMUP_STEPS)
        synchronise(run.device)
    names = (event.name() for event in profile.profiler.kineto_results.events())
    return sum(name.startswith((*LAUNCH, "cudaGraphLaunch", "hipGraphLaunch")) for name in names)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _parents(event: Any) -> Iterator[Any]:
    parent = event.cpu_parent
    while parent is not None:
        yield parent
        parent = parent.cpu_parent


def main(spec_path: str, result_path: str) -> None:
    """Measure what the specification says and write the result."""
    spec = json.loads(Path(spec_path).read_text())
    config = TrainConfig(**spec["config"])
    settings.precision(config.precision)
    batch = Batch(**load_file(Path(spec_path).with_name("batch.safetensors"))).to(config.torch_device)
    measurement = measure(variants.make(spec["variant"], config)[0], batch)
    Path(result_path).write_text(json.dumps(dataclasses.asdict(measurement)))


if __name__ == "__main__":
    main(*sys.argv[1:])
