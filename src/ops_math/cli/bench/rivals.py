"""Whom we are measured against: plain PyTorch, torch.compile of it, Liger, QuACK, flash-attention 4; who is missing is named."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ops_math import catalog, checks, settings

OURS, COMPILED, TORCH = "ops_math", "ops_math compiled", "torch"
NAMES = ("torch", "compile", "liger", "quack", "fa4")
EACH = "implementations"  # each of ours, forced
LIGER, QUACK, FA4 = "liger_kernel.transformers.functional", "quack", "flash_attn.cute.interface"
DISTRIBUTIONS = {"liger": "liger-kernel", "quack": "quack-kernels", "fa4": "flash-attn-4"}


class Subject(NamedTuple):
    """Something to time: a function with our signature.

    Attributes:
        name: in tables.
        fn: the function.
        own_inputs: whether it gets copies of its own, since it may write into what it was given.
        forced: implementations of ours that must run, by operator.
    """

    name: str
    fn: Callable[..., Any]
    own_inputs: bool = False
    forced: tuple[tuple[str, str], ...] = ()


class AbsentError(Exception):
    """A rival that cannot be measured here, with the reason in words."""


def _take(module: str, name: str) -> Callable[..., Any]:
    """A function of a rival.

    Raises: AbsentError where it is not installed, cannot be imported, or has no such function.
    """
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise AbsentError(f"cannot be imported ({error})") from error
    except Exception as error:  # a kernel library may raise anything when it meets a machine that it does not know
        raise AbsentError(f"fails when imported ({type(error).__name__}: {' '.join(str(error).split())[:120]})") from error
    if found is None:
        raise AbsentError(f"this version has no {name}")
    return found


def _liger_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Liger takes [B, H, S, D], as views of [B, S, H, D], and tables as wide as a head."""
    tables = (torch.cat((t, t), -1).unsqueeze(0) for t in (cos, sin))
    out = _take(LIGER, "liger_rope")(q.transpose(1, 2), k.transpose(1, 2), *tables)
    return tuple(o.transpose(1, 2) for o in out)


