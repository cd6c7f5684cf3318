"""The shared nouns: dtype names, Device, Cost, Case, Implementation. Knows no operator and no hardware."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch

DTYPE_NAME: dict[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
DTYPE_OF: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAME.items()}
ITEM_SIZE: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `fp32`, `bf16`, `fp16`, `fp64`, or torch's own for others."""
    return DTYPE_NAME.get(dtype) or str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and sums for a storage dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Device(NamedTuple):
    """Facts about one piece of hardware, plain enough to be a dictionary key.

    `bandwidth_gbs` [GB/s] and `product_tflops` [TFLOP/s, bf16] are ceilings used to predict time; `launch_us` [us] is the host's
    cost of starting one kernel (on a CPU: of calling one PyTorch function).
    """

    kind: str
    arch: str
    name: str
    num_cores: int
    shared_bytes: int
    bandwidth_gbs: float
    product_tflops: float
    launch_us: float


class Cost(NamedTuple):
    """What a problem must move and compute at least, term by term: `(name, bytes)` and `(name, flops)`."""

    read: tuple[tuple[str, int], ...]
    written: tuple[tuple[str, int], ...]
    flops: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes read and written [B]."""
        return sum(n for _, n in self.read) + sum(n for _, n in self.written)

    @property
    def total_flops(self) -> int:
        """Floating-point operations."""
        return sum(n for _, n in self.flops)


class Problem(Protocol):
    """Plain numbers that describe one call: a NamedTuple, so that it hashes fast, sorts, prints and is a JSON key."""

    def __hash__(self) -> int: ...


class Call(NamedTuple):
    """Arguments of a public function."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Case(NamedTuple):
    """One call worth testing.

    `make(draw)` returns the `Call`; `draw` (see `ops_math.testing.Draw`) makes tensors in the dtype under test. Floating tensors
    get gradients unless their position or keyword is in `frozen`. `kind` says what the inputs stress: plain, near_eps, cancelling,
    confident. `looser` maps a statistic to a factor, and needs `reason`; it is for the implementations in `looser_for`, or for all.
    """

    name: str
    fn: str
    make: Callable[[Any], Call]
    kind: str = "plain"
    frozen: tuple[int | str, ...] = ()
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    small: bool = True
    looser: tuple[tuple[str, float], ...] = ()
    reason: str = ""
    looser_for: tuple[str, ...] = ()


class Offer(NamedTuple):
    """The determinism level that an implementation offers, and why not more (empty where there is no more)."""

    level: int
    why: str = ""


class Implementation:
    """One way to compute an operator: a module with launchers, imported when it is first looked at.

    The module offers `launch_fwd(problem, config, *tensors)` and `launch_bwd(problem, config, *tensors)`, and may offer
    `supports(problem, device, phase) -> str | None` (why not), `configs(problem, device, phase) -> tuple` (legal configurations,
    best guess first), `predict_us(problem, device, phase) -> float`, `PASSES` (memory traffic over the least possible; or
    `passes(problem, phase)`),
    `CALLS` (kernels or PyTorch functions started a call), `determinism(problem, config, phase) -> int`, `signature(problem, config, phase)`
    (configurations of one signature give the same bits, so that at level 1 a measurement may exchange them), `KINDS` (device kinds it
    runs on) and `invariant_configs(problem, device, phase)` (in place of `configs` from level 2 on). What its bits promise stands in the
    operator's own `levels` module, named by `levels_name`, where there is one.
    """

    def __init__(self, operator: str, name: str, module_name: str, levels_name: str = "") -> None:
        self.operator = operator
        self.name = name
        self.module_name = module_name
        self.levels_name = levels_name
        self._module: ModuleType | None = None
        self._levels: ModuleType | None = None
        self.replaced: dict[str, Callable[..., Any]] = {}  # launchers planted by tests, by phase

    @property
    def module(self) -> ModuleType:
        """The module with the launchers."""
        if self._module is None:
            self._module = importlib.import_module(self.module_name)
        return self._module

    def optional(self, attribute: str, default: Any) -> Any:
        """An optional attribute of the module."""
        return getattr(self.module, attribute, default)

    @property
    def levels(self) -> Any:
        """What the operator states of its bits; None where it has no `levels` module."""
        if self._levels is None and self.levels_name and importlib.util.find_spec(self.levels_name) is not None:
            self._levels = importlib.import_module(self.levels_name)
        return None if self._levels is None else self._levels.LEVELS

    def offer(self, problem: Any, config: Any, phase: str) -> Offer:
        """The determinism level that it offers for a problem: its module's own word, else that of the operator's levels, else 1."""
        own = self.optional("determinism", None)
        if own is not None:
            return Offer(own(problem, config, phase))
        stated = self.levels
        if stated is None:
            return Offer(1, "it states no more")
        found: Offer = stated.offer(problem, self.name, config, phase)
        return found

    def signature(self, problem: Any, config: Any, phase: str) -> str | None:
        """What decides the order of its sums: its module's own word, else that of the operator's levels; None where neither says."""
        own = self.optional("signature", None)
        if own is not None:
            return str(own(problem, config, phase))
        stated = self.levels
        found: str | None = None if stated is None else stated.signature(problem, self.name, config, phase)
        return found

    def launcher(self, phase: str) -> Callable[..., Any]:
        """`launch_fwd` or `launch_bwd`."""
        return self.replaced.get(phase) or getattr(self.module, "launch_" + phase)

    def __repr__(self) -> str:
        return f"{self.operator}.{self.name}"


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (Triton's own is a function of its language, and costs a launcher 2 us.)"""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`, 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def few_warps(values: int, each: int, cores: int) -> int:
    """4, 2 or 1: the most warps a program, of `each` values a warp, with which `values` still make a program for each core."""
    return next((warps for warps in (4, 2) if values >= warps * each * cores), 1)


def product(numbers: Any) -> int:
    """The product of integers, 1 for none (symbolic sizes stay symbolic)."""
    total = 1
    for n in numbers:
        total = total * n
    return total


Record = Mapping[tuple[str, ...], Mapping[str, float]]
