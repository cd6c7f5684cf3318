"""`om.determinism`: the level of our operators, and with it the settings of PyTorch that the promise needs.

Each setting is applied, read back, and put back when the context ends. What can no longer be honoured is said in words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import torch

from ops_math import checks, settings

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_REPEATS = (":4096:8", ":16:8")  # the two with which cuBLAS promises the same bits with several streams
_INDUCTOR = {"deterministic": True, "max_autotune": False, "max_autotune_gemm": False, "max_autotune_pointwise": False}


class DeterminismWarning(UserWarning):
    """A setting that the determinism level needs and that can no longer be honoured in this process."""


class _Setting(NamedTuple):
    """One setting of PyTorch: how it is read and written, and what the promise needs."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    needed: Any


def _algorithms() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_algorithms(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _attribute(name: str, owner: Any, attribute: str, needed: Any) -> _Setting:
    return _Setting(f"{name}.{attribute}", lambda: getattr(owner, attribute), lambda value: setattr(owner, attribute, value), needed)


def _settings() -> list[_Setting]:
    found = [
        _Setting("torch.use_deterministic_algorithms", _algorithms, _set_algorithms, (True, False)),
        # Filling what is overwritten anyway is most of the price of determinism; our operators write all of their results.
        _attribute("torch.utils.deterministic", torch.utils.deterministic, "fill_uninitialized_memory", False),
        _attribute("torch.backends.cudnn", torch.backends.cudnn, "benchmark", False),
        _attribute("torch.backends.cudnn", torch.backends.cudnn, "deterministic", True),
    ]
    inductor = _inductor()
    if inductor is not None:
        known = {name: value for name, value in _INDUCTOR.items() if hasattr(inductor, name)}
        found += [_attribute("torch._inductor.config", inductor, name, value) for name, value in known.items()]
    return found


def _inductor() -> Any:
    """Inductor's configuration, where this PyTorch has one; it starts no compiler and no device."""
    try:
        import torch._inductor.config as config
    except ImportError:
        return None
    return config


def _set_cublas() -> tuple[bool, str | None]:
    """Whether the variable was set here, and what it was before. Says so where cuBLAS may have read it already."""
    present = settings.environment([CUBLAS]).get(CUBLAS)
    if present in CUBLAS_REPEATS:
        return False, present
    if torch.cuda.is_initialized():
        got = "is not set" if present is None else f"is {present}"
        warnings.warn(
            f"determinism: {CUBLAS} {got} and CUDA has been used in this process: cuBLAS reads it once, so products on several streams "
            f"may still differ. Set {CUBLAS}={CUBLAS_REPEATS[0]} before Python starts, or call om.determinism(1) first of all.",
            DeterminismWarning,
            stacklevel=4,
        )
    return True, settings.set_environment(CUBLAS, CUBLAS_REPEATS[0])


class Determinism:
    """What `determinism` returns: in force already; as a context manager it puts everything back at the end."""

    def __init__(self, level: int, token_block: int) -> None:
        self.level = level
        self._ended = False
        self._switch = settings.determinism(level, token_block)
        self._before: list[tuple[_Setting, Any]] = []
        self._cublas: tuple[bool, str | None] = (False, None)
        if level == 0:
            return
        self._cublas = _set_cublas()
        for setting in _settings():
            self._before.append((setting, setting.read()))
            setting.write(setting.needed)
        refused = [s.name for s, _ in self._before if s.read() != s.needed]
        if refused:
            warnings.warn(
                f"determinism: {', '.join(refused)} did not take the value that level {level} needs. Something else holds it; look there.",
                DeterminismWarning,
                stacklevel=3,
            )

    def changed(self) -> tuple[str, ...]:
        """The settings of PyTorch that hold another value than before, and the environment variable."""
        own = tuple(s.name for s, before in self._before if before != s.needed)
        return (*own, CUBLAS) if self._cublas[0] else own

    def broken(self) -> tuple[str, ...]:
        """The settings that somebody has changed since: what they held up is no longer promised."""
        return tuple(s.name for s, _ in self._before if s.read() != s.needed)

    def __enter__(self) -> Determinism:
        checks.not_ended(f"determinism({self.level})", self._ended)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        broken, self._ended = self.broken(), True
        for setting, before in reversed(self._before):
            setting.write(before)
        if self._cublas[0]:
            settings.set_environment(CUBLAS, self._cublas[1])
        self._switch.__exit__(kind, value, trace)
        if broken and kind is None:
            warnings.warn(
                f"determinism: {', '.join(broken)} was changed inside the context, so level {self.level} did not hold to its end. "
                "Change it outside.",
                DeterminismWarning,
                stacklevel=2,
            )

    def __call__(self, *args: Any) -> NoReturn:
        """Refused: `@ops_math.determinism(3)` would be in force from there on."""
        self.__exit__(None, None, None)
        checks.no_decorator(f"determinism({self.level})")


def determinism(level: int, *, token_block: int = settings.TOKEN_BLOCK) -> Determinism:
    """The determinism level from here on: a statement, or a context manager that ends it.

    0: no promise. 1: the same bits on every run on one device. 2: outputs and input gradients also depend neither on how the batch is cut
    nor on the company that sequences are packed in, and gradients of fp32 parameters are those of one micro-batch a token block, added
    up in order. 3: our own operators also do not depend on the tensor-parallel degree. A call of ours that cannot keep the level raises
    and says why; what the level costs is in the table of operators.

    From level 1 on PyTorch is set too: `torch.use_deterministic_algorithms(True)`, uninitialised memory is not filled, cuDNN does not
    time its algorithms, Inductor does not tune, and CUBLAS_WORKSPACE_CONFIG is set. PyTorch's own operators keep level 1 at most.
    `torch.use_deterministic_algorithms(True)` by itself means level 1 for our operators.

    Args:
        level: 0, 1, 2 or 3.
        token_block: rows [tokens] that a sum over rows takes together at level 2 and above, a multiple of 16. Cut a batch at multiples of
            it, one block a micro-batch, and gradients of parameters are the same bits.

    Returns:
        a context manager with `changed()`, the settings that were set, and `broken()`, those that somebody has changed since.

    Raises:
        ArgumentError: for another level, or a token block that is no multiple of 16.

    A `DeterminismWarning` says what can no longer be honoured: where cuBLAS has read its variable before.
    """
    checks.not_compiled("determinism")
    checks.one_of("determinism", "level", level, settings.DETERMINISM_LEVELS)
    if not isinstance(token_block, int) or token_block < 16 or token_block % 16:
        checks.fail("determinism", "token_block", "a multiple of 16 above 0", str(token_block), "Pass the tokens of a micro-batch.")
    return Determinism(level, token_block)
