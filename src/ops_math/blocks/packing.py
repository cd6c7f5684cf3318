"""Query, key and value weights, and gate and up weights, laid together, so that each group is one product."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from ops_math import checks
from ops_math.blocks.recognise import kind_of
from ops_math.layout import adjoining, lay_together

# Of each kind of part, the linear layers that share an input, in the order in which the fused path wants them.
GROUPS: dict[str, tuple[str, ...]] = {
    "llama_attention": ("q_proj", "k_proj", "v_proj"),
    "hf_llama_attention": ("q_proj", "k_proj", "v_proj"),
    "bert_self_attention": ("query", "key", "value"),
    "gated_mlp": ("gate_proj", "up_proj"),
}
_MARK = "_ops_math_packed"  # of a module whose weights were laid together, to notice when that has come undone, in its copies too


class Group(NamedTuple):
    """One module's group of weights: its path, the layers, the bytes moved, and why it was left alone (empty where it was packed)."""

    path: str
    layers: tuple[str, ...]
    bytes: int
    reason: str

    @property
    def packed(self) -> bool:
        """Whether the weights lie together now."""
        return not self.reason

    def __str__(self) -> str:
        what = f"{self.bytes / 2**20:.1f} MiB" if self.packed else f"left alone: {self.reason}"
        return f"{self.path or '(the model)'}: {', '.join(self.layers)}: {what}"


class Packing(NamedTuple):
    """What `pack_weights` did."""

    model: nn.Module
    rows: tuple[Group, ...]

    def unpack(self) -> None:
        """Give every parameter a storage of its own again."""
        for row in self.rows:
            if row.packed:
                module = self.model.get_submodule(row.path)
                module.__dict__.pop(_MARK, None)
                for parameter in _parameters(module, row.layers):
                    parameter.data = parameter.data.clone()

    def __str__(self) -> str:
        return "\n".join(str(row) for row in self.rows) or "the model holds no group of weights that can be packed"


def _parameters(module: nn.Module, layers: tuple[str, ...]) -> list[nn.Parameter]:
    linears = [module.get_submodule(name) for name in layers]
    found = [linear._parameters.get(name) for name in ("weight", "bias") for linear in linears]
    return [p for p in found if p is not None]


def _by_rank(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights, and biases where there are any."""
    groups = [[p for p in parameters if p.dim() == rank] for rank in (2, 1)]
    return [group for group in groups if group]


def _why_not(module: nn.Module, layers: tuple[str, ...], uses: Counter[int]) -> str:
    """Why a group must be left alone."""
    linears = [module._modules.get(name) for name in layers]
    if any(type(linear) is not nn.Linear for linear in linears):
        kinds = ", ".join(type(linear).__name__ for linear in linears)
        return f"its layers are {kinds}, not plain Linear layers"
    if len({linear._parameters.get("bias") is None for linear in linears}) > 1:  # type: ignore[union-attr]
        return "some of its layers have a bias and others none"
    parameters = _parameters(module, layers)
    if any(type(p) is not nn.Parameter for p in parameters):
        return "its weights are not plain parameters (sharded or parametrised)"
    if any(uses[id(p)] > 1 for p in parameters):
        return "a weight is used in another place too"
    if any(p.is_meta for p in parameters):
        return "it has no memory yet (meta device)"
    together = all(adjoining(group) is not None for group in _by_rank(parameters))
    if not together and any(p.untyped_storage().nbytes() != p.numel() * p.element_size() for p in parameters):
        return "a weight lies in a buffer that somebody else made"  # a sharding or an optimizer that flattens, and would lose sight of it
    if len({(p.dtype, p.device) for p in parameters}) > 1 or len({p.shape[1:] for p in parameters if p.dim() == 2}) > 1:
        return "its weights differ in dtype, device or input width"
    return ""


def pack_weights(model: nn.Module) -> Packing:
    """Lay the weights that share an input together, in place: q, k and v of each known attention, gate and up of each gated MLP.

    The blocks then run one product for each group, forward and backward. Parameters stay the same objects, so optimizers, tied weights
    elsewhere, names and state dicts are as before; each parameter becomes a view of its group's storage. `.to`, `deepcopy`, sharding and
    `load_state_dict(assign=True)` undo it without harm: the products run apart again, and `ops_math.stats()` says so.

    Args:
        model: a module that holds known parts (our Llama and BERT, those of transformers).

    Returns:
        a `Packing`: what was packed and what was left alone with the reason; `.unpack()` takes it back.

    Raises: ArgumentError for something that is not a module.
    Memory: none beyond one group's weights while they are moved.
    """
    if not isinstance(model, nn.Module):
        checks.fail("pack_weights", "model", "a torch.nn.Module", type(model).__name__, "Pass the model itself.")
    places = (module for _, module in model.named_modules(remove_duplicate=False))
    uses = Counter(id(p) for module in places for p in module._parameters.values() if p is not None)
    rows = []
    for path, module in model.named_modules():
        part = kind_of(module)
        layers = GROUPS.get(part.kind) if part is not None else None
        if layers is None:
            continue
        reason = _why_not(module, layers, uses)
        size = 0
        if not reason:
            parameters = _parameters(module, layers)
            size = sum(p.numel() * p.element_size() for p in parameters)
            for group in _by_rank(parameters):
                if adjoining(group) is None:
                    lay_together(group)
            module.__dict__[_MARK] = True
        rows.append(Group(path, layers, size, reason))
    return Packing(model, tuple(rows))


def why_undone(module: nn.Module) -> str:
    """Why a packed module's products run apart again; empty where they do not, or where it was never packed."""
    inner = module._modules.get("self", module) if isinstance(module, nn.Module) else None
    if inner is None or torch.compiler.is_compiling() or _MARK not in inner.__dict__:
        return ""
    part = kind_of(inner)
    layers = GROUPS.get(part.kind, ()) if part is not None else ()
    weights = [linear._parameters.get("weight") for linear in (inner._modules.get(name) for name in layers) if linear is not None]
    together = bool(weights) and all(w is not None for w in weights) and adjoining(weights) is not None  # type: ignore[arg-type]
    return "" if together else "its packed weights were moved apart; pack_weights lays them together again"
