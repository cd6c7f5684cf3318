"""A block's module as it is, for one that is not read: called with what its own forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ops_math import checks
from ops_math.blocks import attention, recognise
from ops_math.blocks.parts import BLOCK_KEYWORDS


def own_residual(module: Any) -> Any:
    """The norm of a module that holds its residual and norm itself, as BERT's attention and layer do; else None."""
    output = module._modules.get("output") if isinstance(module, nn.Module) else None
    inner = module._modules if output is not None else {}
    return getattr(output, "LayerNorm", None) if "self" in inner or "intermediate" in inner else None


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def run_attention(module: Any, h: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The module as it is."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return module.dropout1(_first(module.self_attn(h, h, h, **{"need_weights": False, **kwargs})))
    if isinstance(module, nn.MultiheadAttention):
        return _first(module(h, h, h, **{"need_weights": False, **kwargs}))
    _check_keywords(module, kwargs)
    return _first(module(h, **kwargs))


def _check_keywords(module: Any, kwargs: dict[str, Any]) -> None:
    """A keyword that only the fused path reads, on a module that runs as it is: said in words, with the reason why it is not fused."""
    foreign = [name for name in kwargs if name in BLOCK_KEYWORDS]
    if not foreign or not isinstance(module, nn.Module):
        return
    takes = inspect.signature(module.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
        return
    for name in foreign:
        if name not in takes:
            why = recognise.why_not(module, attention.KINDS) or "the library is switched off"
            do = "Pass what its forward takes, or make it a module that is read (docs/two-lines.md)."
            checks.fail(
                "residual_attention",
                name,
                "taken by the module's own forward, since the module runs as it is",
                f"{name}= for a module that is not read: {why}",
                do,
            )


def run_mlp(module: Any, h: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The module as it is."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return module.dropout2(module.linear2(module.dropout(module.activation(module.linear1(h)))))
    if own_residual(module) is not None:
        return module.output(module.intermediate(h), h)
    return _first(module(h, **kwargs))
