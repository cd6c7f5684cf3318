"""Optimizers that step all parameters of a model in one pass over memory."""

from ops_nn.optim.adamw import AdamW
from ops_nn.optim.clipping import ClipScale, clip_scale

__all__ = ["AdamW", "ClipScale", "clip_scale"]
