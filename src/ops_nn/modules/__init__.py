"""Modules for those who write new models: thin, and with the parameter names that checkpoints use.

`om.residual_attention` and `om.residual_mlp` know them. Their forwards call the operators too, so they are as fast on their own but
for the residual sums.
"""

from ops_nn.modules.attention import Attention
from ops_nn.modules.loss import CrossEntropy, LinearCrossEntropy
from ops_nn.modules.mlp import SwiGLU
from ops_nn.modules.norms import LayerNorm, RMSNorm
from ops_nn.modules.rotary import RotaryEmbedding

__all__ = ["Attention", "CrossEntropy", "LayerNorm", "LinearCrossEntropy", "RMSNorm", "RotaryEmbedding", "SwiGLU"]
