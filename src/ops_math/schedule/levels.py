"""What an operator promises about its bits, and how a call is cut so that the promise holds.

Level 1: the same bits on every run on one device. Level 2: outputs and input gradients depend neither on how the batch is cut nor on the
company that sequences are packed in, and gradients of fp32 parameters are those of one micro-batch a token block, added up in order.
Level 3: nor do they depend on the tensor-parallel degree.

Two things break level 2. A configuration that follows the number of rows: at level 2 the choice is made for a problem without it
(`Levels.canonical`). And sums over rows, whose order follows what else is in the batch: they run token block by token block
(`Levels.launcher`), and blocks are added in fp32. Where a PyTorch function may sum a row in another order because of its neighbours, as
on a CPU, each row is a call of its own: then there are no neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ops_math.rng import Rng
from ops_math.spec import DTYPE_OF, Offer

NO_STATEMENT = "it states no more"
VENDOR = "PyTorch's kernels choose their order of sums by the number of rows"
COMPILED = "compiled code cuts rows and vectors by the number of rows"
PRODUCTS = "its matrix products are a vendor library's, which promises level 1"
PLACE = "where a row starts between two 16-byte boundaries decides the order of its sums"
ALIGNMENT = 64  # bytes: what PyTorch's allocators keep at least
A_ROW = {"eager": 1}  # on a CPU a row is a call of its own


class Cut(NamedTuple):
    """How the tensors of a launcher follow the rows of its problem, a letter each.

    Given: `m` a matrix, all but the last dimension are rows; `v` something for each row; `w` a parameter; `s` the state of random numbers;
    `l` a loss's gradient, for each row where the reduction is `none`; `.` the same for all rows. Made: `m`, `v`; `+` a sum over rows, the
    gradient of the parameter whose dtype the problem has in the field of `sums`, in turn; `l` a loss; `1` the same for all rows.
    """

    given: str
    made: str
    sums: tuple[str, ...] = ()


def by_place(p: Any, implementation: str, config: Any, phase: str) -> Offer:
    """What is offered where our kernels may cut rows at the 16-byte grid (`ends` of a configuration): such rows are summed by their place
    among eight, which follows how a batch is cut."""
    if implementation == "vendor":
        return Offer(1, VENDOR)
    if implementation == "inductor":
        return Offer(1, COMPILED)
    return Offer(1, PLACE) if implementation == "triton_gpu" and config.ends else Offer(3)


class Levels(NamedTuple):
    """The statement of one operator.

    `offers` gives the level of each implementation with the reason why not more, or is a function of problem, implementation,
    configuration and phase. `pieces` is how many rows an implementation may take in one call, where that is limited. `whole` are fields
    that the choice must not depend on, with what it is made for instead (None: a token block). `orders` names, by implementation and phase,
    the fields of a configuration that decide the order of sums; configurations that agree in them may be exchanged at level 1.
    """

    offers: Mapping[str, Offer] | Callable[[Any, str, Any, str], Offer]
    price: str
    cuts: Mapping[str, Cut] = {}
    pieces: Mapping[str, int] = {}
    whole: Mapping[str, int | None] = {"rows": None}
    orders: Mapping[tuple[str, str], tuple[str, ...]] = {}

    def offer(self, problem: Any, implementation: str, config: Any, phase: str) -> Offer:
        """The level that an implementation offers for a problem."""
        if callable(self.offers):
            return self.offers(problem, implementation, config, phase)
        return self.offers.get(implementation, Offer(1, NO_STATEMENT))

    def signature(self, problem: Any, implementation: str, config: Any, phase: str) -> str | None:
        """What decides the order of sums of a configuration, None where that is not stated."""
        fields = self.orders.get((implementation, phase))
        if fields is None or config is None:
            return None
        return " ".join([implementation, *(f"{name}={getattr(config, name)}" for name in fields)])

    def canonical(self, problem: Any, token_block: int) -> Any:
        """The problem without what the choice must not depend on."""
        return problem._replace(**{name: token_block if n is None else n for name, n in self.whole.items()})

    def launcher(self, implementation: str, phase: str, launcher: Callable[..., Any], token_block: int) -> Callable[..., Any]:
        """The launcher, called piece by piece where the promise needs it."""
        cut, piece = self.cuts.get(phase), self.pieces.get(implementation)
        if cut is None:
            return launcher
        sums = bool(set(cut.made) & {"+", "l"})

        def run(problem: Any, config: Any, *tensors: torch.Tensor | None) -> Any:
            if problem.rows == 0:
                return launcher(problem, config, *tensors)
            most = piece or (token_block if sums else problem.rows)
            return run_cut(cut, launcher, token_block if sums else problem.rows, most, problem, config, tensors)

        return run


NOTHING_STATED = Levels({}, "unknown", whole={})


def chosen_for(stated: Levels | None, problem: Any, level: int, token_block: int) -> Any:
    """The problem that a choice is made for, measured and recorded: from level 2 on without what the choice must not depend on."""
    return problem if level < 2 or stated is None else stated.canonical(problem, token_block)


class _Call(NamedTuple):
    """A call to cut: the problem with parameters in at least fp32, its tensors by rows."""

    cut: Cut
    problem: Any
    tensors: list[torch.Tensor | None]

    def part(self, start: int, stop: int) -> tuple[Any, list[torch.Tensor | None]]:
        """Problem and tensors of some rows."""
        parts: list[torch.Tensor | None] = []
        for letter, t in zip(self.cut.given, self.tensors, strict=True):
            if t is None or letter in ".w" or (letter == "l" and self.problem.reduction != "none"):
                parts.append(t)
            elif letter == "s":
                parts.append(Rng.of_state(t).at_row(start).state)
            else:
                parts.append(_laid(t[start:stop]))
        return self.problem._replace(rows=stop - start), parts


def _laid(t: torch.Tensor) -> torch.Tensor:
    """Dense, and where a buffer of its own would be: the order of sums may follow strides and addresses."""
    return t if t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def _opened(cut: Cut, problem: Any, tensors: tuple[torch.Tensor | None, ...]) -> _Call:
    rows = problem.rows
    made: list[torch.Tensor | None] = []
    wide = {name: "fp32" for name in cut.sums if getattr(problem, name) in ("bf16", "fp16")}
    for letter, t in zip(cut.given, tensors, strict=True):
        if t is None:
            made.append(None)
        elif letter == "w":
            made.append(t.float() if t.dtype in (torch.bfloat16, torch.float16) and wide else t)
        elif letter == "m":
            made.append(t.reshape(rows, t.shape[-1]))
        elif letter == "v" or (letter == "l" and problem.reduction == "none"):
            made.append(t if t.shape[0] == rows else t.reshape(rows))
        else:
            made.append(t)
    return _Call(cut, problem._replace(**wide), made)


def _pieces(rows: int, token_block: int, piece: int) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether a token block begins)."""
    for block in range(0, rows, token_block):
        end = min(block + token_block, rows)
        for start in range(block, end, piece):
            yield start, min(start + piece, end), start == block


