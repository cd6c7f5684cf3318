"""What a block reads from an MLP it knows, and the fused way through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops_math import settings
from ops_math.blocks.attention import affine, drop_chance
from ops_math.blocks.closing import Closed, Ending, close_gelu_mlp
from ops_math.blocks.mlp_products import gated_mlp, gelu_mlp
from ops_math.blocks.parts import Part
from ops_math.blocks.products import Affine, products
from ops_math.blocks.recognise import kind_of
from ops_math.ops.dropout.op import dropout
from ops_math.rng import Rng, state_for


class Layers(NamedTuple):
    """What is read from a module: `gate` is None for an MLP of two layers.

    `activation` is silu, gelu, gelu_tanh or relu; `inner_dropout_p` stands between the activation and the last product,
    `branch_dropout_p` after it; `norm` is the module's own norm where it holds one (BERT).
    """

    gate: Affine | None
    up: Affine
    down: Affine
    activation: str
    inner_dropout_p: float = 0.0
    branch_dropout_p: float = 0.0
    norm: Any = None


def activation_name(found: Any) -> str | None:
    """silu, gelu, gelu_tanh or relu for a function or module that is one of these; None for any other."""
    functions = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu", torch.relu: "relu"}
    part = kind_of(found)
    if part is None:
        return functions.get(found) if callable(found) and not isinstance(found, torch.nn.Module) else None
    if part.kind != "gelu":
        return part.kind if part.kind in ("silu", "relu") else None
    if "approximate" in found.__dict__:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(found.approximate)
    return _hf_gelu(found)


def _hf_gelu(found: Any) -> str | None:
    """Hugging Face keeps the function in `act`: F.gelu, or one with the tanh formula."""
    act = found.__dict__.get("act")
    function = getattr(act, "func", act)
    if function is not F.gelu:
        return None
    if type(found).__name__ in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh" if getattr(act, "keywords", {}).get("approximate") == "tanh" else None
    return "gelu" if act is F.gelu else None


def _gated(module: Any) -> Layers | str:
    children = module.__dict__["_modules"]
    name = activation_name(children["act_fn"]) if "act_fn" in children else module.__dict__.get("activation", "silu")
    if name not in ("silu", "gelu", "gelu_tanh"):
        return f"activation {type(children['act_fn']).__name__ if 'act_fn' in children else name} has no fused form"
    return Layers(affine(children["gate_proj"]), affine(children["up_proj"]), affine(children["down_proj"]), name)


def _two_layers(first: Any, activation: Any, second: Any, **dropouts: Any) -> Layers | str:
    name = activation_name(activation)
    if name not in ("gelu", "gelu_tanh", "relu"):
        return f"activation {getattr(activation, '__name__', type(activation).__name__)} has no fused form"
    return Layers(None, affine(first), affine(second), name, **dropouts)


def _sequential(module: Any) -> Layers | str:
    children = list(module.__dict__["_modules"].values())
    last_drop = drop_chance(children.pop()) if kind_of(children[-1]).kind == "dropout" else 0.0  # type: ignore[union-attr]
    inner = drop_chance(children[2]) if len(children) == 4 else 0.0
    return _two_layers(children[0], children[1], children[-1], inner_dropout_p=inner, branch_dropout_p=last_drop)


def _encoder_layer(module: Any) -> Layers | str:
    children = module.__dict__["_modules"]
    drops = {"inner_dropout_p": drop_chance(children["dropout"]), "branch_dropout_p": drop_chance(children["dropout2"])}
    return _two_layers(children["linear1"], module.activation, children["linear2"], **drops)


def _bert_layer(module: Any) -> Layers | str:
    children = module.__dict__["_modules"]
    inner, output = children["intermediate"], children["output"].__dict__["_modules"]
    activation = getattr(inner, "intermediate_act_fn", F.gelu)
    found = _two_layers(inner.__dict__["_modules"]["dense"], activation, output["dense"], branch_dropout_p=drop_chance(output["dropout"]))
    return found if isinstance(found, str) else found._replace(norm=output["LayerNorm"])


_READERS: dict[str, Callable[[Any], Layers | str]] = {
    "gated_mlp": _gated,
    "sequential_mlp": _sequential,
    "encoder_layer": _encoder_layer,
    "bert_layer": _bert_layer,
}
KINDS = tuple(_READERS)


def read(part: Part, module: Any, kwargs: dict[str, Any]) -> Layers | str:
    """What the fused path needs for this call, or why it cannot run it."""
    if kwargs:
        return f"keyword {sorted(kwargs)[0]} is not read by the fused path"
    found = _READERS[part.kind](module)
    if not isinstance(found, str) and max(found.inner_dropout_p, found.branch_dropout_p) >= 1.0:
        return "its dropout drops everything"
    return found


def transform(layers: Layers, h: torch.Tensor, rng: Rng | None, split: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The branch of normalised input `h` [..., C], shaped as `h`; with `split` the bias of its last product is not added but returned,
    for what follows to add on its way."""
    if not settings.active():
        return _written_out(layers, h, rng), None
    weight, bias = layers.down
    return _fused(layers._replace(down=(weight, None if split else bias)), h, rng), bias if split else None


def can_close(layers: Layers) -> bool:
    """Whether `close` takes this MLP."""
    return layers.gate is None and layers.activation in ("gelu", "gelu_tanh")


def close(layers: Layers, h: torch.Tensor, rng: Rng | None, ending: Ending) -> Closed:
    """norm(s) and s, with s = residual + dropout(branch) of normalised input `h`, in one autograd node. Ask `can_close` first."""
    p = layers.inner_dropout_p
    state = state_for("residual_mlp", rng, h.device) if p else None
    return close_gelu_mlp(h, layers.up, layers.down, "tanh" if layers.activation == "gelu_tanh" else "none", state, p, ending)


def _fused(layers: Layers, h: torch.Tensor, rng: Rng | None) -> torch.Tensor:
    if layers.gate is not None:
        return gated_mlp(h, layers.gate, layers.up, layers.down, layers.activation)
    p = layers.inner_dropout_p
    if layers.activation == "relu":
        act = F.relu(products(h, (layers.up,))[0])
        return products(dropout(act, p, rng=rng) if p else act, (layers.down,))[0]
    state = state_for("residual_mlp", rng, h.device) if p else None
    return gelu_mlp(h, layers.up, layers.down, "tanh" if layers.activation == "gelu_tanh" else "none", state, p)


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def _written_out(layers: Layers, h: torch.Tensor, rng: Rng | None) -> torch.Tensor:
    """The same in plain PyTorch, with the same random numbers."""
    up = F.linear(h, *layers.up)
    act = _FUNCTIONS[layers.activation](up if layers.gate is None else F.linear(h, *layers.gate))
    act = act if layers.gate is None else act * up
    return F.linear(dropout(act, layers.inner_dropout_p, rng=rng) if layers.inner_dropout_p else act, *layers.down)
