"""Named model sizes, each with the batch that a person would start from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ops_nn.models.bert import BertConfig, BertForMaskedLM
from ops_nn.models.llama import LlamaConfig, LlamaForCausalLM, RopeScaling


@dataclass(frozen=True)
class Preset:
    """A model size.

    Attributes:
        name: what `build` and `ops-math train --model` take.
        description: one line for people.
        config: the shape; its class says which family.
        batch: default batch [sequences].
        seq: default sequence length [tokens].
        learning_rate: default peak learning rate.
    """

    name: str
    description: str
    config: LlamaConfig | BertConfig
    batch: int
    seq: int
    learning_rate: float

    @property
    def masked(self) -> bool:
        """Whether it learns masked tokens (BERT) rather than the next one (Llama)."""
        return isinstance(self.config, BertConfig)

    @property
    def max_seq(self) -> int | None:
        """Longest sequence [tokens] it has positions for, or None when it is not limited."""
        return self.config.max_position_embeddings if isinstance(self.config, BertConfig) else None


_LLAMA_3_SCALING = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)

_ALL = (
    Preset(
        "llama-tiny",
        "10.5 M parameters, 10 layers of 256; about half a second a step on two CPU cores",
        LlamaConfig(8192, 256, 832, num_layers=10, num_heads=4, num_kv_heads=2, head_dim=64),
        batch=4,
        seq=256,
        learning_rate=2e-3,
    ),
    Preset(
        "llama-150m",
        "151 M parameters, 20 layers of 768; for any GPU of today",
        LlamaConfig(32768, 768, 2048, num_layers=20, num_heads=12, num_kv_heads=4, head_dim=64),
        batch=8,
        seq=1024,
        learning_rate=6e-4,
    ),
    Preset(
        "llama-1b",
        "1.24 B parameters, the shape of Llama 3.2 1B",
        LlamaConfig(
            128256,
            2048,
            8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            rope_theta=500_000.0,
            rope_scaling=_LLAMA_3_SCALING,
        ),
        batch=8,
        seq=2048,
        learning_rate=3e-4,
    ),
    Preset(
        "bert-tiny",
        "4.7 M parameters, 3 layers of 256; for trying masked-language training on a CPU",
        BertConfig(8192, 256, 1024, num_layers=3, num_heads=4, max_position_embeddings=512),
        batch=8,
        seq=128,
        learning_rate=1e-3,
    ),
    Preset(
        "bert-base",
        "110 M parameters, 12 layers of 768",
        BertConfig(30522, 768, 3072, num_layers=12, num_heads=12),
        batch=32,
        seq=512,
        learning_rate=1e-4,
    ),
    Preset(
        "bert-large",
        "335 M parameters, 24 layers of 1024",
        BertConfig(30522, 1024, 4096, num_layers=24, num_heads=16),
        batch=32,
        seq=512,
        learning_rate=1e-4,
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def build(
    name: str,
    vocab_size: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM | BertForMaskedLM:
    """A freshly initialised model of a named size.

    Args:
        name: a key of `PRESETS`.
        vocab_size: replaces the preset's vocabulary [tokens].
        seed: of the initial weights; PyTorch's global generator is neither read nor moved. The same seed gives
            the same weights on the same device type.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for a name that is not a preset.
    """
    if name not in PRESETS:
        raise ValueError(f"build: name must be one of {', '.join(PRESETS)}; got {name!r}; pick one of these")
    config = PRESETS[name].config
    if vocab_size is not None:
        config = dataclasses.replace(config, vocab_size=vocab_size)
    device = torch.device(device)
    # The modules' own initialisers draw from the global generator; what they draw is replaced below.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        model = LlamaForCausalLM(config) if isinstance(config, LlamaConfig) else BertForMaskedLM(config)
    model.reset_parameters(torch.Generator(device=device).manual_seed(seed))
    return model if dtype == torch.float32 else model.to(dtype)
