"""residual_attention and residual_mlp: the two lines of a transformer layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ops_math import checks, settings
from ops_math.blocks import as_it_is, attention, mlp, norms, packing, recognise, replay, whole
from ops_math.blocks.closing import Closed, Ending, can_close, records
from ops_math.blocks.parts import BLOCK_KEYWORDS
from ops_math.blocks.products import Affine
from ops_math.blocks.seeds import rng_of
from ops_math.blocks.streams import Input, Narrowed, Unsummed
from ops_math.ops.dropout.op import dropout
from ops_math.rng import Rng
from ops_math.stats import note as note_module


class _Branch(NamedTuple):
    """The fused branch of a call: how to compute it, or (`close`) it with the sum and norm after it in one go where that can be; its last
    product; the dropout after it, and the module's own norm if it holds one."""

    run: Any
    close: Any
    last: Affine
    dropout_p: float
    norm: Any


def _note(site: str, what: str, reason: str, ran: str = "module") -> None:
    """Count a call that ran otherwise than it might: by default the module itself, as it is."""
    if not torch.compiler.is_compiling():
        note_module(site, ran, f"{what}: {reason}")


def _dropped(branch: torch.Tensor, p: float, rng: Rng | None) -> torch.Tensor:
    return dropout(branch, p, rng=rng) if p else branch


