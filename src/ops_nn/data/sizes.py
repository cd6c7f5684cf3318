"""Sizes rounded up, so that ever new lengths meet few shapes; and what is wrong with an argument, in words."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

import ops_math as om


def fail(function: str, argument: str, needs: str, got: str, do: str) -> NoReturn:
    """Raise an ArgumentError."""
    raise om.ArgumentError(f"{function}: {argument} must be {needs}; got {got}. {do}")


def whole(function: str, argument: str, value: Any) -> None:
    """A whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fail(function, argument, "a whole number of at least 1", repr(value), f"Pass {argument}=64, say.")


def integral(t: torch.Tensor) -> bool:
    """Whether a tensor holds whole numbers; truth values are none."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def rounded_up(n: int, multiple: int) -> int:
    """The least multiple that is at least `n`, and at least one of them."""
    return max(-(-n // multiple), 1) * multiple


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