class _Kept(NamedTuple):
    """A result that is the same for every piece, or that was not asked for."""

    value: torch.Tensor


class _Sum:
    """A sum over rows: within token blocks, then over blocks, each in order."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.block: torch.Tensor | None = None

    def add(self, t: torch.Tensor, fresh: bool) -> None:
        if fresh:
            self.close()
            self.block = t.clone()
        else:
            assert self.block is not None
            self.block += t

    def close(self) -> torch.Tensor:
        """The sum so far."""
        if self.block is not None:
            self.total = self.block if self.total is None else self.total + self.block
            self.block = None
        return self.total  # type: ignore[return-value]  # asked for after at least one block


def run_cut(
    cut: Cut,
    launcher: Callable[..., Any],
    token_block: int,
    piece: int,
    problem: Any,
    config: Any,
    tensors: tuple[torch.Tensor | None, ...],
) -> Any:
    """Call a launcher piece by piece of its rows: at most `piece` at a time, none of which crosses the end of a token block."""
    rows = problem.rows
    call = _opened(cut, problem, tensors)
    shape = next(t.shape[:-1] for letter, t in zip(cut.given, tensors, strict=True) if letter == "m" and t is not None)
    if rows <= min(piece, token_block):
        found = launcher(*_at(call, config, 0, rows))
        single = isinstance(found, torch.Tensor)
        whole = [_whole(problem, letter, t, rows) for letter, t in zip(cut.made, (found,) if single else found, strict=True)]
        return _finished(cut, problem, whole, shape, single)
    results: list[Any] = []
    single = False
    for start, stop, fresh in _pieces(rows, token_block, piece):
        found = launcher(*_at(call, config, start, stop))
        single = isinstance(found, torch.Tensor)
        found = (found,) if single else found
        if not results:
            results = [_start(problem, letter, t, stop - start, rows) for letter, t in zip(cut.made, found, strict=True)]
        for result, t in zip(results, found, strict=True):
            if isinstance(result, _Sum):
                result.add(t, fresh)
            elif not isinstance(result, _Kept):
                result[start:stop] = t.reshape(stop - start, *result.shape[1:])
    return _finished(cut, problem, results, shape, single)


def _finished(cut: Cut, problem: Any, results: list[Any], shape: tuple[int, ...], single: bool) -> Any:
    fields = iter(cut.sums)
    made = tuple(_finish(problem, letter, r, shape, fields) for letter, r in zip(cut.made, results, strict=True))
    return made[0] if single else made


def _whole(problem: Any, letter: str, t: torch.Tensor, rows: int) -> Any:
    """A result of one call on all rows, as the results of pieces are kept."""
    found = _start(problem, letter, t, rows, rows, empty=False)
    if isinstance(found, _Sum):
        found.add(t, True)
    return found


def _at(call: _Call, config: Any, start: int, stop: int) -> tuple[Any, ...]:
    problem, parts = call.part(start, stop)
    return problem, config, *parts


def _start(problem: Any, letter: str, first: torch.Tensor, count: int, rows: int, empty: bool = True) -> Any:
    """Where the pieces of a result go: a tensor of all rows, or, where there is one piece, that."""
    if letter == "1" or (first.numel() == 0 and first.dim() == 1):
        return _Kept(first)
    if letter == "+" or (letter == "l" and problem.reduction != "none"):
        return _Sum()
    width = first.numel() // count
    tail = (first.shape[-1],) if letter == "m" else () if width == 1 and first.dim() <= 1 else (width,)
    return first.new_empty((rows, *tail)) if empty else first.reshape(rows, *tail)


def _finish(problem: Any, letter: str, result: Any, shape: tuple[int, ...], fields: Iterator[str]) -> Any:
    field = next(fields) if letter == "+" else ""
    if isinstance(result, _Sum):
        total = result.close()
        return total.to(DTYPE_OF[getattr(problem, field)]) if field else total
    if isinstance(result, _Kept):
        return result.value
    if letter == "m":
        return result.view(*shape, result.shape[-1])
    return result.view(shape) if letter == "l" else result
