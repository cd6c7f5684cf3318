"""SeedPool: every random module of a model draws from a stream of its own, named by its path.

A mask is a function of (seed, path of the module, step, number of the call in the step) and of the element's place. So it depends on
neither the order of calls, nor how a batch is cut (give each piece its `first_row`), nor recomputation, nor compilation, nor how many ranks
hold a copy of the activation; and a random module that is added or taken away moves no other module's mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.features import in_backward

SOURCE = "ops_math_rng"  # where blocks and modules look for the stream of a module
CALLS = 64  # calls of one module a step: streams are numbered (step * CALLS + call) * MASKS
MASKS = 16  # streams that one call may make of its own
STEPS = 2**32 // (CALLS * MASKS)
_CHANCES = ("dropout", "attention_dropout", "dropout_p", "activation_dropout", "drop_prob")


class Attached(NamedTuple):
    """What `attach` found: modules whose masks are keyed now, those that still draw from PyTorch's generator, with the reason, and those of
    other people that are keyed where a block reads them (`om.residual_attention`, `om.residual_mlp`) and draw by themselves elsewhere."""

    keyed: tuple[str, ...]
    unkeyed: tuple[tuple[str, str], ...]
    in_blocks: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.keyed)} modules draw from the pool"]
        only = "draws from the pool where om.residual_attention or om.residual_mlp reads it, by itself where its own forward runs"
        lines += [f"  {path or 'the model'}: {only}" for path in self.in_blocks]
        return "\n".join([*lines, *(f"  {path or 'the model'}: draws by itself: {why}" for path, why in self.unkeyed)])


class _Place:
    """A place in the run: the step, the first row, and how often each module was called there."""

    def __init__(self, step: int, first_row: int, again: bool) -> None:
        self.step, self.first_row, self.again = step, first_row, again
        self.calls: dict[str, int] = {}


class _Open(NamedTuple):
    """A call whose backward may recompute it."""

    step: int
    first_row: int
    call: int


class _Step:
    """What `step` returns: in force already; as a context manager it goes back to the place before."""

    def __init__(self, pool: SeedPool, place: _Place) -> None:
        self._pool, self._before = pool, pool._place
        pool._go(place)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._pool._go(self._before)


class _Source:
    """The stream of one module, as blocks and modules ask for it; `site` tells the two blocks of one layer apart."""

    def __init__(self, pool: SeedPool, path: str) -> None:
        self.pool, self.path = pool, path

    def __call__(self, device: torch.device, site: str = "") -> om.Rng:
        return self.pool.rng(f"{self.path}:{site}" if site else self.path, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Source:
        """A copied model draws from the same pool: one of its own would stay at the step of the copy."""
        return _Source(self.pool, self.path)


class _Dropout:
    """The forward of an `nn.Dropout` that is keyed. Blocks that read the dropout's chance instead of calling it know it by `keyed`."""

    keyed = True

    def __init__(self, module: nn.Dropout, source: _Source) -> None:
        self.module, self.source = module, source

    def __call__(self, x: Tensor) -> Tensor:
        if not self.module.training or self.module.p == 0:
            return x
        y = om.dropout(x, self.module.p, rng=self.source(x.device))
        return x.copy_(y) if self.module.inplace else y


