"""Every kind of part with a call: how to build it small, and the formula that the block must equal."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ops_nn.models.bert import BertConfig, BertLayer
from ops_nn.models.llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding
from ops_nn.modules import Attention, RMSNorm, RotaryEmbedding, SwiGLU

WIDTH, HEADS, BATCH, SEQ = 32, 4, 2, 9
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


class Setup(NamedTuple):
    """A block's modules and keywords in one dtype. `formula` is the block written with the modules themselves."""

    norm: Any
    module: Any
    kwargs: dict[str, Any]
    norm_first: bool
    formula: Callable[[torch.Tensor], torch.Tensor]
    holder: nn.Module
    batch_first: bool = True

    def x(self, dtype: torch.dtype) -> torch.Tensor:
        shape = (BATCH, SEQ, WIDTH) if self.batch_first else (SEQ, BATCH, WIDTH)
        return torch.randn(shape, dtype=dtype, requires_grad=True)


def randomise(module: nn.Module, scale: float = 0.3) -> nn.Module:
    """Weights that are neither zero nor one, so that nothing hides."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(0.0, scale)
            if "norm" in name.lower() and name.endswith("weight"):
                p.add_(1.0)
    return module


def llama(dtype: torch.dtype, which: str, kv_heads: int = 2) -> Setup:
    config = LlamaConfig(64, WIDTH, 48, 1, HEADS, kv_heads, 8)
    layer = randomise(LlamaDecoderLayer(config)).to(dtype)
    tables = LlamaRotaryEmbedding(config)(torch.empty(BATCH, SEQ, WIDTH, dtype=dtype))
    if which == "mlp":
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        return Setup(norm, mlp, {}, True, lambda x: x + mlp(norm(x)), layer)
    norm, attn, kw = layer.input_layernorm, layer.self_attn, {"position_embeddings": tables}
    return Setup(norm, attn, kw, True, lambda x: x + attn(norm(x), **kw), layer)


def ours(dtype: torch.dtype, which: str, **options: Any) -> Setup:
    """The modules for new models."""
    norm, attn, mlp = RMSNorm(WIDTH, weight_offset=1.0), Attention(WIDTH, HEADS, 2, bias=True, **options), SwiGLU(WIDTH, 48, bias=True)
    holder = randomise(nn.ModuleDict({"norm": norm, "attn": attn, "mlp": mlp})).to(dtype)
    with torch.no_grad():
        norm.weight.sub_(1.0)  # its offset is the one; of rows twice as large a bf16 softmax is a step, and its gradient an accident
    if which == "mlp":
        return Setup(norm, mlp, {}, True, lambda x: x + mlp(norm(x)), holder)
    kw = {"position_embeddings": RotaryEmbedding(8)(torch.empty(BATCH, SEQ, WIDTH))}
    kw = kw if dtype != torch.float64 else {"position_embeddings": tuple(t.double() for t in kw["position_embeddings"])}
    return Setup(norm, attn, kw, True, lambda x: x + attn(norm(x), **kw), holder)


def hf(family: str, dtype: torch.dtype, which: str, masked: bool = False, implementation: str = "sdpa") -> Setup:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        attn_implementation=implementation,
        **({"sliding_window": 4} if family == "Mistral" else {}),
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    layer = randomise(model.model.layers[0]).to(dtype)
    if which == "mlp":
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        return Setup(norm, mlp, {}, True, lambda x: x + mlp(exact_in_float64(norm, x)), layer)
    tables = model.model.rotary_emb(torch.empty(BATCH, SEQ, WIDTH, dtype=dtype), torch.arange(SEQ)[None])
    kw: dict[str, Any] = {"position_embeddings": tables, "attention_mask": None, "use_cache": False}
    if masked:
        ones = torch.ones(SEQ, SEQ, dtype=torch.bool)
        kw["attention_mask"] = (ones.tril() & ~ones.tril(-4)).expand(BATCH, 1, -1, -1)
    if masked and implementation == "eager":
        kw["attention_mask"] = torch.zeros(BATCH, 1, SEQ, SEQ, dtype=dtype).masked_fill(~kw["attention_mask"], torch.finfo(dtype).min)
    norm, attn = layer.input_layernorm, layer.self_attn

    def formula(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float64 or implementation == "sdpa":
            return x + attn(exact_in_float64(norm, x), **kw)[0]
        # Its eager softmax is in fp32 whatever the dtype; the other implementation is exact, and sees all keys where the mask is zero.
        mask = torch.zeros(BATCH, 1, SEQ, SEQ, dtype=x.dtype) if kw["attention_mask"] is None else kw["attention_mask"]
        config._attn_implementation = "sdpa"
        y = x + attn(exact_in_float64(norm, x), **{**kw, "attention_mask": mask})[0]
        config._attn_implementation = "eager"
        return y

    return Setup(norm, attn, kw, True, formula, layer)


def exact_in_float64(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Hugging Face's RMSNorm, without its detour through fp32 where x is float64."""
    return F.rms_norm(x, (WIDTH,), norm.weight, norm.variance_epsilon) if x.dtype == torch.float64 else norm(x)


