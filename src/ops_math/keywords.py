"""What a call means that an operator does not take: the argument of ours for PyTorch's name, a misspelt one, one that is missing, a
tensor without memory by strides, text for a number.

Asked only after a call has failed, so that others pay nothing for it; under Dynamo, which binds arguments itself and answers in its own
words, before.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from ops_math import checks, features
from ops_math.spec import DTYPE_NAME

# Names of PyTorch, Hugging Face and flash-attention, and what the same thing is called here; the first that an operator has is meant.
MEANT: dict[str, tuple[str, ...]] = {
    "input": ("x", "logits", "qkv", "gate_up", "gate"),
    "hidden_states": ("x", "logits", "qkv", "gate_up", "gate"),
    "hidden": ("x",),
    "x": ("logits", "qkv", "gate_up", "gate"),
    "a": ("gate",),
    "b": ("up",),
    "query": ("q",),
    "key": ("k",),
    "value": ("v",),
    "query_states": ("q",),
    "key_states": ("k",),
    "value_states": ("v",),
    "is_causal": ("causal",),
    "attn_mask": ("mask",),
    "attention_mask": ("mask",),
    "attn_bias": ("mask",),
    "padding_mask": ("key_padding_mask",),
    "softmax_scale": ("scale",),
    "sm_scale": ("scale",),
    "scaling": ("scale",),
    "window_size": ("window",),
    "sliding_window": ("window",),
    "logit_softcapping": ("softcap",),
    "softcapping": ("softcap",),
    "cu_seqlens": ("cu_seqlens_q",),
    "max_seqlen": ("max_seqlen_q",),
    "return_softmax_lse": ("return_lse",),
    "return_attn_probs": ("return_lse",),
    "dropout": ("dropout_p", "p"),
    "p": ("dropout_p",),
    "dropout_p": ("p",),
    "dropout_prob": ("dropout_p", "p"),
    "generator": ("rng",),
    "seed": ("rng",),
    "heads": ("num_heads",),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "kv_heads": ("num_kv_heads",),
    "epsilon": ("eps",),
    "variance_epsilon": ("eps",),
    "rms_norm_eps": ("eps",),
    "layer_norm_eps": ("eps",),
    "gamma": ("weight",),
    "beta": ("bias",),
    "scale": ("weight",),
    "skip": ("residual",),
    "offset": ("weight_offset",),
    "weight": ("class_weight",),
    "labels": ("target",),
    "label": ("target",),
    "targets": ("target",),
    "size_average": ("reduction",),
    "reduce": ("reduction",),
    "lse_square_scale": ("z_loss",),
    "num_items_in_batch": ("num_tokens",),
    "linear_weight": ("weight",),
    "lm_head_weight": ("weight",),
    "cosine": ("cos",),
    "sine": ("sin",),
    "positions": ("position_ids",),
    "dims": ("rotary_dim",),
    "axis": ("dim",),
    "max_norm": ("clip",),
    "params": ("groups",),
}
_LAST = "The last dimension is meant: leave it out."
_HEADS = "Leave it out: fewer key heads than query heads are seen in the shapes."
_CONVERT = "Leave it out; a result has the dtype of its input, and sums are made in fp32."
# Arguments that have no counterpart, and why none is needed.
NEEDLESS: dict[str, str] = {
    "normalized_shape": _LAST,
    "dim": _LAST,
    "axis": _LAST,
    "_stacklevel": "Leave it out.",
    "dtype": _CONVERT,
    "out_dtype": _CONVERT,
    "out": "Leave it out: results are always new tensors.",
    "inplace": "Leave it out: results are always new tensors.",
    "training": "Leave it out: pass 0 for the probability, or do not call it, outside training.",
    "enable_gqa": _HEADS,
    "dropout_mask": "Leave it out: a mask follows from rng=om.Rng(key, device).",
    "need_weights": "Leave it out: the probabilities are never stored.",
    "unsqueeze_dim": "Leave it out: q and k are [B, S, H, D], and the tables [S, D] or [B, S, D].",
    "deterministic": "Leave it out: ops_math.determinism(1) to (3) say how far results repeat.",
    "approximate": "Leave it out: this unit has one form.",
}
# Of one operator alone: the settings of PyTorch's AdamW are a group's, or belong to the optimizer that is one.
_OF_A_GROUP = "It is stated in each ops_math.AdamWGroup; ops_nn.optim.AdamW takes PyTorch's arguments."
SETTINGS_OF_ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad", "fused", "foreach", "maximize", "capturable")


def explain(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say in words why a call that failed does not bind, and which argument is meant, or that a tensor has no memory by strides, or which
    option is no number, dtype or text as its annotation says; return where it is something else.

    Raises: CallError, an ArgumentError that is a TypeError as well; ArgumentError for a value of another kind.
    """
    must_bind(function, len(args), tuple(kwargs))
    for argument, value in (*zip(in_order(function), args, strict=False), *kwargs.items()):
        checks.dense(function.__name__, argument, value)
        if not torch.compiler.is_dynamo_compiling() or value is None or isinstance(value, PLAIN):
            _must_fit(function, argument, value)


