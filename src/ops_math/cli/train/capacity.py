"""How much memory a run needs, before it is started and after it has failed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ops_math import checks
from ops_math.cli.train.config import COMMAND, TrainConfig
from ops_nn.models import build

# fp32 weight and two AdamW moments stay; the gradient lives within a step.
BYTES_KEPT, BYTES_WEIGHT, BYTES_GRADIENT = 12, 4, 4
MOST_TOKENS = 2**40  # in a step; shapes of more overflow
# The inputs of matrix products, which every implementation keeps, are more than a quarter of what plain PyTorch keeps.
SURELY_SAVED = 4
ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)|tried to allocate (\d+) bytes")


class Need(NamedTuple):
    """Memory [B]: `fixed` whatever the batch, `per_sequence` for each sequence of it."""

    fixed: int
    per_sequence: int

    def total(self, batch: int) -> int:
        """For a batch."""
        return self.fixed + self.per_sequence * batch


def need(config: TrainConfig, optimizer: bool = True) -> Need:
    """An estimate for plain PyTorch, from a forward that computes shapes only.

    Weights and optimizer state (unless there is none) of every run, one gradient, and what the forward saves for the backward together
    with two fp32 copies of the logits.
    """
    parameters, saved = _shapes(config)
    fixed = parameters * ((BYTES_KEPT if optimizer else BYTES_WEIGHT) * len(config.variants) + BYTES_GRADIENT)
    logits = 4 * config.seq * config.preset.config.vocab_size
    return Need(fixed, saved + 2 * logits)


def _shapes(config: TrainConfig) -> tuple[int, int]:
    """Number of parameters, and bytes that one sequence saves for the backward."""
    with FakeTensorMode():
        model = build(config.model)
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        ids = torch.zeros(1, config.seq, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", config.autocast_dtype or torch.bfloat16, enabled=config.autocast_dtype is not None):
                loss = model(ids, ids).loss
        total = sum(kept.values())
        del loss
    return sum(parameter.numel() for parameter in model.parameters()), total


def available(device: torch.device) -> int:
    """Memory that can still be had [B]."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    limits = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable")]
    ceiling, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if ceiling and used and ceiling[0].isdecimal():
        limits.append(int(ceiling[0]) - int(used[0]))
    return min(limits, default=2**62)


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def check(config: TrainConfig, command: str = COMMAND, optimizer: bool = True) -> None:
    """Refuse a run on the CPU that cannot fit: the system would kill it, or other programs, without a word.

    On a GPU the allocator raises in words, so the run may try. Alone, ops-math may save less than this estimate of plain
    PyTorch, so only what it surely needs counts.

    Raises:
        UnsupportedError: with what would be needed, what there is and what would fit.
    """
    if config.tokens_per_step > MOST_TOKENS:
        checks.refuse(f"{command}: a step of {config.tokens_per_step:,} tokens", "no memory holds it", "Give a smaller --batch or --seq")
    if config.torch_device.type != "cpu":
        return
    needed, free = need(config, optimizer), available(config.torch_device)
    least = needed.total(config.batch) if config.compare else needed.fixed + needed.per_sequence * config.batch // SURELY_SAVED
    if least > free:
        refuse(config, needed, free, f"it needs about {gib(least)} and {gib(free)} are available", command)


def refuse(config: TrainConfig, needed: Need, free: int, what: str, command: str = COMMAND) -> NoReturn:
    """Say what was asked for and what would fit."""
    checks.refuse(
        f"{command}: out of memory for {config.model} with batches of {config.batch:,} x {config.seq:,}", what, advice(config, needed, free)
    )


def advice(config: TrainConfig, needed: Need, free: int) -> str:
    """What would fit into `free` bytes."""
    fits = (free - needed.fixed) // needed.per_sequence
    if fits >= 1:
        return f"--batch {min(fits, max(1, config.batch - 1))} would fit"
    alone = needed.fixed // (BYTES_KEPT * len(config.variants) + BYTES_GRADIENT) * (BYTES_KEPT + BYTES_GRADIENT)
    if config.compare and alone + needed.per_sequence <= free:
        return f"--no-compare --batch {min(config.batch, (free - alone) // needed.per_sequence)} would fit"
    short = int((free - alone) / needed.per_sequence * config.seq * 0.9)
    if short >= 16:
        return f"{'--no-compare ' if config.compare else ''}--batch 1 --seq {short} would fit"
    return "Choose a smaller model (`--model help` lists them)"


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised this."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def explain(error: BaseException, config: TrainConfig, free_at_start: int) -> None:
    """Turn an allocator's error into words; any other error is left alone.

    Raises:
        UnsupportedError: when `error` is an out-of-memory error.
    """
    if not out_of_memory(error):
        return
    asked = asked_for(error)
    needed = need(config)
    refuse(
        config,
        needed,
        free_at_start,
        f"{asked}; the run needs about {gib(needed.total(config.batch))}, and {gib(free_at_start)} were available",
    )


def asked_for(error: BaseException) -> str:
    """What an allocator could not give, in words."""
    found = ASKED.search(str(error))
    return "an allocation failed" if found is None else f"an allocation of {found[1] or gib(int(found[2]))} failed"


def gib(size: int) -> str:
    """A size in GiB."""
    return f"{size / 2**30:.1f} GiB"
