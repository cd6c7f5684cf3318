"""What a training run was asked to do, checked before anything is computed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ops_math import checks, settings
from ops_math.cli.device import chosen
from ops_nn.models import PRESETS, BertConfig, Preset

COMMAND = "train"
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

PLAIN, COMPILED, OPS_MATH = "plain", "compiled", "ops_math"
LABELS = {PLAIN: "plain PyTorch", COMPILED: "torch.compile", OPS_MATH: "ops-math"}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run; two runs of equal configuration and text are the same run.

    Attributes:
        model: name of a preset.
        steps: optimizer steps in all; the learning-rate schedule ends with them.
        batch: sequences a step.
        seq: tokens a sequence.
        seed: of weights, batches, masks and dropout.
        lr: peak learning rate.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: `fp32`, or the autocast dtype `bf16` or `fp16`; parameters and optimizer state are fp32 in all three.
        precision: how fp32 matrix products multiply inside ops-math's kernels.
        compare: whether plain PyTorch and torch.compile are trained beside ops-math.
        documents: whether a token sees its own document alone, with positions of its own, rather than all of its sequence.
    """

    model: str
    steps: int
    batch: int
    seq: int
    seed: int
    lr: float
    device: str
    dtype: str
    precision: str
    compare: bool
    documents: bool = False

    @property
    def preset(self) -> Preset:
        """The model's preset."""
        return PRESETS[self.model]

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast regions, or None for fp32."""
        return DTYPES[self.dtype]

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device(self.device)

    @property
    def dropout(self) -> bool:
        """Whether the model drops elements at random in training."""
        shape = self.preset.config
        return isinstance(shape, BertConfig) and max(shape.hidden_dropout, shape.attention_dropout) > 0.0

    @property
    def variants(self) -> tuple[str, ...]:
        """The runs to make, in the order in which they are shown."""
        return (PLAIN, COMPILED, OPS_MATH) if self.compare else (OPS_MATH,)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch * self.seq

    def to_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return dataclasses.asdict(self)


def resolve(asked: dict[str, Any], resumed: dict[str, Any] | None = None, origin: str = "") -> TrainConfig:
    """A checked configuration out of what was asked for.

    Args:
        asked: option names of `TrainConfig` to values; None stands for "not given".
        resumed: the configuration in a checkpoint. It supplies what was not given, and must agree with what was.
        origin: the checkpoint, for messages.

    Raises:
        ArgumentError: for a value that cannot be, or one that differs from the checkpoint's.
    """
    if resumed is not None:
        for name, value in asked.items():
            if value is not None and value != resumed.get(name, False):
                checks.fail(
                    COMMAND,
                    f"--{name}",
                    f"{resumed.get(name, False)!r}, as in the checkpoint {origin}",
                    repr(value),
                    "Leave the option out to go on with that run, or start a new one without --resume.",
                )
        asked = resumed
    name = asked["model"] if asked["model"] is not None else "llama-tiny"
    checks.one_of(COMMAND, "--model", name, tuple(PRESETS))
    preset = PRESETS[name]
    defaults: dict[str, Any] = {
        "model": name,
        "steps": 60,
        "batch": preset.batch,
        "seq": preset.seq,
        "seed": 0,
        "lr": preset.learning_rate,
        "device": str(chosen(COMMAND, None)),
        "dtype": "fp32",
        "precision": "default",
        "compare": False,
        "documents": False,
    }
    config = TrainConfig(**{key: default if asked.get(key) is None else asked[key] for key, default in defaults.items()})
    _check(config)
    return config


def _check(config: TrainConfig) -> None:
    for name in ("steps", "batch", "seq"):
        value = getattr(config, name)
        if value < 1:
            checks.fail(COMMAND, f"--{name}", "at least 1", str(value), "Give a positive number.")
    if not 0 <= config.seed < 2**63:
        checks.fail(COMMAND, "--seed", "between 0 and 2^63 - 1", str(config.seed), "Give another seed.")
    if not 0.0 < config.lr < float("inf"):
        checks.fail(COMMAND, "--lr", "a positive number", str(config.lr), f"{config.preset.learning_rate:g} suits {config.model}.")
    check_length(COMMAND, config.model, config.seq)
    checks.one_of(COMMAND, "--dtype", config.dtype, tuple(DTYPES))
    checks.one_of(COMMAND, "--precision", config.precision, settings.PRECISIONS)
    chosen(COMMAND, config.device)


def check_length(command: str, model: str, seq: int) -> None:
    """Raise ArgumentError for a sequence that is longer than the model has positions for."""
    longest = PRESETS[model].max_seq
    if longest is not None and seq > longest:
        checks.fail(command, "--seq", f"at most {longest}, the positions that {model} has", str(seq), "Shorten it.")


def cache_folder(given: Path | None) -> Path:
    """The folder for tokenizers: the argument, else OPS_MATH_CACHE, else the user's cache folder. Made when missing."""
    folder: Path
    if given is not None:
        folder = given
    elif (named := settings.cache_folder()) is not None:
        folder = Path(named)
    else:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("ops-math"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        checks.refuse(f"{COMMAND}: the cache folder {folder}", f"it cannot be made ({error.strerror})", "Name another with --cache")
    return folder