def in_order(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the arguments that may be given by place."""
    return tuple(n for n, p in inspect.signature(function).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)


def taken(function: Callable[..., Any]) -> str:
    """What Dynamo is to compare a call with before it binds one, `x weight|x weight eps|x`: the names that may be given by place, all of
    them, and those that must be given. It is one text, since each value that is read while tracing is compared again at every call."""
    parameters = inspect.signature(function).parameters
    needed = [n for n, p in parameters.items() if p.default is p.empty]
    return "|".join(" ".join(names) for names in (in_order(function), parameters, needed))


def traced(function: Callable[..., Any], takes: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """While Dynamo traces, which binds arguments in its own words and lets the compiler refuse text for a number: the call binds, and
    no argument is text, a dtype or None where its annotation asks for something else. Other values are left to the operator: a number may
    be symbolic here.

    Raises: CallError; ArgumentError.
    """
    by_place, names, needed = [part.split() for part in takes.split("|")]
    given = (*by_place[: len(args)], *kwargs)
    whole = all(n in given for n in needed) and all(n in names for n in kwargs)
    if not whole or len(args) > len(by_place) or len(set(given)) < len(given):
        must_bind(function, len(args), tuple(kwargs))
    for argument, value in zip(given, (*args, *kwargs.values()), strict=True):
        if value is None or isinstance(value, str | torch.dtype):
            _must_fit(function, argument, value)


def _must_fit(function: Callable[..., Any], argument: str, value: Any) -> None:
    said = unfit(function, argument, value)
    if said is not None:
        checks.fail(function.__name__, argument, *said)


def must_bind(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> None:
    """So many positional arguments and these keywords are a call of the function.

    Raises: CallError.
    """
    said = unbound(function, count, names)
    if said is not None:
        checks.not_called(function.__name__, *said)


@features.seen_as_constant  # Dynamo does not see through `inspect`
def unbound(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> tuple[str, str] | None:
    """Why they are not, and what to do; None where they are."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    unknown = next((given for given in names if given not in parameters), None)
    if unknown is not None:
        return f"keywords must be among {', '.join(parameters)}; got {unknown}", advice(name, unknown, tuple(parameters))
    positional = in_order(function)
    if count > len(positional):
        rest = [n for n in parameters if n not in positional and n not in names]
        do = f"Write what follows by name: {', '.join(n + '=' for n in rest)}." if rest else "Leave the others out."
        return f"at most {len(positional)} positional arguments ({', '.join(positional)}) may be given; got {count}", do
    twice = next((n for n in positional[:count] if n in names), None)
    if twice is not None:
        at = positional.index(twice) + 1
        return f"{twice} must be given once; got it as argument {at} and by name", "Leave one of the two out."
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in names and n not in positional[:count]]
    if missing:
        return f"{', '.join(missing)} must be given; got nothing", f"It takes {name}{signature_text(inspect.signature(function))}."
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, Real | torch.SymFloat) or (isinstance(value, torch.Tensor) and value.dim() == 0)


# What an annotation of the operators asks of a value, in words and as a test. Tensors are looked at by the operators themselves.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a number", _number),
    "int": ("a whole number", _whole),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "str": ("text", lambda value: isinstance(value, str)),
    "tuple[int, int]": ("a pair of whole numbers", lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(_whole, v))),
    "torch.dtype": ("torch's fp32, bf16, fp16 or fp64", lambda value: isinstance(value, torch.dtype) and value in DTYPE_NAME),
}


PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, torch.device)  # what Dynamo holds as a constant


@features.seen_as_constant
def unfit(function: Callable[..., Any], argument: str, value: Any) -> tuple[str, str, str] | None:
    """What a value's annotation needs, what it is, and what to do; None where it fits."""
    parameter = inspect.signature(function).parameters[argument]
    annotation, _, optional = str(parameter.annotation).partition(" | ")
    if annotation not in KINDS or optional not in ("", "None") or (optional and value is None):
        return None
    needs, fits = KINDS[annotation]
    if fits(value):
        return None
    do = "It has no default." if parameter.default is parameter.empty else f"Leave it out for {parameter.default!r}."
    return needs + (" or None" if optional else ""), repr(value), do


FAILURES = (TypeError, ValueError, KeyError, RuntimeError)  # what a call that is not meant so ends in, before or within the operator
F = TypeVar("F", bound=Callable[..., Any])


def explained(function: F) -> F:
    """The function, saying in words what is wrong with how it was called. A call that succeeds pays for a frame and nothing else."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except checks.ArgumentError:
            raise
        except FAILURES:
            explain(function, args, kwargs)
            raise

    return call  # type: ignore[return-value]


def signature_text(signature: inspect.Signature) -> str:
    """`(x, weight=None, *, eps=1e-06)`: names and defaults without annotations."""
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def advice(operator: str, unknown: str, parameters: tuple[str, ...]) -> str:
    """What to write instead of a name that is none of the parameters."""
    meant = next((n for n in MEANT.get(unknown, ()) if n in parameters), None)
    if meant is not None:
        return f"Write {meant}= for it."
    if operator == "adamw" and unknown in SETTINGS_OF_ADAMW:
        return _OF_A_GROUP
    if unknown in NEEDLESS:
        return NEEDLESS[unknown]
    near = difflib.get_close_matches(unknown, parameters, n=1)
    return f"Did you mean {near[0]}=?" if near else f"See help(ops_math.{operator})."
