"""Fused operators with hand-written backward for training large models, on GPUs through Triton and on the CPU.

Importing this package registers operators with PyTorch and does nothing else: no CUDA context, no Triton, no environment.
"""

from ops_math import layout, schedule
from ops_math._version import __version__
from ops_math.blocks.accumulate import Accumulation, accumulate_into_grad
from ops_math.blocks.casts import cast_weights
from ops_math.blocks.packing import Packing, pack_weights
from ops_math.blocks.recognise import PartReport, part_of
from ops_math.blocks.residual import residual_attention, residual_mlp, residual_norm
from ops_math.blocks.streams import Narrowed, Unsummed
from ops_math.catalog import public_functions as _public_functions
from ops_math.catalog import stands_for
from ops_math.checks import ArgumentError, BudgetError, UnsupportedError, VerificationError
from ops_math.debug import debug
from ops_math.debug import observed as _observed
from ops_math.graphs import GraphedStep, graphed_step
from ops_math.ops.adamw.op import AdamWGroup, AdamWTables, adamw
from ops_math.ops.attention.op import attention, attention_qkv
from ops_math.ops.cross_entropy.op import cross_entropy
from ops_math.ops.cross_entropy.op_linear import linear_cross_entropy
from ops_math.ops.dropout.op import dropout
from ops_math.ops.figures.op import FigureTable
from ops_math.ops.glu.op import geglu, geglu_packed, swiglu, swiglu_packed
from ops_math.ops.glu.op_gelu import gelu
from ops_math.ops.layer_norm.op import add_layer_norm, layer_norm
from ops_math.ops.linear.op import linear
from ops_math.ops.rms_norm.op import add_rms_norm, rms_norm
from ops_math.ops.rope.op import rope, rope_qkv
from ops_math.ops.softmax.op import softmax
from ops_math.recompute import recompute_norms
from ops_math.registered import RegisteredOperator, register, unregister
from ops_math.repeatable import Determinism, DeterminismWarning, determinism
from ops_math.rng import Rng
from ops_math.schedule import calibrate
from ops_math.settings import active as is_enabled
from ops_math.settings import checked, enabled, force, precision
from ops_math.stats import reset_stats, stats

__all__ = [
    "Accumulation",
    "AdamWGroup",
    "AdamWTables",
    "ArgumentError",
    "BudgetError",
    "Determinism",
    "DeterminismWarning",
    "FigureTable",
    "GraphedStep",
    "Narrowed",
    "Packing",
    "PartReport",
    "RegisteredOperator",
    "Rng",
    "Unsummed",
    "UnsupportedError",
    "VerificationError",
    "__version__",
    "accumulate_into_grad",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_qkv",
    "calibrate",
    "cast_weights",
    "checked",
    "cross_entropy",
    "debug",
    "determinism",
    "dropout",
    "enabled",
    "force",
    "geglu",
    "geglu_packed",
    "gelu",
    "graphed_step",
    "is_enabled",
    "layer_norm",
    "layout",
    "linear",
    "linear_cross_entropy",
    "pack_weights",
    "part_of",
    "precision",
    "recompute_norms",
    "register",
    "reset_stats",
    "residual_attention",
    "residual_mlp",
    "residual_norm",
    "rms_norm",
    "rope",
    "rope_qkv",
    "schedule",
    "softmax",
    "stands_for",
    "stats",
    "swiglu",
    "swiglu_packed",
    "unregister",
]

for _name in _public_functions():  # `om.debug` sees calls of the public operators; off, it costs one test of an attribute
    globals()[_name] = _observed(globals()[_name])
