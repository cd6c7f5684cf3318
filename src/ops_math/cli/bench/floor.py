"""The least time that a training step can take on this device, part by part, measured in the run that it is held against.

Products: each matrix product of the step at its exact shape, strides and dtypes, timed alone on cold operands. Attention: the fastest of
what is installed, forward and backward, with the model's dropout. Other operators, casts, the embedding and the optimizer: the bytes that
they must move, at the rate of a copy. Nothing is launched between them, nothing waits for the host.

Timed alone, each part has the whole power budget of the device; a step is bound by it from its first tenth of a second on, and clocks fall
(an H200 from 1,980 to 1,500 MHz). So the parts are also run one after the other, over and over, until clocks have settled: the floor held.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops_math import catalog
from ops_math.cli.bench import floor_attention
from ops_math.cli.bench.clock import Clock, Timed, race
from ops_math.ops.cross_entropy.problem_linear import LinearCrossEntropyProblem
from ops_math.schedule.ceilings import synchronize
from ops_math.spec import DTYPE_OF

NAME = "floor"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::_addmm_activation")  # batched ones are attention's, which stands apart
LOSS, ATTENTION = "linear_cross_entropy", "attention"
SECONDS = 0.05  # for each product; seven visits are made in any case
SETTLED = 3.0  # seconds of all parts in a row; the second half counts
COPIED = {"cuda": 1 << 29, "cpu": 64 << 20}  # bytes


Repeated = tuple[Callable[[], Any], int]  # a call, and how often a step makes it


class Shaped(NamedTuple):
    """A tensor argument without its data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device) -> torch.Tensor:
        """One with random numbers in it: zeros would be multiplied with less power, and faster."""
        held = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return held.normal_() if self.dtype.is_floating_point else held.zero_()


class Product(NamedTuple):
    """A matrix product: the overload and its arguments, tensors as `Shaped`."""

    overload: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> str:
        """`mm [16384, 2048] x [2048, 512] bf16`."""
        shapes = " x ".join(str(list(a.shape)) for a in self.args if isinstance(a, Shaped) and len(a.shape) > 1)
        return f"{self.overload._schema.name.removeprefix('aten::')} {shapes}"

    def call(self, device: torch.device) -> Callable[[], Any]:
        """The product on operands of its own."""
        args = [a.made(device) if isinstance(a, Shaped) else a for a in self.args]
        return functools.partial(self.overload, *args, **dict(self.kwargs))


class Least(NamedTuple):
    """What a step needs at least [us], and how the parts were found.

    Attributes:
        parts: time [us] of `products`, `attention`, `operators`, `casts`, `embedding`, `optimizer`.
        products: distinct products, how often each occurs, and its time [us].
        attention: who was fastest forward and backward, and why others did not run.
        bandwidth: of the copy [B/us].
        held_us: all parts one after the other at the clocks that the device keeps up [us]; 0 on a CPU.
    """

    parts: dict[str, float]
    products: dict[str, tuple[int, float]]
    attention: floor_attention.Fastest
    bandwidth: float
    held_us: float

    @property
    def us(self) -> float:
        """All parts [us]."""
        return sum(self.parts.values())


class _Seen(TorchDispatchMode):
    """Counts matrix products, and keeps the problems of our operators, whose tensors would fill the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()
        self.posed: list[tuple[str, str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in PRODUCTS:
            named = tuple(sorted((kwargs or {}).items()))
            self.products[Product(func, tuple(_shaped(a) for a in args), named)] += 1
        elif name.startswith("ops_math::"):
            operator, _, phase = name.removeprefix("ops_math::").rpartition("_")
            self.posed.append((operator, phase, catalog.operators()[operator].phases[phase].problem_of(*args)))
        return func(*args, **(kwargs or {}))


def _shaped(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Shaped(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def seen(runner: Any) -> tuple[Counter[Product], list[tuple[str, str, Any]]]:
    """The products of a step, and (operator, phase, problem) of each call of ours; the loss is taken apart into its products."""
    runner.train()  # the first step makes what later ones find
    with _Seen() as watched:
        runner.loss().backward()
    runner.optimizer.zero_grad(set_to_none=True)
    products = watched.products
    for operator, phase, problem in watched.posed:
        if operator == LOSS and phase == "fwd":
            products.update(loss_products(problem))
    return products, [call for call in watched.posed if call[0] not in (LOSS, ATTENTION)]


def loss_products(p: LinearCrossEntropyProblem) -> list[Product]:
    """Logits and both gradients, each as one product: how they are cut into chunks is the implementation's affair."""
    dtype, mm = DTYPE_OF[p.store], torch.ops.aten.mm.default
    x, w, z = (Shaped((m, n), (n, 1), dtype) for m, n in ((p.rows, p.hidden), (p.cols, p.hidden), (p.rows, p.cols)))
    turned = [Shaped(s.shape[::-1], s.strides[::-1], dtype) for s in (w, z)]
    return [Product(mm, (x, turned[0])), Product(mm, (z, w)), Product(mm, (turned[1], x))]


def moved(runner: Any, calls: list[tuple[str, str, Any]]) -> dict[str, int]:
    """Bytes that the rest of a step must move: our operators but attention and loss, casts, the embedding, the optimizer."""
    operators = catalog.operators()
    params = list(runner.model.parameters())
    cast = sum(p.numel() * (p.element_size() + 2) for p in params if p.dim() > 1 and runner.autocast and p.dtype == torch.float32)
    tokens = runner.inputs["input_ids"].numel()
    tables = [m for m in runner.model.modules() if isinstance(m, torch.nn.Embedding)]
    item = tables[0].weight.element_size()
    rows = sum(3 * tokens * m.embedding_dim for m in tables[:1])  # rows read and written forward, their gradients read backward
    gradients = sum(m.weight.numel() for m in tables)  # PyTorch's gradient of an embedding is dense
    state = sum(7 * p.numel() * p.element_size() for p in params)  # parameter, gradient, two averages read; all but the gradient written
    found = {"operators": sum(operators[name].cost(problem, phase).bytes for name, phase, problem in calls)}
    return found | {"casts": cast, "embedding": (rows + gradients) * item, "optimizer": state}


