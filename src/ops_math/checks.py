"""Argument checks, and the only author of error sentences.

A sentence names the operator, the argument, what it needs, what it got, and what to do.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from numbers import Real
from typing import Any, NoReturn

import torch

from ops_math.spec import DTYPE_NAME, dtype_name


class ArgumentError(ValueError):
    """An argument that an operator cannot take. The message says what it needs, what it got and what to do."""


class CallError(ArgumentError, TypeError):
    """A call that does not fit the function's arguments; a TypeError too, as Python's own."""


class UnsupportedError(RuntimeError):
    """Something that was asked for and cannot be done, with the reason."""


def fail(operator: str, argument: str, needs: str, got: str, do: str) -> NoReturn:
    """Raise an `ArgumentError` in the one form all errors have."""
    raise ArgumentError(f"{operator}: {argument} must be {needs}; got {got}. {do}")


def not_called(operator: str, sentence: str, do: str) -> NoReturn:
    """Raise a `CallError`: what was given by which name or place, not what its value is."""
    error = CallError(f"{operator}: {sentence}. {do}")
    if torch.compiler.is_dynamo_compiling():  # Dynamo of PyTorch 2.11 fails over `from` with an exception that is not Python's own
        raise error
    raise error from None


def refuse(what: str, reason: str, do: str) -> NoReturn:
    """Raise an `UnsupportedError`."""
    raise UnsupportedError(f"{what}: {reason}. {do}")


def not_ended(what: str, ended: bool) -> None:
    """A context that is in force once made cannot be entered after it has ended: nothing would be in force inside."""
    if ended:
        refuse(what, "this context has ended, and entering it again sets nothing", "Make another with the same arguments.")


def not_compiled(what: str) -> None:
    """A setting that is looked at where an operator runs is not made in compiled code, which would put it back before it runs anything."""
    if torch.compiler.is_dynamo_compiling():
        refuse(what, "in a function that is compiled it would have no effect", "Set it around the call of the compiled function.")


def no_decorator(what: str) -> NoReturn:
    """A setting holds from where it is made: before a function that it decorates were called, and after it."""
    not_called(what, "it is a setting and no decorator", "Write `with` inside the function, or around its call.")


def shape_text(shape: Any) -> str:
    """`[2, 3]` for a shape."""
    return "[" + ", ".join(str(n) for n in shape) + "]"


def tensor(operator: str, argument: str, value: Any) -> None:
    """The argument is a tensor."""
    if not isinstance(value, torch.Tensor):
        sizes = isinstance(value, int | list | tuple) and argument == "weight" and operator.endswith("norm")
        do = "There is no normalized_shape here, leave it out: the last dimension is meant." if sizes else "Pass a torch.Tensor."
        fail(operator, argument, "a tensor", type(value).__name__, do)


def floating(operator: str, argument: str, value: Any) -> None:
    """The argument is a tensor of float64, float32, bfloat16 or float16."""
    tensor(operator, argument, value)
    if value.dtype not in DTYPE_NAME:
        complex_too = f"There is no complex arithmetic here; its parts are {argument}.real and {argument}.imag."
        do = complex_too if value.dtype.is_complex else f"Convert it: {argument}.to(torch.float32)."
        fail(operator, argument, "floating point (fp32, bf16, fp16 or fp64)", dtype_name(value.dtype), do)


def dense(operator: str, argument: str, value: Any) -> None:
    """The argument has memory by strides. Asked where something has failed already: asking each call would cost 70 ns a tensor."""
    if not isinstance(value, torch.Tensor):
        return
    if type(value).__module__.startswith("torch.distributed.tensor"):  # by name: importing it takes 0.3 s
        do = f"Pass {argument}.to_local(), or call it within torch.distributed.tensor.experimental.local_map."
        fail(operator, argument, "a tensor of this rank", type(value).__name__, do)
    if value.is_nested or value.layout != torch.strided:
        layout = f"one of layout {str(value.layout).removeprefix('torch.')}"
        padded = f"Pad it, {argument}.to_padded_tensor(0.0), or pass packed documents."
        got, do = ("a nested tensor", padded) if value.is_nested else (layout, f"Convert it: {argument}.to_dense().")
        fail(operator, argument, "a dense tensor", got, do)


def integer(operator: str, argument: str, value: Any) -> None:
    """The argument is a tensor of int32 or int64."""
    tensor(operator, argument, value)
    if value.dtype not in (torch.int64, torch.int32):
        fail(operator, argument, "an int64 or int32 tensor", dtype_name(value.dtype), f"Convert it: {argument}.long().")


def same_device(operator: str, first: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Every tensor is on the device of the first."""
    device = x.device
    for name, other in others.items():
        if other is not None and other.device != device:
            fail(operator, name, f"on {device}, as {first} is", f"a tensor on {other.device}", f"Move it: {name}.to('{device}').")


def at_least_1d(operator: str, argument: str, value: torch.Tensor) -> None:
    """The tensor has a last dimension."""
    if value.dim() < 1:
        fail(operator, argument, "a tensor with at least one dimension", "a scalar", "Give it a last dimension.")


