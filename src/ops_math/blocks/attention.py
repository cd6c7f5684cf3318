"""What a block reads from an attention module it knows, what its keywords mean, and the fused way through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math import settings
from ops_math.blocks.closing import Closed, Ending, close_product
from ops_math.blocks.packed import packed_heads, packed_or_apart, packed_product, packs
from ops_math.blocks.parts import Part
from ops_math.blocks.products import Affine, product_dtype
from ops_math.dispatch import needs_grad
from ops_math.ops.attention import op_drawn
from ops_math.ops.attention.op import attention, attention_qkv
from ops_math.ops.rope.op import Heads as Turned
from ops_math.ops.rope.op import rope
from ops_math.rng import Rng

# Model-wide keywords that Hugging Face models pass through to every attention and that no attention reads in a training step.
_HF_IGNORED = ("use_cache", "cache_position", "position_ids", "num_items_in_batch", "output_hidden_states")
_HF_MUST_BE_NONE = ("cache", "past_key_value", "past_key_values", "encoder_hidden_states", "encoder_attention_mask", "output_attentions")


class Heads(NamedTuple):
    """What is read from a module: three projections or one packed one, the output product, and how to attend.

    `branch_dropout_p` follows the output product; `norm` is the module's own norm where it holds one (BERT).
    """

    projections: tuple[Affine, ...]
    output: Affine
    head_dim: int
    scale: float | None
    causal: bool | str
    dropout_p: float = 0.0
    branch_dropout_p: float = 0.0
    window: tuple[int, int] | None = None
    softcap: float | None = None
    batch_first: bool = True
    norm: Any = None


class Options(NamedTuple):
    """What the keywords of a call say: rotary tables, and what the attention operator takes besides the heads' own."""

    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    position_ids: torch.Tensor | None = None
    causal: bool | str | None = None
    window: tuple[int, int] | None = None
    mask: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None


Reading = tuple[Heads, Options]


def affine(linear: Any) -> Affine:
    """Weight and bias of a linear layer."""
    held = linear.__dict__["_parameters"]
    return held["weight"], held.get("bias")


def drop_chance(dropout: Any) -> float:
    """The chance in force in a Dropout module."""
    return float(dropout.p) if dropout.training else 0.0


def _block_options(kwargs: dict[str, Any]) -> Options:
    """The keywords that mean the same for every attention, taken out of `kwargs`."""
    found = {name: kwargs.pop(name, None) for name in Options._fields[1:]}
    return Options(None, **found)


def _unread(kwargs: dict[str, Any]) -> str:
    left = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    return f"keyword {left[0]} is not read by the fused path" if left else ""


def _llama(module: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Reading | str:
    options = _block_options(kwargs)
    tables = kwargs.pop("position_embeddings", None)
    held = module.__dict__
    children, own = held["_modules"], held.get
    dropout_p = own("dropout_p", 0.0) if module.training else 0.0
    projections = tuple(affine(children[name]) for name in ("q_proj", "k_proj", "v_proj"))
    heads = Heads(
        projections,
        affine(children["o_proj"]),
        module.head_dim,
        own("scale"),
        own("causal", True),
        dropout_p,
        window=own("window"),
        softcap=own("softcap"),
    )
    return _unread(kwargs) or (heads, options._replace(tables=tables))


def _hf_mask(implementation: str, kwargs: dict[str, Any], is_causal: bool) -> tuple[torch.Tensor | None, bool] | str:
    """The mask and whether the call is causal, as Hugging Face's `sdpa` and `eager` functions read them."""
    if implementation not in ("sdpa", "eager"):
        return f"attention implementation {implementation!r} has rules of its own"
    mask = kwargs.pop("attention_mask", None)
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 4):
        return "attention_mask is not a tensor of four dimensions"
    if mask is not None and mask.requires_grad:
        return "attention_mask requires a gradient"
    for name in _HF_IGNORED:
        kwargs.pop(name, None)
    for name in _HF_MUST_BE_NONE:
        if kwargs.pop(name, None) not in (None, False):
            return f"{name} is given"
    return mask, is_causal and mask is None and implementation == "sdpa"


