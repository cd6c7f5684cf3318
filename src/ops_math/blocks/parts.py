"""The table of accepted parts: for each known module its classes, its structure, its keywords, and what the fused path reads.

A module is known when its class is listed here, its forward is that class's own, its children are what the row says, and neither it
nor a descendant carries hooks, parametrisations or replaced forwards. Names of classes are compared, so nothing is imported.
"""

from __future__ import annotations

from typing import NamedTuple

_MODELS = "transformers.models."
_OURS = "ops_nn.models."
_MODULES = "ops_nn.modules."


class Part(NamedTuple):
    """One row.

    `classes` are dotted names. `children` pairs each child with the kinds it may be; a child listed in `optional` may be missing.
    `attributes` are the plain attributes that the known forward may read: an instance with another one is of a version not seen.
    A `layer` is a holder: its own forward is not run, so only the children that `uses` names for the role matter.
    `own_keywords` are what the module's own forward takes besides the hidden states (or its queries, keys and values);
    `reads` says what the fused path takes from the module, for people.
    """

    kind: str
    role: str
    classes: tuple[str, ...]
    children: tuple[tuple[str, tuple[str, ...]], ...] = ()
    optional: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    own_keywords: tuple[str, ...] = ()
    reads: str = ""
    uses: tuple[tuple[str, tuple[str, ...]], ...] = ()


# Keywords that a block understands for every attention it knows, whether or not the module's own forward has them.
BLOCK_KEYWORDS: dict[str, str] = {
    "causal": "True: a query sees itself and what stands before it; overrides what the module says",
    "mask": "additive, or boolean with True where a key is seen; broadcasts to [B, H, S, S]",
    "key_padding_mask": "bool [B, S], True at real tokens (for MultiheadAttention, as in PyTorch, True at padding)",
    "window": "(left, right): how far a query sees, -1 for no limit",
    "position_ids": "int [B, S] or [S]: rows of the rotary tables",
    "cu_seqlens": "int32 [documents + 1]: where packed documents begin and end in x [T, C] or [1, T, C]",
    "max_seqlen": "length of the longest packed document",
}
# Keywords of the block itself, attention or MLP: dropout of the branch before it is added, and where random numbers come from.
BRANCH_KEYWORDS: dict[str, str] = {
    "dropout_p": "chance of dropping an element of the branch before it is added",
    "rng": "ops_math.Rng for every mask of the call; without it keys are drawn from PyTorch's generator",
}
# What Hugging Face models hand to every attention, with no effect on a training step while they hold these values.
_WITHOUT_EFFECT = ("cache", "past_key_value", "past_key_values", "use_cache", "cache_position", "position_ids", "output_attentions")
_HF_ATTENTION = ("position_embeddings", "attention_mask", *_WITHOUT_EFFECT)

_LINEAR = ("linear",)
_ACTIVATIONS = ("silu", "gelu", "relu")