def rank(operator: str, argument: str, value: torch.Tensor, dims: int, layout: str) -> None:
    """The tensor has `dims` dimensions, laid out as `layout` says."""
    if value.dim() != dims:
        fail(operator, argument, f"of {dims} dimensions {layout}", f"shape {shape_text(value.shape)}", f"Reshape {argument} to {layout}.")


def shape(
    operator: str, argument: str, value: torch.Tensor, expected: Any, why: str, do: str = "Check that both come from the same layer."
) -> None:
    """The tensor has exactly this shape."""
    if value.shape != expected and tuple(value.shape) != tuple(expected):
        fail(
            operator,
            argument,
            f"of shape {shape_text(expected)} ({why})",
            f"shape {shape_text(value.shape)}",
            do,
        )


def same_shape(operator: str, first: str, x: torch.Tensor, second: str, y: torch.Tensor) -> None:
    """Two tensors have one shape; nothing is broadcast in silence."""
    if x.shape != y.shape:
        fail(
            operator,
            second,
            f"of shape {shape_text(x.shape)}, as {first} is",
            f"shape {shape_text(y.shape)}",
            "Expand it first if you mean broadcasting.",
        )


def same_dtype(operator: str, first: str, x: torch.Tensor, second: str, y: torch.Tensor) -> None:
    """Two tensors have one dtype."""
    if x.dtype != y.dtype:
        fail(operator, second, f"{dtype_name(x.dtype)}, as {first} is", dtype_name(y.dtype), f"Convert one: {second}.to({first}.dtype).")


def probability(operator: str, argument: str, value: float) -> None:
    """A dropout probability in [0, 1)."""
    if not 0.0 <= value < 1.0:
        fail(operator, argument, "at least 0 and below 1", str(value), "Use 0 for no dropout; a probability of 1 would drop everything.")


def one_of(operator: str, argument: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of the listed values."""
    if value not in choices or type(value) not in map(type, choices):  # True equals 1
        needs = "one of " + ", ".join(repr(c) for c in choices)
        fail(operator, argument, needs, repr(value), nearest(value, choices) or "Pick one of these.")


def nearest(value: Any, choices: Iterable[Any]) -> str:
    """`Did you mean 'rms_norm'?` for a misspelt name; empty where nothing is like it."""
    names = [c for c in choices if isinstance(c, str)]
    near = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    return f"Did you mean {near[0]!r}?" if near else ""


def positive(operator: str, argument: str, value: float) -> None:
    """A number above zero."""
    if not value > 0:
        fail(operator, argument, "above 0", str(value), f"Pass a positive {argument}.")


def number(operator: str, argument: str, value: Any) -> None:
    """A number, not its name in quotes."""
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(operator, argument, "a number", repr(value), f"Pass {argument} as an int or a float.")


def takes(operator: str, argument: str, value: Any, names: tuple[str, ...], example: str) -> None:
    """A function that can be called with so many arguments."""
    needs, got = f"a function of ({', '.join(names)})", type(value).__name__
    if callable(value):
        try:
            inspect.signature(value).bind(*names)
        except ValueError:  # a callable written in C that does not say what it takes
            return
        except TypeError as error:
            got = f"one with {error}"
        else:
            return
    fail(operator, argument, needs, got, f"Pass e.g. {example}.")


def runs_alone(operator: str, argument: str, value: Any, does: str, example: str) -> None:
    """A function that can be called without arguments; a module is asked for its `forward`."""
    needs, do = f"a function without arguments that runs {does}", f"Pass e.g. {example}."
    if not callable(value):
        fail(operator, argument, needs, type(value).__name__, do)
    try:
        signature = inspect.signature(value.forward if isinstance(value, torch.nn.Module) else value)
    except (TypeError, ValueError):  # a callable written in C that does not say what it takes
        return
    missing = [n for n, p in signature.parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if missing:
        fail(operator, argument, needs, f"one of ({', '.join(missing)})", do)


def boolean(operator: str, argument: str, value: Any, meaning: str) -> None:
    """The argument is a bool tensor."""
    tensor(operator, argument, value)
    if value.dtype != torch.bool:
        fail(operator, argument, f"a bool tensor ({meaning})", dtype_name(value.dtype), f"Convert it: {argument}.bool().")


def broadcast_to(operator: str, argument: str, value: torch.Tensor, expected: Any, layout: str) -> torch.Tensor:
    """The tensor, expanded to the shape by torch's rules of broadcasting."""
    dims, given = tuple(expected), tuple(value.shape)
    if len(given) > len(dims) or any(n not in (1, m) for n, m in zip(reversed(given), reversed(dims), strict=False)):
        fail(
            operator,
            argument,
            f"broadcastable to {layout} = {shape_text(dims)}",
            f"shape {shape_text(given)}",
            "Give it size 1 where it is the same for all.",
        )
    return value.expand(dims)


def window(operator: str, value: Any) -> tuple[int, int]:
    """A pair of window bounds, each at least 0, or -1 for none."""
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(n, int) and n >= -1 for n in value)):
        fail(operator, "window", "a pair (left, right) of whole numbers from 0 on, or -1 for no bound", repr(value), "Pass e.g. (255, 0).")
    return value[0], value[1]


