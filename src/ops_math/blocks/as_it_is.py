"""A block's module as it is, for one that is not read: called with what its own forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ops_math import checks, keywords
from ops_math.blocks import attention, recognise
from ops_math.blocks.parts import BLOCK_KEYWORDS

_ATTENTION = "residual_attention"
BLOCK_OPTIONS = ("norm_first", "next_norm", "defer", "dropout_p", "rng", "narrow")


def check_modules(site: str, name: str, norm: Any, module: Any) -> None:
    """The block's module can be called, and its norm too where there is one."""
    if not callable(module):
        do = f"Pass {site}(x, norm, {name})."
        checks.fail(site, name, "an nn.Module or a function", type(module).__name__, do)
    if norm is not None and not callable(norm):
        do = "Pass the norm itself, not its weight; None for no norm."
        checks.fail(site, "norm", "an nn.Module, a function or None", type(norm).__name__, do)


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
        return module.dropout1(_called(_ATTENTION, module.self_attn, (h, h, h), {"need_weights": False, **kwargs}))
    if isinstance(module, nn.MultiheadAttention):
        return _called(_ATTENTION, module, (h, h, h), {"need_weights": False, **kwargs})
    return _called(_ATTENTION, module, (h,), kwargs)


def _called(site: str, module: Any, inputs: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    try:
        return _first(module(*inputs, **kwargs))
    except TypeError:
        _check_keywords(site, module, kwargs)
        raise


def _check_keywords(site: str, module: Any, kwargs: dict[str, Any]) -> None:
    """Why a module that runs as it is refused a keyword: it is read by the fused path alone, or by nobody."""
    if not isinstance(module, nn.Module):
        return
    takes = inspect.signature(module.forward).parameters
    unknown = [name for name in kwargs if name not in takes]
    if not unknown or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
        return
    name = next((name for name in unknown if name in BLOCK_KEYWORDS and site == _ATTENTION), None)
    if name is not None:
        why = recognise.why_not(module, attention.KINDS) or "the library is switched off"
        do = "Pass what its forward takes, or make it a module that is read (docs/two-lines.md)."
        got = f"{name}= for a module that is not read: {why}"
        checks.fail(site, name, "taken by the module's own forward, since the module runs as it is", got, do)
    of_block = (*BLOCK_OPTIONS, *(BLOCK_KEYWORDS if site == _ATTENTION else ()))
    needs = f"keywords must be among {', '.join(of_block)} and those of {type(module).__name__}.forward; got {unknown[0]}"
    checks.not_called(site, needs, keywords.advice(site, unknown[0], (*of_block, *takes)))


def run_mlp(module: Any, h: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """The module as it is."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return module.dropout2(module.linear2(module.dropout(module.activation(module.linear1(h)))))
    if own_residual(module) is not None:
        return module.output(module.intermediate(h), h)
    return _called("residual_mlp", module, (h,), kwargs)
