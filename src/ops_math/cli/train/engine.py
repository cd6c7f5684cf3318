"""One training run: a model, its optimizer, and a step that depends on nothing but them, the seed and the step's number.

Parameters, gradients and optimizer state are fp32. With `--dtype bf16` or `fp16` the forward runs under autocast, on the
CPU as on a GPU; fp16 scales the loss with PyTorch's own GradScaler.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ops_math import checks
from ops_math.cli.train.batches import Batch, seed_of
from ops_math.cli.train.config import LABELS, TrainConfig

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
LARGEST_NORM = 1.0
WARMUP_SHARE, LAST_SHARE = 0.1, 0.1
WEIGHTS, OPTIMIZER = "weights", "optimizer"


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth of the steps, then a cosine down to a tenth of the peak at the last step.

    Args:
        step: number of the step, from 0.
        steps: steps in all.
        peak: the highest rate.
    """
    warmup = max(1, round(steps * WARMUP_SHARE))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return peak * (LAST_SHARE + (1.0 - LAST_SHARE) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))


class Run:
    """A model in training.

    Args:
        name: which variant this is.
        model: the model, on its device, in fp32.
        forward: what to call instead of the model itself, e.g. its compiled form; it shares the model's parameters.
        config: the run's configuration.
        masks: which of the unrelated streams of dropout masks it draws.
    """

    def __init__(self, name: str, model: nn.Module, forward: Callable[..., Any], config: TrainConfig, masks: int = 0) -> None:
        self.name, self.model, self.forward, self.config = name, model, forward, config
        self.device = config.torch_device
        self.masks = masks
        self.losses: list[float] = []
        self.step_times: list[float] = []
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.dtype == "fp16")

    @property
    def label(self) -> str:
        """The variant's name for people."""
        return LABELS[self.name]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The region in which a forward runs."""
        if self.config.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.config.autocast_dtype)

    def loss(self, batch: Batch) -> Tensor:
        """Forward of one batch; the loss, a scalar tensor with its graph."""
        with self.autocast():
            loss: Tensor = self.forward(**batch.named()).loss
        return loss

    def step(self, batch: Batch, step: int) -> Tensor:
        """Forward, backward, clipping and update.

        Args:
            batch: on the run's device.
            step: its number, which decides the learning rate and the random numbers.

        Returns:
            The loss before the update [nats per token], a detached scalar.
        """
        torch.manual_seed(seed_of(self.config.seed, f"step/{self.masks}/{step}"))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.steps, self.config.lr)
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Freed at once: in a comparison the runs' gradients would otherwise be alive together.
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def timed_step(self, batch: Batch, step: int) -> None:
        """One step, its loss and its time [s] recorded; on a GPU from idle to idle."""
        synchronise(self.device)
        begin = time.perf_counter()
        loss = self.step(batch, step)
        synchronise(self.device)
        self.step_times.append(time.perf_counter() - begin)
        self.losses.append(loss.item())

    @torch.no_grad()
    def validation_loss(self, batches: list[Batch]) -> float:
        """Mean loss over held-out batches, each weighted by its counted tokens [nats per token].

        The plain forward of the model is evaluated, also for a compiled run: other shapes would compile again.
        """
        self.model.eval()
        total = counted = 0.0
        for batch in batches:
            tokens = int((batch.labels >= 0).sum())
            with self.autocast():
                loss = self.model(**batch.to(self.device).named()).loss
            total, counted = total + float(loss) * tokens, counted + tokens
        self.model.train()
        return total / counted

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name: `weights/<parameter>` and `optimizer/<parameter>/<state>`."""
        named = {f"{WEIGHTS}/{name}": tensor.detach() for name, tensor in self._weights()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                named[f"{OPTIMIZER}/{name}/{key}"] = value
        return named

    def load_tensors(self, tensors: dict[str, Tensor], origin: str) -> None:
        """Take what `tensors` gave.

        Raises:
            UnsupportedError: when names or shapes are not this model's.
        """
        expected = {f"{WEIGHTS}/{name}": tensor for name, tensor in self._weights()}
        given = {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
        wrong = sorted(expected.keys() ^ given.keys()) or sorted(n for n in expected if expected[n].shape != given[n].shape)
        if wrong:
            checks.refuse(
                f"train: the checkpoint {origin}",
                f"its weights are not those of {self.config.model} ({len(wrong)} differ, the first is {wrong[0]})",
                "Resume with the model that it was written for",
            )
        with torch.no_grad():
            for name, tensor in expected.items():
                tensor.copy_(given[name])
        for name, parameter in self.model.named_parameters():
            prefix = f"{OPTIMIZER}/{name}/"
            state = {key.removeprefix(prefix): value.to(parameter.device) for key, value in tensors.items() if key.startswith(prefix)}
            if state:
                self.optimizer.state[parameter] = state

    def history(self) -> dict[str, Any]:
        """What a checkpoint keeps besides tensors, as plain values."""
        return {"losses": self.losses, "step_times": self.step_times, "scaler": self.scaler.state_dict()}

    def load_history(self, history: dict[str, Any]) -> None:
        """Take what `history` gave."""
        self.losses, self.step_times = list(history["losses"]), list(history["step_times"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(history["scaler"])

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        persistent = self.model.state_dict(keep_vars=True).keys()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in persistent)


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