class _Norms:
    """The norms around a branch, each fused where it is known and run as a module where it is not."""

    def __init__(self, site: str, active: bool) -> None:
        self.site, self.active = site, active

    def values(self, norm: Any, x: torch.Tensor) -> norms.Norm | None:
        """What is read from a norm, or None where it runs as it is."""
        if not self.active:
            return None
        found = norms.read(norm, x)
        if isinstance(found, str):
            _note(self.site, "norm", found)
            return None
        return found

    def apply(self, norm: Any, x: torch.Tensor) -> torch.Tensor:
        """norm(x)."""
        if norm is None:
            return x
        found = self.values(norm, x)
        return norm(x) if found is None else norms.normalise(found, x)

    def after_sum(
        self,
        norm: Any,
        branch: torch.Tensor,
        x: torch.Tensor,
        p: float,
        rng: Rng | None,
        bias: torch.Tensor | None = None,
        stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(s, norm(s)) with s = x + dropout(branch + bias); `stream` says that norm(s) is the residual stream (post-norm)."""
        found = None if norm is None else self.values(norm, x)
        if found is None or branch.shape != x.shape:
            total = x + _dropped(norms.with_bias(branch, bias), p, rng)
            return total, self.apply(norm, total)
        return norms.add_and_normalise(found, branch, x, p, rng, bias, stream)


def _opened(site: str, x: Input, norm: Any, around: _Norms) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, norm(x)) for a tensor, an unsummed pair, or a pair that holds both already."""
    if isinstance(x, Unsummed):
        return around.after_sum(norm, x.branch, x.x, 0.0, None)
    if isinstance(x, tuple) and not isinstance(x, Narrowed):
        if norm is not None:
            do = "The norm was applied by next_norm= of the call before."
            checks.fail(site, "norm", "None where x is a pair (x, norm(x))", type(norm).__name__, do)
        return x
    if isinstance(x, Narrowed):
        return x
    checks.floating(site, "x", x)
    return x, around.apply(norm, x)


def _closed(
    around: _Norms,
    x: torch.Tensor,
    branch: torch.Tensor,
    next_norm: Any,
    defer: bool,
    p: float,
    rng: Rng | None,
    bias: torch.Tensor | None = None,
) -> Any:
    """The residual sum of a pre-norm block, with what follows it."""
    if defer:
        return Unsummed(x, _dropped(branch, p, rng))
    if next_norm is None:
        return x + _dropped(branch, p, rng)
    return around.after_sum(next_norm, branch, x, p, rng, bias)


def _check_options(site: str, x: Input, options: _Options) -> None:
    _, next_norm, defer, dropout_p, _, narrow = options
    norm_first = options.norm_first
    checks.probability(site, "dropout_p", dropout_p)
    if norm_first and (narrow or isinstance(x, Narrowed)):
        got = "narrow=True" if narrow else "a Narrowed pair"
        checks.fail(site, "norm_first", "False with narrow=True or a Narrowed pair", f"True with {got}", "Only a norm at the end narrows.")
    if narrow and next_norm is not None:
        checks.fail(site, "narrow", "False with next_norm", "True", "Leave one of them out.")
    if defer and (next_norm is not None or not norm_first):
        checks.fail(
            site, "defer", "False with next_norm or norm_first=False", "True", "The sum is fused with that norm already; leave defer out."
        )


def _streams(rng: Rng | None, count: int) -> tuple[Rng | None, ...]:
    """Independent streams of a call's rng, for its masks one after the other."""
    return (None,) * count if rng is None else tuple(rng.child(i) for i in range(count))


def _check_own(site: str, norm: Any, own: Any, norm_first: bool) -> None:
    if norm_first or (norm is not None and norm is not own):
        got = "norm_first=True" if norm_first else "another norm"
        checks.fail(
            site,
            "norm",
            "None, with norm_first=False, for a module that holds its residual sum and norm itself",
            got,
            "Pass norm=None, norm_first=False.",
        )


def _read_attention(site: str, attn: Any, kwargs: dict[str, Any], h: torch.Tensor) -> attention.Reading | str:
    """What the fused way needs of the module, or why the module runs as it is."""
    if not recognise.sound(attn, attention.KINDS, "attention"):
        return recognise.why_not(attn, attention.KINDS, "attention")
    return attention.read(recognise.kind_of(attn), attn, kwargs, h)  # type: ignore[arg-type]


def _read_mlp(site: str, module: Any, kwargs: dict[str, Any], h: torch.Tensor) -> mlp.Layers | str:
    """What the fused way needs of the module, or why the module runs as it is."""
    if not recognise.sound(module, mlp.KINDS, "mlp"):
        return recognise.why_not(module, mlp.KINDS, "mlp")
    return mlp.read(recognise.kind_of(module), module, kwargs)  # type: ignore[arg-type]


def _note_undone(site: str, module: Any) -> None:
    why = packing.why_undone(module)
    if why:
        _note(site, type(module).__name__, why, "fused, unpacked")


def _attention_branch(site: str, attn: Any, kwargs: dict[str, Any], h: torch.Tensor, rng: Rng | None, compose: bool) -> _Branch | None:
    """The branch put together from what is read; None where the module runs as it is, which is noted with the reason."""
    if not compose:
        part = recognise.kind_of(attn)
        own = () if part is None else part.own_keywords
        if all(kwargs[name] is None or name in own for name in kwargs if name in BLOCK_KEYWORDS):
            return None
    found = _read_attention(site, attn, kwargs, h)
    if isinstance(found, str):
        if settings.active():
            _note(site, type(attn).__name__, found)
        return None
    heads, options = found
    _note_undone(site, attn)
    close = (lambda ending: attention.close(heads, options, h, rng, ending)) if attention.can_close(heads, options) else None
    return _Branch(lambda split: attention.attend(heads, options, h, rng, split), close, heads.output, heads.branch_dropout_p, heads.norm)


def _mlp_branch(site: str, module: Any, kwargs: dict[str, Any], h: torch.Tensor, rng: Rng | None, compose: bool) -> _Branch | None:
    """The same for an MLP."""
    if not compose:
        return None
    found = _read_mlp(site, module, kwargs, h)
    if isinstance(found, str):
        _note(site, type(module).__name__, found)
        return None
    _note_undone(site, module)
    close = (lambda ending: mlp.close(found, h, rng, ending)) if mlp.can_close(found) else None
    return _Branch(lambda split: mlp.transform(found, h, rng, split), close, found.down, found.branch_dropout_p, found.norm)


class _Kind(NamedTuple):
    """What differs between the two blocks."""

    site: str
    module: str
    read: Any
    branch: Any
    run: Any


_ATTENTION = _Kind("residual_attention", "attn", _read_attention, _attention_branch, as_it_is.run_attention)
_MLP = _Kind("residual_mlp", "mlp", _read_mlp, _mlp_branch, as_it_is.run_mlp)


class _Options(NamedTuple):
    """Keywords that both blocks have."""

    norm_first: bool
    next_norm: Any
    defer: bool
    dropout_p: float
    rng: Rng | None
    narrow: bool


def _block(kind: _Kind, x: Input, norm: Any, module: Any, options: _Options, kwargs: dict[str, Any]) -> Any:
    """Check, and run; under a debugger, run both ways."""
    as_it_is.check_modules(kind.site, kind.module, norm, module)
    _check_options(kind.site, x, options)
    own = as_it_is.own_residual(module)
    if own is not None:
        _check_own(kind.site, norm, own, options.norm_first)
    if isinstance(module, nn.TransformerEncoderLayer) and module.norm_first != options.norm_first:
        needs = f"{module.norm_first}, as the layer is built"
        checks.fail(kind.site, "norm_first", needs, str(options.norm_first), "Pass norm_first=layer.norm_first.")
    debugger, on = settings.STATE.debug, settings.active()
    if debugger is not None:
        x, options = x.x if isinstance(x, Narrowed) else x, options._replace(narrow=False)  # one tensor in, one out: comparable

        def run(x: Input, rng: Rng | None, kwargs: dict[str, Any], compose: bool, values: bool) -> Any:
            return _run(kind, x, norm, module, options._replace(rng=rng), kwargs, own, compose, values)

        def ways() -> Any:
            known = not isinstance(kind.read(kind.site, module, kwargs, x[0] if isinstance(x, tuple) else x), str)
            return replay.ways(run, x, norm, module, options.next_norm, options.rng, options.dropout_p, kwargs) if known else None

        found = debugger.block(kind.site, module, ways)
        if found is not None:
            return found
    try:
        return _run(kind, x, norm, module, options, kwargs, own, on, on)
    except RuntimeError:
        checks.dense(kind.site, "x", x)  # a module that runs as it is may take others
        raise


def _close(
    around: _Norms, branch: _Branch, following: Any, stream: torch.Tensor, h: torch.Tensor, p: float, rng: Rng | None, options: _Options
) -> Closed | None:
    """The end of a branch with a known norm after it, in one go; None where it must be done step by step, as it is where nothing is
    recorded or a debugger looks at the operators one by one."""
    if following is None or not settings.active() or (settings.STATE.debug is not None and not settings.STATE.debug.busy):
        return None
    found = around.values(following, stream)
    if found is None:
        return None
    ending = Ending(found, stream, p, rng, not options.norm_first, options.narrow)
    weight, bias = branch.last
    if not can_close(ending, weight.shape[0]) or not records(ending, h, weight, bias):
        return None
    return branch.close(ending)


def _ended(closed: Closed, options: _Options, around: _Norms) -> Any:
    """What a closed block returns."""
    y, total, narrow = closed
    if options.norm_first:
        return total, y
    if narrow is not None:
        return Narrowed(y, narrow)
    return y if options.next_norm is None else (y, around.apply(options.next_norm, y))


def _run(
    kind: _Kind, x: Input, norm: Any, module: Any, options: _Options, kwargs: dict[str, Any], own: Any, compose: bool, values: bool
) -> Any:
    """The block. `compose`: put the branch together from the module's weights; `values`: the same for norms."""
    around = _Norms(kind.site, values)
    if kind is _ATTENTION and compose and values and norm is not None and whole.takes(x, options):
        found = whole.attend(x, norm, options.next_norm, _read_attention(kind.site, module, kwargs, whole.stream(x)))
        if found is not None:
            _note_undone(kind.site, module)
            return found
    inside, after, last = _streams(options.rng, 3)
    stream, h = _opened(kind.site, x, norm if options.norm_first else None, around)
    branch = kind.branch(kind.site, module, kwargs, h, inside, compose)
    next_norm, dropout_p = options.next_norm, options.dropout_p
    following = next_norm if options.norm_first else (norm if own is None else own)
    own_p = 0.0 if branch is None else branch.dropout_p
    if branch is not None and branch.close is not None and not options.defer and not (own_p and dropout_p):
        closed = _close(around, branch, following, stream, h, own_p or dropout_p, after if own_p else last, options)
        if closed is not None:
            return _ended(closed, options, around)
    split = compose and not options.defer and not (own_p and dropout_p) and norms.takes_bias(following, h)
    value, bias = (kind.run(module, stream if isinstance(x, Narrowed) else h, kwargs), None) if branch is None else branch.run(split)
    if branch is None and own is not None:
        return value if next_norm is None else (value, around.apply(next_norm, value))
    if own_p and dropout_p:
        value, own_p = _dropped(value, own_p, after), 0.0
    p, chosen = (own_p, after) if own_p else (dropout_p, last)
    if options.norm_first:
        return _closed(around, stream, value, next_norm, options.defer, p, chosen, bias)
    _, y = around.after_sum(following, value, stream, p, chosen, bias, stream=True)
    return y if next_norm is None else (y, around.apply(next_norm, y))


def residual_attention(
    x: Input,
    norm: Any,
    attn: Any,
    *,
    norm_first: bool = True,
    next_norm: Any = None,
    defer: bool = False,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    narrow: bool = False,
    **kwargs: Any,
) -> Any:
    """Attention with its norm and its residual sum.

    x + dropout(attn(norm(x))), or norm(x + dropout(attn(x))) with `norm_first=False`

    The weights of known modules (see the table of parts) are read; any other module runs as it is, and `ops_math.stats()` says why.

    Args:
        x: [B, S, C] (packed documents: [T, C] or [1, T, C]; as the module takes it); or a pair (x, norm(x)) from `next_norm=` of the
            block before, with `norm=None`; or an `Unsummed` pair from `defer=True` of the block before, or a `Narrowed` one.
        norm: RMSNorm or LayerNorm module; None for no norm, or for one that was applied.
        attn: attention module, or a TransformerEncoderLayer (its self_attn and dropout1), or BERT's attention, which holds its own
            residual sum and norm (`norm=None, norm_first=False`).
        norm_first: whether the norm stands before the attention or after the sum.
        next_norm: the norm that follows; the residual sum is fused with it and the result is the pair (x, next_norm(x)).
        defer: return `Unsummed(x, branch)`, for the next block or `residual_norm` to sum: fuses across layers that must not know
            each other's norms (sharded parameters).
        dropout_p: dropout of the branch before the sum, besides the module's own.
        rng: where all masks of the call come from; by default an `ops_nn.SeedPool` that is attached, else keys from PyTorch's generator.
        narrow: with `norm_first=False`, return a `Narrowed` pair for the next block where the result is wider than autocast's dtype.
        **kwargs: what the module's forward takes (position_embeddings, attention_mask, attn_mask, key_padding_mask, is_causal, ...),
            and for known modules also: causal, mask (additive, or True where a key is seen), key_padding_mask [B, S] (True at real
            tokens), window (left, right), position_ids, cu_seqlens [documents + 1] and max_seqlen for packed documents.

    Returns:
        Of the shape of `x`; with `next_norm` the pair; with `defer` an `Unsummed`; with `narrow` perhaps a `Narrowed`.

    Precision: as the operators; the residual sum has the wider dtype of `x` and the branch.
    Determinism: level 2, where its products are `linear`; with dropout as `attention`.
    Raises: ArgumentError for a pair with a norm, options that exclude each other, a BERT module with another norm.
    Source: Vaswani et al., 2017; Xiong et al., On Layer Normalization in the Transformer Architecture, 2020.
    """
    rng = rng_of(attn, x, _ATTENTION.site) if rng is None else rng
    return _block(_ATTENTION, x, norm, attn, _Options(norm_first, next_norm, defer, dropout_p, rng, narrow), kwargs)


def residual_mlp(
    x: Input,
    norm: Any,
    mlp: Any,
    *,
    norm_first: bool = True,
    next_norm: Any = None,
    defer: bool = False,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    narrow: bool = False,
    **kwargs: Any,
) -> Any:
    """A transformer's MLP with its norm and its residual sum.

    x + dropout(mlp(norm(x))), or norm(x + dropout(mlp(x))) with `norm_first=False`

    Args:
        x: [..., C], or a pair, as in `residual_attention`.
        norm: RMSNorm or LayerNorm module, or None.
        mlp: a gated MLP (gate_proj, up_proj, down_proj), a Sequential of Linear, GELU or ReLU, Linear (with Dropout), a
            TransformerEncoderLayer (its linear1, activation, dropout, linear2, dropout2), or a BERT layer (its intermediate and output,
            which hold the residual sum and norm: `norm=None, norm_first=False`).
        norm_first, next_norm, defer, dropout_p, rng, narrow: as in `residual_attention`.
        **kwargs: what the module's forward takes.

    Returns:
        As `residual_attention`.

    Precision: as the operators. The activation is not kept for the backward; it is computed again there.
    Determinism: level 2, where its products are `linear`.
    Raises: as `residual_attention`.
    Source: as `residual_attention`; Shazeer, GLU Variants Improve Transformer, 2020.
    """
    rng = rng_of(mlp, x, _MLP.site) if rng is None else rng
    return _block(_MLP, x, norm, mlp, _Options(norm_first, next_norm, defer, dropout_p, rng, narrow), kwargs)


def residual_norm(x: Input, norm: Any) -> torch.Tensor:
    """The norm at the end of a chain of blocks: norm(x), or norm(x + branch) in one pass for an `Unsummed` pair.

    Args:
        x: [..., C], an `Unsummed` pair, or a pair (x, norm(x)) with `norm=None`.
        norm: RMSNorm or LayerNorm module.

    Returns:
        [..., C].

    Precision: as `rms_norm` and `layer_norm`.
    Determinism: as `rms_norm` and `layer_norm`.
    Raises: ArgumentError for a pair (x, norm(x)) with a norm.
    Source: as `residual_attention`.
    """
    return _opened("residual_norm", x, norm, _Norms("residual_norm", settings.active()))[1]