def document_ends(operator: str, argument: str, value: torch.Tensor, tokens: int) -> None:
    """Ends of packed documents start at 0, never fall and end at the number of tokens. Looks at values: synchronises."""
    ends = value.tolist()
    if ends[0] != 0:
        fail(operator, argument, "0 at position 0", str(ends[0]), "The first document starts at token 0.")
    for at in range(1, len(ends)):
        if ends[at] < ends[at - 1]:
            fail(operator, argument, "never falling", f"{ends[at - 1]} then {ends[at]} at position {at}", "Pass running totals of lengths.")
    if ends[-1] != tokens:
        fail(operator, argument, f"{tokens} at the end, the number of tokens", str(ends[-1]), "The last document ends with the last token.")


def within(operator: str, argument: str, value: float, low: float, high: float) -> None:
    """A number in [low, high]."""
    if not low <= value <= high:
        fail(operator, argument, f"in [{low:g}, {high:g}]", str(value), f"Pass a number from {low:g} to {high:g}.")


def not_empty(operator: str, argument: str, value: torch.Tensor, dim: int) -> None:
    """The dimension has at least one element."""
    if value.shape[dim] == 0:
        got = f"shape {shape_text(value.shape)}"
        fail(operator, argument, f"of at least one element in dimension {dim}", got, "There is nothing to choose from.")


def no_gradient(operator: str, argument: str, value: torch.Tensor) -> None:
    """The tensor is a constant: the operator has no gradient for it."""
    if value.requires_grad and torch.is_grad_enabled():
        fail(operator, argument, "a constant", "a tensor that requires a gradient", f"Pass {argument}.detach().")


def token_count(operator: str, num_tokens: Any, reduction: str) -> None:
    """A tensor [] that divides the sum; without a mean it has no meaning."""
    if not isinstance(num_tokens, torch.Tensor):
        fail(operator, "num_tokens", "a tensor []", type(num_tokens).__name__, "Keep the count on the device: torch.tensor(n, device=...).")
    if num_tokens.dim() != 0:
        fail(operator, "num_tokens", "a tensor []", f"shape {shape_text(num_tokens.shape)}", "Reduce it to one number: num_tokens.sum().")
    if reduction != "mean":
        got = f"a tensor with reduction {reduction!r}"
        fail(operator, "num_tokens", "None unless reduction is 'mean'", got, "Use reduction='mean', or divide yourself.")
    no_gradient(operator, "num_tokens", num_tokens)


def targets(operator: str, target: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """Every target is a class or ignored. Looks at values: synchronises the device."""
    outside = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if bool(outside.any()):
        where = outside.nonzero()[0].tolist()
        value = target[tuple(where)].item()
        place = ", ".join(str(n) for n in where)
        count = int(outside.sum())
        fail(
            operator, "target", f"a class in [0, {num_classes}) or ignore_index {ignore_index}", f"{value} at [{place}] ({count} in all)",
            "Check the tokenizer's vocabulary against the model's, and the padding value.",
        )  # fmt: skip


def positions(operator: str, low: int, high: int, num_rows: int) -> None:
    """Positions from `low` to `high` name rows of a table."""
    if low < 0 or high >= num_rows:
        outside = low if low < 0 else high
        needs = f"at least 0 and below {num_rows}, the tables' rows"
        fail(operator, "position_ids", needs, f"a position of {outside}", "Make longer tables or check the positions.")


class BudgetError(RuntimeError):
    """A fused call whose error is outside its budget, found by `ops_math.debug`."""


def outside_budget(what: str) -> NoReturn:
    """Raise a `BudgetError`."""
    do = "Switch the operator off with ops_math.enabled(False), and report the call with its shapes."
    raise BudgetError(f"outside the error budget:\n{what}\n{do}")


def small_number(operator: str, argument: str, value: float) -> None:
    """An eps: zero or above, and finite."""
    if not 0.0 <= value < float("inf"):
        fail(operator, argument, "finite and at least 0", str(value), "Use the value the model was trained with, e.g. 1e-6.")


def attention_mask(operator: str, mask: Any) -> None:
    """A mask that is boolean, or floating and added; an integer one could mean either."""
    tensor(operator, "mask", mask)
    if mask.dtype != torch.bool and mask.dtype not in DTYPE_NAME:
        do = "Pass mask.bool() if 1 means that a key may be seen; an additive mask holds 0 and -inf in a floating dtype."
        fail(operator, "mask", "boolean (True where a key may be seen) or floating point (added to the scores)", dtype_name(mask.dtype), do)


class VerificationError(RuntimeError):
    """An operator that verification found wrong. The message is the report."""


def unproved(what: str, report: str) -> NoReturn:
    """Raise a `VerificationError`."""
    raise VerificationError(f"{what}: verification found it wrong.\n{report}\nMend it, or narrow what it accepts.")
