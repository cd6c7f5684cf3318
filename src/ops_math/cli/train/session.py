"""The training loop: one run, or several interleaved step by step from the same weights on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ops_math import checks
from ops_math.cli.train import capacity, checkpoint, variants
from ops_math.cli.train.batches import generator
from ops_math.cli.train.checkpoint import State
from ops_math.cli.train.config import COMMAND, COMPILED, PLAIN, TrainConfig
from ops_math.cli.train.data import Data
from ops_math.cli.train.engine import Run

NOISE_FLOOR_STEPS = 20


class Session:
    """Runs in training, side by side.

    Attributes:
        runs: by variant, in the order in which they are shown; one that turns out to be impossible is dropped.
        unavailable: the reasons of those that were dropped.
        step: steps done.
        adopted: what ops-math replaced in its run's model, in words.
        starts: the steps at which a process began to train; the first few after each are not timed.
    """

    def __init__(self, config: TrainConfig, data: Data, data_path: Path | None = None) -> None:
        self.config, self.data, self.data_path = config, data, data_path
        self.runs: dict[str, Run] = {}
        self.unavailable: dict[str, str] = {}
        self.step = 0
        self.starts: list[int] = [0]
        self.adopted: list[str] = []
        for name in config.variants:
            try:
                self.runs[name], adopted = variants.make(name, config)
                self.adopted.extend(adopted)
            except variants.Unavailable as error:
                self.unavailable[name] = str(error)

    def advance(self, finished: Callable[[], None], stop: Callable[[], bool]) -> None:
        """Train until the last step, or until `stop()` holds after a step.

        Runs take turns in the order A B C, then C B A, and so on, so that a machine that slows down slows all of them.

        Args:
            finished: called after each step, when every run has made it.
            stop: asked before each step.
        """
        while self.step < self.config.steps and not stop():
            batch = self.data.batch(self.step).to(self.config.torch_device)
            names = list(self.runs)
            for name in names if self.step % 2 == 0 else reversed(names):
                run = self.runs[name]
                if name != COMPILED or run.step_times:
                    run.timed_step(batch, self.step)
                    continue
                try:
                    run.timed_step(batch, self.step)
                except RuntimeError as error:
                    if capacity.out_of_memory(error):
                        raise
                    # The compiler is met at the first step; without one the comparison goes on.
                    self.unavailable[name] = f"it failed to compile ({variants.first_line(error)})"
                    del self.runs[name]
            self.step += 1
            finished()

    def save(self, path: Path) -> None:
        """Write a checkpoint of all runs."""
        state = State(
            step=self.step,
            starts=self.starts,
            config=self.config.to_json(),
            data_digest=self.data.digest,
            data_path=None if self.data_path is None else str(self.data_path.resolve()),
            runs={name: run.history() for name, run in self.runs.items()},
            unavailable=self.unavailable,
            versions=checkpoint.versions(),
        )
        checkpoint.write(path, state, self.runs)

    def resume(self, path: Path, state: State) -> None:
        """Continue where a checkpoint stopped; its configuration must be this session's.

        Raises:
            ArgumentError: when the text is another than the one the checkpoint was trained on.
            UnsupportedError: when the weights do not fit.
        """
        if state.data_digest != self.data.digest:
            needs, got = f"the text of {path} (tokens {state.data_digest})", f"{self.data.source} (tokens {self.data.digest})"
            checks.fail(COMMAND, "--data", needs, got, "Give the text that the run began with.")
        self.unavailable.update(state.unavailable)
        for name in state.unavailable:
            self.runs.pop(name, None)
        checkpoint.restore(path, state, self.runs)
        self.step = state.step
        self.starts = [*state.starts, state.step]


def noise_floor(config: TrainConfig, data: Data, finished: Callable[[], None], stop: Callable[[], bool]) -> list[float]:
    """Losses of the plain run from weights that were moved by one ulp, each up or down at random. At most 60 steps.

    How far two runs part that differ by rounding alone: the measure for every other difference. A model with dropout draws
    other masks too: from one seed PyTorch, its compiler and ops-math each draw masks of their own.
    """
    model = variants.weights(config)
    perturb(model, config.seed)
    run = Run(PLAIN, model, model, config, masks=1)
    while len(run.losses) < min(config.steps, NOISE_FLOOR_STEPS) and not stop():
        step = len(run.losses)
        run.timed_step(data.batch(step).to(config.torch_device), step)
        finished()
    return run.losses


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Move every parameter's elements to the next larger or smaller number."""
    random = generator(seed, "perturbation")
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=random).to(parameter.device) < 0.5
        toward = torch.where(up, float("inf"), float("-inf")).to(parameter.dtype)
        parameter.copy_(torch.nextafter(parameter, toward))