class SeedPool:
    """Streams of random numbers for the modules of a model.

    Call `step` before each training step. Two runs with one seed draw the same masks, whatever else differs between them.

    Args:
        seed: any whole number; the pool's state is this, the step and the first row.
    """

    def __init__(self, seed: int) -> None:
        _check_whole("SeedPool", "seed", seed)
        self.seed = seed
        self._place = _Place(0, 0, False)
        self._open: dict[str, list[_Open]] = {}  # calls of this step that may be recomputed
        self._left: dict[str, list[_Open]] = {}  # and those of the step before it that were not
        self._streams: dict[tuple[str, torch.device], om.Rng] = {}
        # [number of the stream's first, first row] of each device: read there, so that graphs replay
        self._clocks: dict[torch.device, Tensor] = {}

    def step(self, number: int, *, first_row: int = 0) -> _Step:
        """Go to a step: a statement, or a context manager that goes back.

        Inside a function that is recomputed by hand, or whose recomputation the pool cannot place, `with pool.step(n):` says where it is.

        Args:
            number: of the training step, from 0.
            first_row: the global number of the first row [tokens] of this piece of the batch.

        Raises:
            ArgumentError: for a number outside [0, 2^22), or a first row below 0.
        """
        _check_place("SeedPool.step", "number", number, first_row)
        if number != self._place.step:
            self._left, self._open = self._open, {}
        return _Step(self, _Place(number, first_row, in_backward()))

    def _go(self, place: _Place) -> None:
        self._place = place
        for clock in self._clocks.values():
            clock.copy_(torch.tensor([place.step * CALLS * MASKS, place.first_row]))

    def rng(self, name: str, device: torch.device | str = "cpu") -> om.Rng:
        """The stream of the next call of the module or function called `name`.

        In a backward, where a call is recomputed, it is the stream of that call.

        Args:
            name: a module's path, or any other name of yours.
            device: where masks are needed.

        Raises:
            UnsupportedError: for the 65th call in one step; where several calls could be the one that is recomputed.
        """
        place = self._place
        if in_backward() and not place.again:
            where = self._recomputed(name)
            first = (where.step * CALLS + where.call) * MASKS
            return self._base(name, torch.device(device)).child(first).at_row(where.first_row)
        call = place.calls.get(name, 0)
        if call >= CALLS:
            raise om.UnsupportedError(
                f"SeedPool: {name} was called {CALLS} times in step {place.step}: streams are numbered by step. Call pool.step(n) before "
                "each training step."
            )
        place.calls[name] = call + 1
        if not torch.compiler.is_compiling() and not place.again:
            self._open.setdefault(name, []).append(_Open(place.step, place.first_row, call))
        return self._stream(name, torch.device(device), call)

    def _recomputed(self, name: str) -> _Open:
        waiting = [calls for calls in (self._left.get(name), self._open.get(name)) if calls]
        if len({call for calls in waiting for call in calls}) == 1:  # also several that draw the same: a step that was announced twice
            return waiting[0].pop()
        count = "no call" if not waiting else f"{sum(map(len, waiting))} calls"
        raise om.UnsupportedError(
            f"SeedPool: {name} is recomputed and {count} of it in this step and the one before could be meant. Say which inside the "
            "function that is recomputed: with pool.step(n, first_row=r)."
        )

    def _base(self, name: str, device: torch.device) -> om.Rng:
        base = self._streams.get((name, device))
        if base is None:
            key = int.from_bytes(hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)
            base = self._streams[name, device] = om.Rng(key, device)
        return base

    def _stream(self, name: str, device: torch.device, call: int) -> om.Rng:
        """The stream of a call here and now. Step and first row are read on the device: as numbers they would be frozen in a graph."""
        clock = self._clocks.get(device)
        if clock is None:
            now = [self._place.step * CALLS * MASKS, self._place.first_row]
            clock = self._clocks[device] = torch.tensor(now, dtype=torch.int64, device=device)
        numbers: Any = clock[0] + call * MASKS
        rows: Any = clock[1]
        return self._base(name, device).child(numbers).at_row(rows)

    def attach(self, model: nn.Module) -> Attached:
        """Let the random modules of a model draw from the pool: `nn.Dropout`, `ops_nn.modules.Attention`, and the modules that
        `om.residual_attention` and `om.residual_mlp` are called with, each under its path.

        Modules that draw in another way are named in the result and left alone. `detach` takes it back.

        Raises:
            ArgumentError: for something that is no module.
        """
        if not isinstance(model, nn.Module):
            raise om.ArgumentError(f"SeedPool.attach: model must be a torch.nn.Module; got {type(model).__name__}. Pass the model itself.")
        devices = {p.device for p in model.parameters()} or {torch.device("cpu")}
        keyed, unkeyed, in_blocks = [], [], []
        for path, module in model.named_modules():
            if not any(_chance(part) for part in module.modules()):
                continue
            source = _Source(self, path)
            module.__dict__[SOURCE] = source
            if type(module) is nn.Dropout:
                module.__dict__["forward"] = _Dropout(module, source)
            if _chance(module):
                if _draws_here(module):
                    keyed.append(path)
                elif om.part_of(module).fused:
                    in_blocks.append(path)
                else:
                    unkeyed.append((path, f"{type(module).__name__} calls PyTorch's generator in its forward, unless a block reads it"))
            for device in devices:  # before anything is traced: a tensor made while tracing would not outlive it
                for site in ("", ":residual_attention", ":residual_mlp"):
                    self._stream(path + site, device, 0)
        return Attached(tuple(keyed), tuple(unkeyed), tuple(in_blocks))

    def detach(self, model: nn.Module) -> None:
        """Take the streams out of a model's modules."""
        for module in _held(model, self):
            if isinstance(module.__dict__.get("forward"), _Dropout):
                del module.__dict__["forward"]
            del module.__dict__[SOURCE]

    def state_dict(self) -> dict[str, int]:
        """Plain numbers for a checkpoint, to be taken between two steps."""
        return {"seed": self.seed, "step": self._place.step, "first_row": self._place.first_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a checkpoint was; modules stay attached.

        Raises:
            ArgumentError: where the state is not a pool's; the pool is as before then.
        """
        if not isinstance(state, dict) or set(state) != {"seed", "step", "first_row"}:
            got = ", ".join(sorted(map(str, state))) or "nothing" if isinstance(state, dict) else type(state).__name__
            raise om.ArgumentError(
                f"SeedPool.load_state_dict: state must be seed, step and first_row; got {got}. Pass what state_dict() gave."
            )
        _check_whole("SeedPool.load_state_dict", "seed", state["seed"])
        _check_place("SeedPool.load_state_dict", "step", state["step"], state["first_row"])
        self.seed = state["seed"]
        self._streams.clear()
        self._open, self._left = {}, {}
        self._go(_Place(state["step"], state["first_row"], False))


def _check_whole(where: str, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise om.ArgumentError(f"{where}: {name} must be a whole number; got {type(value).__name__}. Pass e.g. 0.")


def _check_place(where: str, name: str, number: Any, first_row: Any) -> None:
    """A step's number, called `name` there, and a first row [tokens]."""
    _check_whole(where, name, number)
    _check_whole(where, "first_row", first_row)
    if not 0 <= number < STEPS:
        raise om.ArgumentError(f"{where}: {name} must be at least 0 and below {STEPS}; got {number}. Start another pool.")
    if first_row < 0:
        raise om.ArgumentError(f"{where}: first_row must be at least 0; got {first_row}. Pass the rows before this piece.")


def stream_of(module: nn.Module, device: torch.device) -> om.Rng | None:
    """The stream of a module that a pool is attached to, None for others."""
    source = module.__dict__.get(SOURCE)
    return None if source is None else source(device)


def _chance(module: nn.Module) -> bool:
    """Whether a module draws random numbers itself when it trains."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    return any(isinstance(c, float) and c > 0 for c in (module.__dict__.get(name) for name in _CHANCES))


def _draws_here(module: nn.Module) -> bool:
    """Whether a module's own forward asks the pool."""
    return type(module) is nn.Dropout or getattr(type(module), "draws_from_pool", False)


def _held(model: nn.Module, pool: SeedPool) -> Iterator[nn.Module]:
    for module in model.modules():
        source = module.__dict__.get(SOURCE)
        if source is not None and source.pool is pool:
            yield module