def _first(module: str, name: str) -> Callable[..., Any]:
    """The function's first result, where it may return more."""
    found = _take(module, name)

    def first(*args: Any, **kwargs: Any) -> Any:
        out = found(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    return first


def _same(module: str, name: str, *more: Any, **options: Any) -> Callable[[], Callable[..., Any]]:
    """One whose arguments are ours, with some more at the end."""
    return lambda: lambda *args: _take(module, name)(*args, *more, **options)


def _checked(make: Callable[[], Callable[..., Any]], module: str, name: str) -> Callable[[], Callable[..., Any]]:
    def checked() -> Callable[..., Any]:
        _take(module, name)
        return make()

    return checked


def _attention(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: lambda q, k, v, causal=False: _first(module, name)(q, k, v, causal=causal)


# By rival: where its function is, what it is called, and how a function with our signature is made of it.
THEIRS: dict[str, dict[str, tuple[str, str, Callable[[], Callable[..., Any]]]]] = {
    "liger": {
        "rms_norm": (LIGER, "liger_rms_norm", _same(LIGER, "liger_rms_norm", 1e-6)),
        "layer_norm": (LIGER, "liger_layer_norm", _same(LIGER, "liger_layer_norm", 1e-5)),
        "add_rms_norm": (LIGER, "liger_fused_add_rms_norm", _same(LIGER, "liger_fused_add_rms_norm", 1e-6)),
        "softmax": (LIGER, "liger_softmax", _same(LIGER, "liger_softmax")),
        "swiglu": (LIGER, "liger_swiglu", _same(LIGER, "liger_swiglu")),
        "geglu": (LIGER, "liger_geglu", _same(LIGER, "liger_geglu")),
        "rope": (LIGER, "liger_rope", lambda: _liger_rope),
        "cross_entropy": (LIGER, "liger_cross_entropy", lambda: _first(LIGER, "liger_cross_entropy")),
        "linear_cross_entropy": (LIGER, "liger_fused_linear_cross_entropy", lambda: _first(LIGER, "liger_fused_linear_cross_entropy")),
    },
    "quack": {
        "rms_norm": (QUACK, "rmsnorm", lambda: lambda x, w: _take(QUACK, "rmsnorm")(x, w, eps=1e-6)),
        "add_rms_norm": (QUACK, "rmsnorm", lambda: lambda x, r, w: _take(QUACK, "rmsnorm")(x, w, residual=r, eps=1e-6, prenorm=True)),
        "softmax": (QUACK, "softmax", _same(QUACK, "softmax")),
        "cross_entropy": (QUACK, "cross_entropy", lambda: _first(QUACK, "cross_entropy")),
        "linear_cross_entropy": (
            "quack.linear_cross_entropy", "chunked_linear_cross_entropy",
            lambda: _first("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
        ),
    },
    "fa4": {"attention": (FA4, "flash_attn_func", _attention(FA4, "flash_attn_func"))},
}  # fmt: skip


def _installed(name: str, module: str) -> None:
    """Raise AbsentError where a rival is not installed."""
    root = module.partition(".")[0]
    if root not in sys.modules and importlib.util.find_spec(root) is None:
        raise AbsentError(f"{DISTRIBUTIONS[name]} is not installed")


def _third_party(name: str, function: str) -> Subject:
    if function not in THEIRS[name]:
        raise AbsentError(f"has no {function}")
    module, wanted, make = THEIRS[name][function]
    _installed(name, module)
    return Subject(name, _checked(make, module, wanted)(), own_inputs=True)


def fa4() -> Subject:
    """flash-attention 4 with the signature of our attention.

    Raises: AbsentError where it cannot be measured here.
    """
    return _third_party("fa4", "attention")


@functools.cache
def liger(name: str) -> Callable[..., Any]:
    """A function of Liger's own, with its own signature.

    Raises: AbsentError where it cannot be measured here.
    """
    _installed("liger", LIGER)
    return _take(LIGER, name)


def asked(vs: str) -> tuple[str, ...]:
    """The names of `--vs`, checked; plain PyTorch is always among them, since ratios are to it."""
    names = [name.strip() for name in vs.split(",") if name.strip()]
    if vs and not names:
        checks.fail("bench", "--vs", "at least one of " + ", ".join((*NAMES, EACH)), repr(vs), "Leave it out for all that can be here.")
    for name in names:
        checks.one_of("bench", "--vs", name, (*NAMES, EACH))
    return tuple(dict.fromkeys([TORCH, *names]))


def subjects(function: str, names: tuple[str, ...], compiled: bool) -> tuple[list[Subject], dict[str, str]]:
    """What is timed, ours first, and why a rival that was asked for is not.

    Args:
        function: a public function.
        names: as `asked` returns them.
        compiled: whether ours runs under `torch.compile(fullgraph=True)` too.
    """
    operator = catalog.public_functions()[function]
    public, plain = operator.public[function], getattr(operator.file("plain"), function)
    found, missing = [Subject(OURS, public)], {}
    if compiled:
        found.append(Subject(COMPILED, torch.compile(public, fullgraph=True, dynamic=False)))
    for name in names:
        if name == TORCH:
            found.append(Subject(TORCH, plain))
        elif name == "compile":
            found.append(Subject("compile", torch.compile(plain, dynamic=False)))
        elif name == EACH:
            found += [Subject(f"{OURS}:{i.name}", public, forced=((operator.name, i.name),)) for i in operator.implementations()]
        else:
            try:
                found.append(_third_party(name, function))
            except AbsentError as error:
                missing[name] = str(error)
    return found, missing


def called(subject: Subject, work: Callable[..., Any]) -> Callable[..., Any]:
    """The work under what the subject forces."""
    if not subject.forced:
        return work

    def forced(*args: Any, **kwargs: Any) -> Any:
        with settings.force(**dict(subject.forced)):
            return work(*args, **kwargs)

    return forced


def version(distribution: str) -> str | None:
    """Of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
