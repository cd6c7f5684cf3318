"""A model and a text small enough that a whole run takes a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ops_math.cli.train import data
from ops_math.cli.train.config import TrainConfig
from ops_math.cli.train.data import Data
from ops_nn.models import PRESETS, BertConfig, LlamaConfig, Preset

LLAMA = Preset("small", "for tests", LlamaConfig(300, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8), 2, 16, 1e-2)
BERT = Preset("small-bert", "for tests", BertConfig(300, 32, 48, num_layers=2, num_heads=4, max_position_embeddings=32), 2, 16, 1e-2)
DEFAULTS: dict[str, Any] = {
    "model": "small",
    "steps": 8,
    "batch": 2,
    "seq": 16,
    "seed": 0,
    "lr": 1e-2,
    "device": "cpu",
    "dtype": "fp32",
    "precision": "default",
    "compare": False,
}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**DEFAULTS, **changes})


def add_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    for preset in (LLAMA, BERT):
        monkeypatch.setitem(PRESETS, preset.name, preset)


def write_text(path: Path, words: int = 4000) -> Path:
    """English-looking text, the same each time."""
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))) for _ in range(200)]
    lines = (" ".join(draw.choices(vocabulary, k=12)) for _ in range(words // 12))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(tmp_path: Path, used: TrainConfig) -> Data:
    return data.load(write_text(tmp_path / "text.txt"), used, tmp_path)
