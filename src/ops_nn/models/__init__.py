"""Plain PyTorch baselines, with the parameter names of public checkpoints and without a line of `ops_math`."""

from ops_nn.models.bert import BertConfig, BertForMaskedLM
from ops_nn.models.llama import LlamaConfig, LlamaForCausalLM
from ops_nn.models.output import IGNORE_INDEX, ModelOutput
from ops_nn.models.presets import PRESETS, Preset, build

__all__ = [
    "IGNORE_INDEX",
    "PRESETS",
    "BertConfig",
    "BertForMaskedLM",
    "LlamaConfig",
    "LlamaForCausalLM",
    "ModelOutput",
    "Preset",
    "build",
]