def bert(dtype: torch.dtype, which: str, source: str = "ours", masked: bool = False) -> Setup:
    if source == "ours":
        layer: Any = BertLayer(BertConfig(64, WIDTH, 48, 1, HEADS, hidden_dropout=0.0, attention_dropout=0.0))
        mask = torch.arange(SEQ)[None] < torch.tensor([[SEQ], [5]])
    else:
        import transformers

        config = transformers.BertConfig(
            vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=HEADS,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa",
        )  # fmt: skip
        layer = transformers.BertModel(config, add_pooling_layer=False).encoder.layer[0]
        mask = (torch.arange(SEQ)[None] < torch.tensor([[SEQ], [5]]))[:, None, None, :].expand(-1, 1, SEQ, -1)
    layer = randomise(layer).to(dtype)
    if which == "mlp":
        return Setup(None, layer, {}, False, lambda x: layer.output(layer.intermediate(x), x), layer)
    attn, kw = layer.attention, {"attention_mask": mask} if masked else {}

    def formula(x: torch.Tensor) -> torch.Tensor:
        y = attn(x, **kw)
        return y[0] if isinstance(y, tuple) else y

    return Setup(None, attn, kw, False, formula, layer)


def multihead(dtype: torch.dtype, batch_first: bool = True, norm: str = "layer", bias: bool = True, **kw: Any) -> Setup:
    attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, bias=bias)
    around = nn.LayerNorm(WIDTH) if norm == "layer" else nn.RMSNorm(WIDTH)
    holder = randomise(nn.ModuleDict({"norm": around, "attn": attn})).to(dtype)
    kw = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kw.items()}

    def formula(x: torch.Tensor) -> torch.Tensor:
        h = around(x)
        return x + attn(h, h, h, need_weights=False, **kw)[0]

    return Setup(around, attn, kw, True, formula, holder, batch_first)


def encoder(dtype: torch.dtype, which: str, norm_first: bool, activation: Any = "gelu", batch_first: bool = True, **kw: Any) -> Setup:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, activation, batch_first=batch_first, norm_first=norm_first)
    layer = randomise(layer).to(dtype)
    norm = layer.norm1 if which == "attention" else layer.norm2

    def branch(h: torch.Tensor) -> torch.Tensor:
        if which == "mlp":
            return layer._ff_block(h)
        return layer._sa_block(h, kw.get("attn_mask"), kw.get("key_padding_mask"), kw.get("is_causal", False))

    def formula(x: torch.Tensor) -> torch.Tensor:
        return x + branch(norm(x)) if norm_first else norm(x + branch(x))

    return Setup(norm, layer, kw, norm_first, formula, layer, batch_first)


def sequential(dtype: torch.dtype, *inner: nn.Module) -> Setup:
    norm, mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 48), *inner, nn.Linear(48, WIDTH))
    holder = randomise(nn.ModuleDict({"norm": norm, "mlp": mlp})).to(dtype)
    return Setup(norm, mlp, {}, True, lambda x: x + mlp(norm(x)), holder)


_HIDE = torch.zeros(BATCH, SEQ, dtype=torch.bool)
_HIDE[1, 6:] = True
_LATER = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
_PER_HEAD = torch.randn(BATCH * HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(3))