def _hf_llama(module: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Reading | str:
    tables = kwargs.pop("position_embeddings", None)
    if tables is None:
        return "position_embeddings are missing"
    ignored = kwargs.pop("position_ids", None)  # rows were already gathered: the tables have one for each token
    options = _block_options(kwargs)
    found = _hf_mask(module.config._attn_implementation, kwargs, module.is_causal)
    if isinstance(found, str):
        return found
    del ignored
    children = module.__dict__["_modules"]
    projections = tuple(affine(children[name]) for name in ("q_proj", "k_proj", "v_proj"))
    dropout_p = float(module.attention_dropout) if module.training else 0.0
    heads = Heads(projections, affine(children["o_proj"]), module.head_dim, module.scaling, found[1], dropout_p)
    mask = options.mask if found[0] is None else found[0]
    return _unread(kwargs) or (heads, options._replace(tables=tables, mask=mask))


def _bert(module: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Reading | str:
    """Both BERTs: the baseline's mask is [B, S] with true at real tokens, Hugging Face's has four dimensions."""
    children = module.__dict__["_modules"]
    inner, output = children["self"], children["output"]
    ignored = kwargs.pop("position_ids", None) if "config" in inner.__dict__ else None
    options = _block_options(kwargs)
    causal = False
    if "config" in inner.__dict__:
        if module.is_cross_attention:
            return "it attends to another sequence"
        found = _hf_mask(inner.config._attn_implementation, kwargs, inner.is_causal)
        if isinstance(found, str):
            return found
        causal = found[1]
        options = options._replace(mask=options.mask if found[0] is None else found[0])
    else:
        real = kwargs.pop("attention_mask", None)
        options = options if real is None else options._replace(key_padding_mask=real.bool())
    del ignored
    held, out = inner.__dict__["_modules"], output.__dict__["_modules"]
    dropout_p = float(held["dropout"].p) if inner.training else 0.0
    projections = tuple(affine(held[name]) for name in ("query", "key", "value"))
    heads = Heads(
        projections,
        affine(out["dense"]),
        inner.attention_head_size,
        None,
        causal,
        dropout_p,
        drop_chance(out["dropout"]),
        norm=out["LayerNorm"],
    )
    return _unread(kwargs) or (heads, options)


def _multihead(module: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Reading | str:
    held = module.__dict__["_parameters"]
    if not module._qkv_same_embed_dim or held.get("in_proj_weight") is None:
        return "its projections are of different widths"
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "it adds a key and a value of its own"
    if x.dim() != 3 and kwargs.get("cu_seqlens") is None:
        return f"its input has {x.dim()} dimensions, not 3"
    mask, padding = kwargs.pop("attn_mask", None), kwargs.pop("key_padding_mask", None)
    hint = kwargs.pop("is_causal", False)
    kwargs.pop("average_attn_weights", None)
    if kwargs.pop("need_weights", False):
        return "attention weights are asked for"
    if hint and mask is None:
        return "is_causal is a hint about attn_mask, which is missing"
    options = _block_options(kwargs)
    if hint and padding is None:
        options, mask = options._replace(causal=True), None
    options = _multihead_masks(options, mask, padding, x.shape[0 if module.batch_first else 1], x.dtype)
    packed: Affine = held["in_proj_weight"], held.get("in_proj_bias")
    out = affine(module.__dict__["_modules"]["out_proj"])
    dropout_p = float(module.dropout) if module.training else 0.0
    return _unread(kwargs) or (Heads((packed,), out, module.head_dim, None, False, dropout_p, batch_first=module.batch_first), options)


def _multihead_masks(options: Options, mask: torch.Tensor | None, padding: torch.Tensor | None, batch: int, dtype: torch.dtype) -> Options:
    """MultiheadAttention's masks are true where a key is hidden, or are added; here they are true where it is seen, or added."""
    if mask is not None:
        mask = mask.view(batch, -1, *mask.shape[-2:]) if mask.dim() == 3 else mask
        mask = ~mask if mask.dtype == torch.bool else mask
    if padding is not None and padding.dtype == torch.bool:
        options = options._replace(key_padding_mask=~padding)
    elif padding is not None:
        added = padding[:, None, None, :].to(dtype)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
        mask = added if mask is None else mask + added
    return options if mask is None else options._replace(mask=mask)


def _encoder_layer(module: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Reading | str:
    children = module.__dict__["_modules"]
    found = _multihead(children["self_attn"], kwargs, x)
    return found if isinstance(found, str) else (found[0]._replace(branch_dropout_p=drop_chance(children["dropout1"])), found[1])


_READERS: dict[str, Callable[[Any, dict[str, Any], torch.Tensor], Reading | str]] = {
    "llama_attention": _llama,
    "hf_llama_attention": _hf_llama,
    "bert_attention": _bert,
    "multihead_attention": _multihead,
    "encoder_layer": _encoder_layer,
}
KINDS = tuple(_READERS)


def read(part: Part, module: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Reading | str:
    """What the fused path needs for this call, or why it cannot run it."""
    found = _READERS[part.kind](module, dict(kwargs), x)
    if isinstance(found, str):
        return found
    heads, options = found
    if max(heads.dropout_p, heads.branch_dropout_p) >= 1.0:
        return "its dropout drops everything"
    if options.cu_seqlens is None and x.dim() != 3:
        return f"its input has {x.dim()} dimensions, not 3"
    return heads, options


def _products(x: torch.Tensor, affines: tuple[Affine, ...]) -> tuple[torch.Tensor, ...]:
    if not settings.active():
        return tuple(F.linear(x, w, b) for w, b in affines)
    return packed_or_apart(x, affines)


def _arguments(heads: Heads, options: Options, rng: Rng | None) -> dict[str, Any]:
    """Keywords of the attention operator."""
    chosen: dict[str, Any] = {
        "causal": heads.causal if options.causal is None else options.causal,
        "scale": heads.scale,
        "window": heads.window if options.window is None else options.window,
        "softcap": heads.softcap,
        "mask": options.mask,
        "key_padding_mask": options.key_padding_mask,
        "dropout_p": heads.dropout_p,
        "rng": rng,
    }
    if options.cu_seqlens is not None:
        chosen.update(cu_seqlens_q=options.cu_seqlens, max_seqlen_q=options.max_seqlen, max_seqlen_k=options.max_seqlen)
    return chosen


def attend(
    heads: Heads, options: Options, h: torch.Tensor, rng: Rng | None, split: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The branch of normalised input `h`, [B, S, C] (or [S, B, C], or packed [T, C] or [1, T, C]), shaped as `h`; with `split` the bias
    of its last product is not added but returned, for what follows to add on its way."""
    swapped = not heads.batch_first and options.cu_seqlens is None
    out = _attend_inside(heads, options, h, rng)
    weight, bias = heads.output
    (branch,) = _products(out.flatten(-2), ((weight, None if split else bias),))
    return branch.transpose(0, 1) if swapped else branch.view(*h.shape[:-1], branch.shape[-1]), bias if split else None


def _attend_inside(heads: Heads, options: Options, h: torch.Tensor, rng: Rng | None) -> torch.Tensor:
    """All but the last product: [B, S, H, D], or [T, H, D] for packed documents."""
    packed = options.cu_seqlens is not None
    if packed and h.dim() == 3:
        h = h.flatten(0, 1)
    if _as_one(heads, h):
        num_heads, num_kv_heads, _ = (w.shape[0] // heads.head_dim for w, _ in heads.projections)
        turned = None if options.tables is None else Turned(num_heads, num_kv_heads, 0, False)
        qkv = packed_product(h, heads.projections, turned, options.tables, options.position_ids)
        return attention_qkv(qkv, num_heads=num_heads, num_kv_heads=num_kv_heads, **_arguments(heads, options, rng))
    projected = _products(h, heads.projections)
    if not heads.batch_first and not packed:
        projected = tuple(t.transpose(0, 1) for t in projected)
    arguments = _arguments(heads, options, rng)
    if len(projected) == 1:
        count = projected[0].shape[-1] // (3 * heads.head_dim)
        return attention_qkv(projected[0], num_heads=count, **arguments)
    q, k, v = (t.view(*t.shape[:-1], t.shape[-1] // heads.head_dim, heads.head_dim) for t in projected)
    if options.tables is not None:
        q, k = rope(q, k, *options.tables, position_ids=options.position_ids)
    return attention(q, k, v, **arguments)


def _as_one(heads: Heads, h: torch.Tensor) -> bool:
    """Whether query, key and value are one product, and their gradient one tensor."""
    flat = [t for pair in heads.projections for t in pair]
    return settings.active() and len(heads.projections) == 3 and packs(h, heads.projections) and needs_grad(h, *flat)


def can_close(heads: Heads, options: Options) -> bool:
    """Whether `close` takes this attention."""
    return heads.batch_first or options.cu_seqlens is not None


def close(heads: Heads, options: Options, h: torch.Tensor, rng: Rng | None, ending: Ending) -> Closed:
    """norm(s) and s, with s = residual + dropout(branch) of normalised input `h`, in as few autograd nodes as can be."""
    if _draws(heads, options, h, rng):
        q, k, v = packed_heads(h, heads.projections, heads.head_dim)
        out = op_drawn.attend_heads(q, k, v, bool(heads.causal), op_drawn.default_scale(heads.head_dim, heads.scale), heads.dropout_p)
        return close_product(out, heads.output, ending, heads_first=True)
    return close_product(_attend_inside(heads, options, h, rng).flatten(-2), heads.output, ending)


def _draws(heads: Heads, options: Options, h: torch.Tensor, rng: Rng | None) -> bool:
    """Whether PyTorch draws this call's dropout mask (no rng, nothing hidden but the future) and its projections are one product."""
    if not heads.dropout_p or rng is not None or len(heads.projections) != 3 or h.dim() != 3:
        return False
    if any(value is not None for value in options):
        return False
    if heads.window is not None or heads.softcap or heads.causal == "top_left" or not packs(h, heads.projections):
        return False
    batch, length, width = *h.shape[:2], heads.head_dim
    counts = [w.shape[0] // width for w, _ in heads.projections]
    form = op_drawn.Form(batch, length, counts[0], counts[1], width, product_dtype(h) or h.dtype)
    return op_drawn.can_draw_form(form, h.device, bool(heads.causal), op_drawn.default_scale(width, heads.scale), heads.dropout_p)
