"""What is asked of an AdamW: its parameters and settings, looked at before PyTorch does, whose answers name neither argument nor remedy.

Where PyTorch raises a TypeError or a KeyError these are one too, so that who catches its errors catches these.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

import torch

import ops_math as om
from ops_nn.optim.gathering import require

SETTINGS = ("lr", "betas", "eps", "weight_decay")
USUAL = {"lr": "1e-3", "eps": "1e-8", "weight_decay": "0.01", "betas": "(0.9, 0.999)"}


class KindError(om.ArgumentError, TypeError):
    """An argument of another kind; a TypeError too, as PyTorch's."""


class MissingError(om.ArgumentError, KeyError):
    """An entry that a dictionary lacks; a KeyError too, as PyTorch's."""

    __str__ = Exception.__str__  # a KeyError's would put the sentence in quotes


def _of_another_kind(argument: str, needs: str, got: Any, do: str) -> NoReturn:
    name = got if isinstance(got, str) else type(got).__name__
    raise KindError(f"AdamW: {argument} must be {needs}; got {name}. {do}")


def listed(params: Any) -> list[Any]:
    """What the optimizer is given, as a list: parameters, pairs of a name and a parameter, or groups.

    Raises: ArgumentError for none at all; KindError for a module, a single tensor or what is no collection.
    """
    needs = "a list of parameters or of groups"
    if isinstance(params, torch.nn.Module):
        _of_another_kind("params", needs, params, "Pass model.parameters().")
    if isinstance(params, torch.Tensor):
        _of_another_kind("params", needs, "a single tensor", "Put it into a list.")
    if isinstance(params, dict):
        _of_another_kind("params", needs, params, "Pass model.parameters(), or a list of groups {'params': [...], 'lr': ...}.")
    if not isinstance(params, Iterable):
        _of_another_kind("params", needs, params, "Pass model.parameters().")
    found = list(params)
    require(bool(found), "params", "at least one parameter", "none", "A generator is used up by its first reader: pass list(...).")
    first = isinstance(found[0], dict)
    for at, one in enumerate(found):
        if isinstance(one, dict) != first:
            one_kind = "all parameters or all groups (dictionaries)"
            got = f"{type(found[0]).__name__} first and {type(one).__name__} at {at}"
            _of_another_kind("params", one_kind, got, "Put what stands alone into a group: {'params': [...]}.")
    return found


def group(given: Any, default: dict[str, Any], known: set[torch.Tensor]) -> None:
    """A parameter group holds tensors that can be learned and that no group before it (`known`) has, and settings within their bounds.

    Raises: ArgumentError; KindError for what is of another kind; MissingError for a group without parameters.
    """
    if not isinstance(given, dict):
        _of_another_kind("param_group", "a dictionary", given, "Pass {'params': [...], 'lr': ...}.")
    if "params" not in given:
        has = ", ".join(map(repr, given)) or "nothing"
        raise MissingError(f"AdamW: a parameter group must be a dictionary with 'params'; got {has}. Add 'params': [...].")
    _tensors(given, known)
    settings({name: given.get(name, default[name]) for name in SETTINGS}, " of a parameter group")


def _tensors(given: dict[str, Any], known: set[torch.Tensor]) -> None:
    params = given["params"]
    if isinstance(params, set):
        do = "Pass a list: the state of an optimizer is saved by position."
        _of_another_kind("params", "in an order that repeats", "a set", do)
    if not isinstance(params, Iterable):
        _of_another_kind("params of a group", "a list of parameters", params, "Put it into a list.")
    if not isinstance(params, torch.Tensor):
        params = given["params"] = list(params)  # a generator can be read once
    named, seen = 0, set()
    for one in [params] if isinstance(params, torch.Tensor) else params:
        pair = isinstance(one, tuple) and len(one) == 2
        p, named = one[1] if pair else one, named + pair
        if not isinstance(p, torch.Tensor):
            _of_another_kind("params", "tensors, or pairs of a name and a tensor", p, "Pass model.parameters().")
        made = "a call" if p.grad_fn is None else p.grad_fn.name()
        do = "Pass what it was made from, or p.detach()."
        require(p.is_leaf or p.retains_grad, "params", "leaves of the graph", f"the result of {made}", do)
        do = "Leave it in one of them. Tied weights are one parameter: model.parameters() gives each once."
        require(p not in known, "params", "in one group each", f"one of shape {list(p.shape)} in two", do)
        do = "It would be stepped twice at once: model.parameters() gives each once."
        require(p not in seen, "params", "in their group once each", f"one of shape {list(p.shape)} twice", do)
        seen.add(p)
    if named and named != len(params):
        do = "Pass model.named_parameters() or model.parameters()."
        require(False, "params", "all with names or all without", f"{named} names for {len(params)} parameters", do)


