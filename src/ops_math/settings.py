"""What the user can switch, and the only reader of environment variables.

Every switch works as a statement (until changed) and as a context manager (restored at exit). Arguments win over environment
variables, which are read at the first use, never at import:

| variable | values | meaning |
|---|---|---|
| OPS_MATH_ENABLED | 1, 0 | 0 puts everything back to plain PyTorch |
| OPS_MATH_PRECISION | default, ieee, tf32 | how fp32 matrix products in our own kernels multiply |
| OPS_MATH_DETERMINISM | 0, 1, 2, 3 | least determinism level of our operators |
| OPS_MATH_CHECKED | 1, 0 | 1 looks at values too (targets, cu_seqlens): synchronises, names the position |
| OPS_MATH_FORCE | op=impl,op=impl | use this implementation, whatever the scheduler thinks |
| OPS_MATH_CACHE | folder | where tokenizers and measurements are kept |
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from ops_math import checks, features

PRECISIONS = ("default", "ieee", "tf32")
DETERMINISM_LEVELS = (0, 1, 2, 3)
TOKEN_BLOCK = 4096  # rows: what a micro-batch often has


class Policy(NamedTuple):
    """Everything that the choice of an implementation may depend on besides the problem and the device."""

    precision: str
    determinism: int
    forced: tuple[tuple[str, str], ...]
    token_block: int = TOKEN_BLOCK


IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {}  # of each operator, entered where it is defined


class _State:
    """The switches. `policy` is None until the environment was read."""

    def __init__(self) -> None:
        self.enabled = True
        self.checked = False
        self.policy: Policy | None = None
        self.debug: Any = None


STATE = _State()
_POLICIES: dict[Policy, Policy] = {}  # equal ones are one object, so that a repeated call compares a policy by `is`


def set_environment(name: str, value: str | None) -> str | None:
    """Set an environment variable of another library, or unset it; returns what it was."""
    before = os.environ.get(name)
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
    return before


def environment(names: Iterable[str]) -> dict[str, str]:
    """The environment variables among `names` that are set, with their values."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _read_environment() -> Policy:
    get = os.environ.get
    for name in ("OPS_MATH_ENABLED", "OPS_MATH_CHECKED"):
        checks.one_of("settings", name, get(name, "0"), ("0", "1"))
    STATE.enabled = STATE.enabled and get("OPS_MATH_ENABLED", "1") == "1"
    STATE.checked = STATE.checked or get("OPS_MATH_CHECKED", "0") == "1"
    precision = get("OPS_MATH_PRECISION", "default")
    checks.one_of("settings", "OPS_MATH_PRECISION", precision, PRECISIONS)
    level = get("OPS_MATH_DETERMINISM", "0")
    checks.one_of("settings", "OPS_MATH_DETERMINISM", level, tuple(str(n) for n in DETERMINISM_LEVELS))
    pairs = [item.partition("=") for item in get("OPS_MATH_FORCE", "").split(",") if item]
    forced = {op.strip(): impl.strip() for op, _, impl in pairs}
    _check_forced("OPS_MATH_FORCE", forced)
    return Policy(precision, int(level), tuple(sorted(forced.items())))


def _check_forced(source: str, forced: dict[str, str]) -> None:
    """Every operator exists, and has that implementation."""
    for op, implementation in forced.items():
        checks.one_of(source, "operator", op, tuple(IMPLEMENTATIONS))
        checks.one_of(source, op, implementation, IMPLEMENTATIONS[op])


def policy() -> Policy:
    """The policy in force."""
    if STATE.policy is None:
        read = _read_environment()
        STATE.policy = _POLICIES.setdefault(read, read)
    return STATE.policy


def active() -> bool:
    """Whether operators run fused (true) or as plain PyTorch (false)."""
    if STATE.policy is None:
        policy()
    return STATE.enabled


def triton_interpret() -> bool:
    """Whether Triton kernels are interpreted on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def cache_folder() -> str | None:
    """The folder named by OPS_MATH_CACHE, if any; an empty name is none, and not the current folder."""
    return os.environ.get("OPS_MATH_CACHE") or None


def fp32_products() -> str:
    """`ieee` or `tf32`: how fp32 matrix products multiply. By default as PyTorch's own do on a GPU."""
    mode = policy().precision
    if mode != "default":
        return mode
    return "ieee" if features.exact_products() else "tf32"


def determinism_level() -> int:
    """The least determinism level: ours, and at least 1 under `torch.use_deterministic_algorithms(True)`."""
    return max(policy().determinism, int(torch.are_deterministic_algorithms_enabled()))


class _Switch:
    """Set at once; as a context manager it restores what was before."""

    def __init__(self, name: str, value: Any) -> None:
        if name == "policy":
            checks.not_compiled("determinism, precision or force")
        policy()
        if name == "policy":
            value = _POLICIES.setdefault(value, value)
        self._name = name
        self._before = getattr(STATE, name)
        self._ended = False
        setattr(STATE, name, value)

    def __enter__(self) -> None:
        checks.not_ended(f"a setting of {self._name}", self._ended)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        setattr(STATE, self._name, self._before)
        self._ended = True

    def __call__(self, *args: Any) -> NoReturn:
        """Refused: `@ops_math.enabled(False)` would leave it off."""
        self.__exit__(None, None, None)
        checks.no_decorator(f"a setting of {self._name}")


def enabled(on: bool = True) -> _Switch:
    """Use fused operators (True) or plain PyTorch everywhere (False); a statement or a context manager."""
    if not isinstance(on, bool):
        checks.fail("enabled", "on", "True or False", repr(on), "Pass a bool.")
    return _Switch("enabled", on)


def checked(on: bool = True) -> _Switch:
    """Look at values too (targets in range, cu_seqlens monotone) and name the position. Synchronises the device."""
    return _Switch("checked", bool(on))


def precision(mode: str) -> _Switch:
    """How fp32 matrix products in our own kernels multiply: `ieee`, `tf32`, or `default` (as PyTorch is set)."""
    checks.one_of("precision", "mode", mode, PRECISIONS)
    return _Switch("policy", policy()._replace(precision=mode))


def determinism(level: int, token_block: int = TOKEN_BLOCK) -> _Switch:
    """The least determinism level of our operators alone; `ops_math.determinism` sets PyTorch as well."""
    checks.one_of("determinism", "level", level, DETERMINISM_LEVELS)
    checks.positive("determinism", "token_block", token_block)
    return _Switch("policy", policy()._replace(determinism=level, token_block=token_block))


def force(**implementations: str) -> _Switch:
    """Use one implementation for an operator, e.g. `force(rms_norm="eager")`. An unknown name raises here, an implementation that cannot
    run a call raises at that call."""
    _check_forced("force", implementations)
    merged = dict(policy().forced)
    merged.update(implementations)
    return _Switch("policy", policy()._replace(forced=tuple(sorted(merged.items()))))
