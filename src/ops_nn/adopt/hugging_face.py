"""Layers and heads of Hugging Face's Llama, Qwen2, Mistral and BERT, known by the names of their classes; nothing is imported."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import nn

import ops_math as om
from ops_nn.adopt import head
from ops_nn.adopt.swap import Swap, own_class

_PREFIX = "transformers.models."
_DECODERS = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}
# Options of a call that ask for more than a training step's loss: the model's own forward serves these.
_PLAIN_WHEN_GIVEN = (
    "output_attentions",
    "output_hidden_states",
    "logits_to_keep",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "return_dict",
)
_LOSS_OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")


def _checkpoints(layer: Any) -> bool:
    """Whether this call of the layer's forward is the one that Hugging Face would checkpoint, in versions that do so in the forward."""
    base = next((c for c in type(layer).__mro__ if c.__name__ == "GradientCheckpointingLayer"), None)
    in_forward = base is not None and "__init_subclass__" in base.__dict__
    return in_forward and layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()


def _signed_as(cls: Any, function: Any) -> Any:
    """The function with the signature of the class's forward, which data collators look at."""
    function.__signature__ = inspect.signature(cls.forward)
    return function


def _returns_tuple(cls: Any) -> bool:
    return "uple" in str(inspect.signature(cls.forward).return_annotation)


def _plain(kwargs: dict[str, Any]) -> bool:
    """Whether the layer's own forward serves this call: switched off, given a cache or another sequence, asked for attentions."""
    given = any(kwargs.get(name) is not None for name in ("cache", "past_key_value", "past_key_values", "encoder_hidden_states"))
    return not om.is_enabled() or given or bool(kwargs.get("output_attentions"))


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments after the hidden states by their names."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _names(cls: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[2:]


def _decoder_layer(cls: type) -> Any:
    wrapped, names = _returns_tuple(cls), _names(cls)

    def fused(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        pair = om.residual_attention(hidden_states, self.input_layernorm, self.self_attn, next_norm=self.post_attention_layernorm, **kwargs)
        x = om.residual_mlp(pair, None, self.mlp)
        return (x,) if wrapped else x

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _by_name(names, args, kwargs)
        if _checkpoints(self):
            call = call | {name: None for name in ("cache", "past_key_values") if name in call} | {"use_cache": False}
            if not _plain(call):
                return self._gradient_checkpointing_func(partial(fused, self, **call), hidden_states)
        if _plain(call):
            return type(self).forward(self, hidden_states, *args, **kwargs)
        return fused(self, hidden_states, **call)

    return _signed_as(cls, forward)


def _bert_layer(cls: type) -> Any:
    wrapped, names = _returns_tuple(cls), _names(cls)

    def fused(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        x = om.residual_attention(hidden_states, None, self.attention, norm_first=False, narrow=True, **kwargs)
        x = om.residual_mlp(x, None, self, norm_first=False)
        return (x,) if wrapped else x

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _by_name(names, args, kwargs)
        if _plain(call) or self.is_decoder:
            return type(self).forward(self, hidden_states, *args, **kwargs)
        if _checkpoints(self):
            return self._gradient_checkpointing_func(partial(fused, self, **call), hidden_states)
        return fused(self, hidden_states, **call)

    return _signed_as(cls, forward)


def _loss_call(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of the model below the head for a training step with labels; None for any other call."""
    if not (self.training and om.is_enabled()):
        return None
    bound = inspect.signature(type(self).forward).bind(self, *args, **kwargs).arguments
    call = {**bound, **bound.get("kwargs", {})}
    for name in ("self", "kwargs"):
        call.pop(name, None)
    if call.get("labels") is None or any(call.get(name) for name in _PLAIN_WHEN_GIVEN):
        return None
    return {name: value for name, value in call.items() if name not in _PLAIN_WHEN_GIVEN}


def _output(self: Any, name: str, loss: torch.Tensor) -> Any:
    """The model's own output class, with the loss alone."""
    return getattr(sys.modules[own_class(self).__module__], name)(loss=loss, logits=None)


def _causal_loss(self: Any, hidden: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Hugging Face's causal loss: labels are shifted here, and divided by `num_items_in_batch` where that is given."""
    ignore, count, shifted = options.get("ignore_index", -100), options.get("num_items_in_batch"), options.get("shift_labels")
    target = shifted if shifted is not None else nn.functional.pad(labels, (0, 1), value=ignore)[..., 1:]
    if count is not None and not isinstance(count, torch.Tensor):
        count = torch.tensor(count, device=hidden.device)
    head_ = self.lm_head
    reduction = "mean" if count is None else "sum"
    loss = om.linear_cross_entropy(
        hidden, head_.weight, target.to(hidden.device), bias=head_.bias, ignore_index=ignore, reduction=reduction
    )
    return loss if count is None else loss / count.to(loss.device)


def _why_not_causal(model: Any) -> str:
    function = getattr(model, "loss_function", None)
    if getattr(function, "__name__", "") != "ForCausalLMLoss" or not str(getattr(function, "__module__", "")).startswith("transformers."):
        return "its loss function is not ForCausalLMLoss"
    return om.part_of(model.lm_head).reason


def _causal_lm(cls: type) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _loss_call(self, args, kwargs)
        if call is None or _why_not_causal(self):
            return type(self).forward(self, *args, **kwargs)
        labels = call.pop("labels")
        options = {name: call.pop(name) for name in _LOSS_OPTIONS if name in call}
        call.setdefault("use_cache", False)
        with om.cast_weights(self.model):
            hidden = self.model(**call)[0]
        return _output(self, "CausalLMOutputWithPast", _causal_loss(self, hidden, labels, options))

    return _signed_as(cls, forward)


def _masked_lm(cls: type) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _loss_call(self, args, kwargs)
        if call is None or head.why_not_masked(self.cls):
            return type(self).forward(self, *args, **kwargs)
        labels = call.pop("labels")
        rows = head.labelled_rows(labels)
        with om.cast_weights(self.bert):
            hidden = self.bert(**call)[0]
        return _output(self, "MaskedLMOutput", head.masked_loss(hidden, self.cls.predictions, labels, rows))

    return _signed_as(cls, forward)


def swaps(path: str, module: nn.Module) -> Swap | None:
    """What to put into a module of these families, or None."""
    cls = own_class(module)
    held: Any = module
    for family, name in _DECODERS.items():
        if cls.__module__ != f"{_PREFIX}{family}.modeling_{family}":
            continue
        if cls.__qualname__ == f"{name}DecoderLayer":
            parts = {part: getattr(held, part) for part in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")}
            return Swap(path, module, _decoder_layer(cls), "layer", parts)
        if cls.__qualname__ == f"{name}ForCausalLM":
            return Swap(path, module, _causal_lm(cls), "head and loss", {"lm_head": held.lm_head}, _why_not_causal(held))
    if cls.__module__ == f"{_PREFIX}bert.modeling_bert" and cls.__qualname__ == "BertLayer":
        return Swap(path, module, _bert_layer(cls), "layer", {"attention": held.attention, "": module})
    if cls.__module__ == f"{_PREFIX}bert.modeling_bert" and cls.__qualname__ == "BertForMaskedLM":
        return Swap(path, module, _masked_lm(cls), "head and loss over labelled tokens", {"cls": held.cls}, head.why_not_masked(held.cls))
    return None