def settings(given: dict[str, Any], where: str = "") -> None:
    """Each of lr, eps and weight_decay is at least 0, betas are two numbers in [0, 1); `where` says of what.

    Raises: ArgumentError for one out of its bounds; KindError for one that is no number.
    """
    for name in ("lr", "eps", "weight_decay"):
        _at_least_0(name + where, given[name], tensor=name == "lr")
    betas = given["betas"]
    if not isinstance(betas, tuple | list):
        _of_another_kind("betas" + where, "two numbers", betas, f"Pass e.g. {USUAL['betas']}.")
    require(len(betas) == 2, "betas" + where, "two numbers", str(betas), f"Pass e.g. {USUAL['betas']}.")
    if any(isinstance(b, torch.Tensor) for b in betas):
        require(False, "betas" + where, "two numbers", "tensors", "Pass float(beta).")
    for at, beta in enumerate(betas):
        if not isinstance(beta, Real):
            _of_another_kind(f"betas[{at}]{where}", "a number", repr(beta), f"Pass e.g. {USUAL['betas']}.")
        name = f"betas[{at}]{where}"
        require(0.0 <= float(beta) < 1.0, name, "at least 0 and below 1", str(beta), "Near 1 is a long memory: 0.9 and 0.999 are usual.")
        require(bool(where) or isinstance(beta, float), name, "a float", repr(beta), f"Pass {float(beta)!r}.")  # PyTorch asks it so


def _at_least_0(name: str, value: Any, tensor: bool) -> None:
    if tensor and isinstance(value, torch.Tensor):
        require(value.numel() == 1, name, "a number or a tensor of one element", f"shape {list(value.shape)}", "Use a group for each rate.")
        value = float(value)
    if not isinstance(value, Real):
        needs = "a number or a tensor of one element" if tensor else "a number"
        _of_another_kind(name, needs, repr(value), f"{USUAL[name.split()[0]]} is usual.")
    do = "Use maximize=True to ascend." if tensor and float(value) < 0 else f"{USUAL[name.split()[0]]} is usual."
    require(float(value) >= 0.0, name, "at least 0", str(value), do)
    require(float(value) < float("inf"), name, "finite", str(value), do)


def loadable(loaded: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """A state dict is of an AdamW and has as many groups, of as many parameters, as the optimizer.

    Raises: ArgumentError; MissingError for what is no state dict of an optimizer, or of another one.
    """
    if "param_groups" not in loaded or "state" not in loaded:
        has = ", ".join(map(repr, list(loaded)[:4])) or "nothing"
        needs = "an optimizer's, with 'state' and 'param_groups'"
        raise MissingError(f"AdamW: state_dict must be {needs}; got {has}. Pass what optimizer.state_dict() returned.")
    theirs, ours = ([len(group["params"]) for group in found] for found in (loaded["param_groups"], groups))
    do = "Make the optimizer with the groups that it was saved with."
    require(theirs == ours, "state_dict", f"of groups of {_sizes(ours)} parameters, as this optimizer", f"groups of {_sizes(theirs)}", do)
    kinds = ("settings of a group", SETTINGS, loaded["param_groups"]), ("state of a parameter", ("step",), loaded["state"].values())
    for what, names, entries in kinds:
        for entry in entries:
            lacks = [name for name in names if entry and name not in entry]
            if lacks:
                has = ", ".join(repr(name) for name in entry if name != "params")
                raise MissingError(
                    f"AdamW: state_dict must be an AdamW's, with {lacks[0]!r} in the {what}; got {has}. Load one of an AdamW."
                )


def _sizes(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