LEAVES: tuple[Part, ...] = (
    Part(
        "linear",
        "leaf",
        ("torch.nn.modules.linear.Linear", "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"),
        reads="weight, bias",
    ),
    Part("dropout", "leaf", ("torch.nn.modules.dropout.Dropout",), attributes=("p", "inplace"), reads="p, training"),
    Part("silu", "leaf", ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"), attributes=("inplace",)),
    Part(
        "gelu",
        "leaf",
        (
            "torch.nn.modules.activation.GELU",
            "transformers.activations.GELUActivation",
            "transformers.activations.GELUTanh",
            "transformers.activations.PytorchGELUTanh",
        ),
        attributes=("approximate", "act"),
        reads="approximate, or the function in act",
    ),
    Part("relu", "leaf", ("torch.nn.modules.activation.ReLU",), attributes=("inplace",)),
)

NORMS: tuple[Part, ...] = (
    Part(
        "rms_norm",
        "norm",
        (
            "torch.nn.modules.normalization.RMSNorm",
            _OURS + "llama.LlamaRMSNorm",
            _MODULES + "norms.RMSNorm",
            _MODELS + "llama.modeling_llama.LlamaRMSNorm",
            _MODELS + "qwen2.modeling_qwen2.Qwen2RMSNorm",
            _MODELS + "mistral.modeling_mistral.MistralRMSNorm",
        ),
        attributes=("eps", "variance_epsilon", "normalized_shape", "elementwise_affine", "hidden_size", "weight_offset"),
        reads="weight; eps or variance_epsilon; weight_offset of ops_nn.modules.RMSNorm",
    ),
    Part(
        "layer_norm",
        "norm",
        ("torch.nn.modules.normalization.LayerNorm", _MODULES + "norms.LayerNorm"),
        attributes=("eps", "normalized_shape", "elementwise_affine"),
        reads="weight, bias, eps",
    ),
)

ATTENTIONS: tuple[Part, ...] = (
    Part(
        "llama_attention",
        "attention",
        (_OURS + "llama.LlamaAttention", _MODULES + "attention.Attention"),
        children=tuple((name, _LINEAR) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        attributes=("num_heads", "num_kv_heads", "head_dim", "causal", "scale", "window", "softcap", "dropout_p"),
        own_keywords=("position_embeddings",),
        reads="q_proj, k_proj, v_proj, o_proj; num_heads, num_kv_heads, head_dim",
    ),
    Part(
        "hf_llama_attention",
        "attention",
        (
            _MODELS + "llama.modeling_llama.LlamaAttention",
            _MODELS + "qwen2.modeling_qwen2.Qwen2Attention",
            _MODELS + "mistral.modeling_mistral.MistralAttention",
        ),
        children=tuple((name, _LINEAR) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        attributes=(
            "config",
            "layer_idx",
            "head_dim",
            "num_key_value_groups",
            "scaling",
            "attention_dropout",
            "is_causal",
            "sliding_window",
            "layer_type",
        ),
        own_keywords=_HF_ATTENTION,
        reads="q_proj, k_proj, v_proj (with biases), o_proj; head_dim, scaling, attention_dropout, is_causal; config._attn_implementation",
    ),
    Part(
        "multihead_attention",
        "attention",
        ("torch.nn.modules.activation.MultiheadAttention",),
        children=(("out_proj", _LINEAR),),
        attributes=(
            "_qkv_same_embed_dim",
            "add_zero_attn",
            "batch_first",
            "bias_k",
            "bias_v",
            "dropout",
            "embed_dim",
            "head_dim",
            "kdim",
            "num_heads",
            "vdim",
        ),
        own_keywords=("attn_mask", "key_padding_mask", "is_causal", "need_weights", "average_attn_weights"),
        reads="in_proj_weight, in_proj_bias, out_proj, num_heads, dropout, batch_first; the first element of what it returns",
    ),
    Part(
        "encoder_layer",
        "layer",
        ("torch.nn.modules.transformer.TransformerEncoderLayer",),
        children=(
            ("self_attn", ("multihead_attention",)),
            ("linear1", _LINEAR),
            ("dropout", ("dropout",)),
            ("linear2", _LINEAR),
            ("norm1", ("layer_norm",)),
            ("norm2", ("layer_norm",)),
            ("dropout1", ("dropout",)),
            ("dropout2", ("dropout",)),
            ("activation", _ACTIVATIONS),
        ),
        optional=("activation",),
        attributes=("activation", "activation_relu_or_gelu", "norm_first"),
        own_keywords=("attn_mask", "key_padding_mask", "is_causal"),
        reads="as attention self_attn and dropout1; as MLP linear1, activation, dropout, linear2, dropout2",
        uses=(("attention", ("self_attn", "dropout1")), ("mlp", ("linear1", "activation", "dropout", "linear2", "dropout2"))),
    ),
    Part(
        "bert_self_attention",
        "inner",
        (_OURS + "bert.BertSelfAttention", _MODELS + "bert.modeling_bert.BertSelfAttention"),
        children=(("query", _LINEAR), ("key", _LINEAR), ("value", _LINEAR), ("dropout", ("dropout",))),
        attributes=(
            "config",
            "num_attention_heads",
            "attention_head_size",
            "all_head_size",
            "scaling",
            "is_decoder",
            "is_causal",
            "layer_idx",
        ),
    ),
    Part(
        "bert_output",
        "inner",
        (
            _OURS + "bert.BertSelfOutput",
            _OURS + "bert.BertOutput",
            _MODELS + "bert.modeling_bert.BertSelfOutput",
            _MODELS + "bert.modeling_bert.BertOutput",
        ),
        children=(("dense", _LINEAR), ("LayerNorm", ("layer_norm",)), ("dropout", ("dropout",))),
    ),
    Part(
        "bert_intermediate",
        "inner",
        (_OURS + "bert.BertIntermediate", _MODELS + "bert.modeling_bert.BertIntermediate"),
        children=(("dense", _LINEAR), ("intermediate_act_fn", ("silu", "gelu", "relu"))),
        optional=("intermediate_act_fn",),
        attributes=("intermediate_act_fn",),
    ),
    Part(
        "bert_attention",
        "attention",
        (_OURS + "bert.BertAttention", _MODELS + "bert.modeling_bert.BertAttention"),
        children=(("self", ("bert_self_attention",)), ("output", ("bert_output",))),
        attributes=("is_cross_attention",),
        own_keywords=("attention_mask", "encoder_hidden_states", "encoder_attention_mask", *_WITHOUT_EFFECT),
        reads="self.query, key, value, dropout; output.dense, dropout, LayerNorm: it holds its own residual and norm",
    ),
)

MLPS: tuple[Part, ...] = (
    Part(
        "gated_mlp",
        "mlp",
        (
            _OURS + "llama.LlamaMLP",
            _MODULES + "mlp.SwiGLU",
            _MODELS + "llama.modeling_llama.LlamaMLP",
            _MODELS + "qwen2.modeling_qwen2.Qwen2MLP",
            _MODELS + "mistral.modeling_mistral.MistralMLP",
        ),
        children=(("gate_proj", _LINEAR), ("up_proj", _LINEAR), ("down_proj", _LINEAR), ("act_fn", ("silu", "gelu"))),
        optional=("act_fn",),
        attributes=("config", "hidden_size", "intermediate_size", "activation"),
        reads="gate_proj, up_proj, down_proj; act_fn (SiLU where there is none)",
    ),
    Part(
        "sequential_mlp",
        "mlp",
        ("torch.nn.modules.container.Sequential",),
        reads="exactly Linear, GELU or ReLU, [Dropout,] Linear [, Dropout]",
    ),
    Part(
        "bert_layer",
        "layer",
        (_OURS + "bert.BertLayer", _MODELS + "bert.modeling_bert.BertLayer"),
        children=(("attention", ("bert_attention",)), ("intermediate", ("bert_intermediate",)), ("output", ("bert_output",))),
        uses=(("mlp", ("intermediate", "output")),),
        attributes=("chunk_size_feed_forward", "seq_len_dim", "is_decoder", "add_cross_attention"),
        reads="as MLP intermediate.dense, its activation, output.dense, dropout, LayerNorm: it holds its own residual and norm",
    ),
)

HEADS: tuple[Part, ...] = (
    Part(
        "bert_head",
        "head",
        (_OURS + "bert.BertOnlyMLMHead", _MODELS + "bert.modeling_bert.BertOnlyMLMHead"),
        children=(("predictions", ("bert_predictions",)),),
        reads="predictions.transform, predictions.decoder",
    ),
    Part(
        "bert_predictions",
        "head",
        (_OURS + "bert.BertLMPredictionHead", _MODELS + "bert.modeling_bert.BertLMPredictionHead"),
        children=(("transform", ("bert_transform",)), ("decoder", _LINEAR)),
        reads="decoder.weight, decoder.bias",
    ),
    Part(
        "bert_transform",
        "head",
        (_OURS + "bert.BertPredictionHeadTransform", _MODELS + "bert.modeling_bert.BertPredictionHeadTransform"),
        children=(("dense", _LINEAR), ("LayerNorm", ("layer_norm",)), ("transform_act_fn", ("gelu",))),
        optional=("transform_act_fn",),
        attributes=("transform_act_fn",),
        reads="dense, transform_act_fn, LayerNorm",
    ),
)

TABLE: tuple[Part, ...] = (*LEAVES, *NORMS, *ATTENTIONS, *MLPS, *HEADS)
BY_CLASS: dict[str, Part] = {name: part for part in TABLE for name in part.classes}
BY_KIND: dict[str, Part] = {part.kind: part for part in TABLE}