def timed(call: Callable[[], Any], clock: Clock) -> float:
    """Median time [us] of a call with cold caches."""
    call()
    return statistics.median(sample.us for sample in race({NAME: Timed(lambda _: call())}, clock, SECONDS)[NAME])


def copy_rate(device: torch.device, clock: Clock) -> float:
    """Bytes read and written in a microsecond by a copy that leaves the caches."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    return 2 * COPIED[device.type] / timed(functools.partial(torch.empty_like(source).copy_, source), clock)


def of(name: str, setup: Any, make: Callable[[], Any], clock: Clock, free: Callable[[], None]) -> Least:
    """The floor of a preset's step.

    Args:
        name: of the preset.
        setup: batch, length, dtypes.
        make: makes a runner of the variant whose products are wanted: with packed weights, where the model packs.
        clock: of the device.
        free: gives memory back, before and after the step is looked at.
    """
    runner = make()
    device = torch.device(runner.device)
    products, calls = seen(runner)
    bytes_moved = moved(runner, calls)
    del runner
    free()
    times: dict[str, tuple[int, float]] = {}
    for product, count in products.items():
        us = timed(product.call(device), clock)
        known = times.get(product.words, (0, 0.0))
        times[product.words] = (known[0] + count, known[1] + count * us)
        free()
    shape = floor_attention.shape_of(name, setup)
    best = floor_attention.fastest(shape, device, clock)
    free()
    rate = copy_rate(device, clock)
    free()
    parts = {"products": sum(us for _, us in times.values()), "attention": best.us}
    parts |= {part: amount / rate for part, amount in bytes_moved.items()}
    held_us = 0.0
    if device.type == "cuda":
        layer = floor_attention.layer(shape, device, best)
        held_us = held([(p.call(device), n) for p, n in products.items()], [(layer, shape.layers)], sum(bytes_moved.values()), device)
        free()
    return Least(parts, times, best, rate, held_us)


def held(products: list[Repeated], attention: list[Repeated], moved: int, device: torch.device) -> float:
    """Time [us] of everything in a row, at the clocks that the device settles at; `moved` bytes are read or written by copies."""
    size = COPIED[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    whole, rest = divmod(moved // 2, size)
    part = max(1, rest // 4)
    parts: list[Repeated] = [*products, *attention, (functools.partial(target.copy_, source), whole)]
    parts.append((functools.partial(target[:part].copy_, source[:part]), 1))

    taken: list[float] = []
    end = time.perf_counter() + SETTLED
    while len(taken) < 4 or time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        for call, count in parts:
            for _ in range(count):
                call()
        synchronize(device)
        taken.append((time.perf_counter() - start) * 1e6)
    return statistics.median(taken[len(taken) // 2 :])


def row(name: str, setup: Any, least: Least, middles: dict[str, float], gpu: bool) -> dict[str, Any]:
    """A result row. `middles` are the variants' step times [ms]. Times are in it on a GPU only."""
    found: dict[str, Any] = {
        "benchmark": NAME, "model": name, "variant": NAME, "batch": setup.batch, "seq": setup.seq,
        "parts": {part: round(us / least.us, 4) for part, us in least.parts.items()},
        "shares": {variant: round(least.us / 1e3 / ms, 4) for variant, ms in middles.items()},
        "attention": {"fwd": least.attention.fwd, "bwd": least.attention.bwd, "absent": least.attention.absent},
    }  # fmt: skip
    if gpu:
        products = {words: {"count": count, "us": round(us, 1)} for words, (count, us) in least.products.items()}
        found |= {"floor_ms": round(least.us / 1e3, 3), "parts_ms": {part: round(us / 1e3, 3) for part, us in least.parts.items()}}
        found |= {"copy_gbs": round(least.bandwidth / 1e3, 1), "products": products, "held_ms": round(least.held_us / 1e3, 3)}
        found |= {"held_shares": {variant: round(least.held_us / 1e3 / ms, 4) for variant, ms in middles.items()}}
    return found


def describe(found: dict[str, Any]) -> str:
    """A floor's row in a few lines."""
    parts, times = found["parts"], found.get("parts_ms")
    each = ", ".join(f"{part} {share:.1%}" if times is None else f"{part} {times[part]:.2f} ms" for part, share in parts.items())
    whole = f" {found['floor_ms']:.1f} ms" if "floor_ms" in found else ""
    rate = f"; copies at {found['copy_gbs']:,.0f} GB/s" if "copy_gbs" in found else ""
    fastest = found["attention"]
    lines = [f"{found['model']} floor:{whole} = {each} (attention by {fastest['fwd']}, backward by {fastest['bwd']}{rate})"]
    lines += [f"  not tried for attention: {who}: {why}" for who, why in fastest["absent"].items()]
    lines.append(f"  floor over step time: {_in_order(found['shares'])}")
    if "held_ms" in found:
        lines.append(
            f"  all parts in a row, at clocks held under load: {found['held_ms']:.1f} ms; over step time: {_in_order(found['held_shares'])}"
        )
    return "\n".join(lines)


def _in_order(shares: dict[str, float]) -> str:
    """The largest first."""
    return ", ".join(f"{variant} {share:.3f}" for variant, share in sorted(shares.items(), key=lambda pair: -pair[1]))