ATTENTIONS: dict[str, Callable[[torch.dtype], Setup]] = {
    "our Llama": lambda d: llama(d, "attention"),
    "our Llama, as many key heads": lambda d: llama(d, "attention", kv_heads=4),
    "our module": lambda d: ours(d, "attention"),
    "our module, windowed and capped": lambda d: ours(d, "attention", window=(3, 0), softcap=5.0, scale=0.5),
    "our module, seeing all": lambda d: ours(d, "attention", causal=False),
    "our BERT": lambda d: bert(d, "attention"),
    "our BERT, padded": lambda d: bert(d, "attention", masked=True),
    "MultiheadAttention": lambda d: multihead(d),
    "MultiheadAttention, RMSNorm, no bias": lambda d: multihead(d, norm="rms", bias=False),
    "MultiheadAttention, sequence first": lambda d: multihead(d, batch_first=False),
    "MultiheadAttention, padded": lambda d: multihead(d, key_padding_mask=_HIDE),
    "MultiheadAttention, boolean mask": lambda d: multihead(d, attn_mask=_LATER),
    "MultiheadAttention, causal by hint": lambda d: multihead(d, attn_mask=_LATER, is_causal=True),
    "MultiheadAttention, causal by hint, padded": lambda d: multihead(d, attn_mask=_LATER, key_padding_mask=_HIDE, is_causal=True),
    "MultiheadAttention, a mask for each head": lambda d: multihead(d, attn_mask=_PER_HEAD, batch_first=False),
    "encoder layer, norm first": lambda d: encoder(d, "attention", True),
    "encoder layer, norm last, padded": lambda d: encoder(d, "attention", False, batch_first=False, key_padding_mask=_HIDE),
}
MLPS: dict[str, Callable[[torch.dtype], Setup]] = {
    "our Llama": lambda d: llama(d, "mlp"),
    "our module": lambda d: ours(d, "mlp"),
    "our BERT": lambda d: bert(d, "mlp"),
    "encoder layer, norm first": lambda d: encoder(d, "mlp", True),
    "encoder layer, norm last": lambda d: encoder(d, "mlp", False),
    "encoder layer, relu": lambda d: encoder(d, "mlp", True, activation="relu"),
    "encoder layer, a GELU module": lambda d: encoder(d, "mlp", True, activation=nn.GELU(approximate="tanh")),
    "Sequential": lambda d: sequential(d, nn.GELU()),
    "Sequential with Dropout, tanh": lambda d: sequential(d, nn.GELU(approximate="tanh"), nn.Dropout(0.0)),
    "Sequential, relu": lambda d: sequential(d, nn.ReLU()),
}
HF_ATTENTIONS: dict[str, Callable[[torch.dtype], Setup]] = {
    "Hugging Face Llama": lambda d: hf("Llama", d, "attention"),
    "Hugging Face Llama, masked": lambda d: hf("Llama", d, "attention", masked=True),
    "Hugging Face Llama, eager": lambda d: hf("Llama", d, "attention", masked=True, implementation="eager"),
    "Hugging Face Llama, eager without a mask": lambda d: hf("Llama", d, "attention", implementation="eager"),
    "Hugging Face Qwen2": lambda d: hf("Qwen2", d, "attention"),
    "Hugging Face Mistral": lambda d: hf("Mistral", d, "attention"),
    "Hugging Face Mistral, windowed by its mask": lambda d: hf("Mistral", d, "attention", masked=True),
    "Hugging Face BERT": lambda d: bert(d, "attention", "hf"),
    "Hugging Face BERT, padded": lambda d: bert(d, "attention", "hf", masked=True),
}
HF_MLPS: dict[str, Callable[[torch.dtype], Setup]] = {
    "Hugging Face Llama": lambda d: hf("Llama", d, "mlp"),
    "Hugging Face Qwen2": lambda d: hf("Qwen2", d, "mlp"),
    "Hugging Face Mistral": lambda d: hf("Mistral", d, "mlp"),
    "Hugging Face BERT": lambda d: bert(d, "mlp", "hf"),
}
if HAS_TRANSFORMERS:
    ATTENTIONS |= HF_ATTENTIONS
    MLPS |= HF_MLPS
