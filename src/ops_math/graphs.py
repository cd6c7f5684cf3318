"""A whole training step as one CUDA graph: what is launch-bound then costs the host one launch.

The first calls train as they are, since they compile kernels and make the optimizer's state; the next one records the step, which runs
nothing, and from then on the record is replayed on whatever was copied into its inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ops_math import checks, features, settings

_WHAT = "graphed_step"
Step = Callable[..., Any]


class Recorder(Protocol):
    """What runs and records a step; the CUDA one is below, tests bring their own."""

    def warm(self, step: Callable[[], Any]) -> Any:
        """Run it, on a stream of its own."""

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record it without running it: how to replay it, and what it returns."""

    @property
    def kind(self) -> str:
        """The kind of device that inputs are on, empty for any."""


class _Cuda:
    """Records on the current device."""

    kind = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None

    def warm(self, step: Callable[[], Any]) -> Any:
        """On a side stream, as capturing will be: what a first call prepares is prepared there."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            result = step()
        main.wait_stream(side)
        return result

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """All records share one pool of memory: only one of them runs at a time."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph.replay, result


class _WritesError(RuntimeError):
    """A step whose record would leave undone what the step does to its inputs."""


class _Record(NamedTuple):
    """One recorded shape: its inputs' buffers, how to replay, and its result's buffers."""

    buffers: tuple[Any, ...]
    replay: Callable[[], None]
    result: Any


class Usage(NamedTuple):
    """How the calls so far ran; `refused` is the reason why the step is not recorded, empty where it can be."""

    warm: int
    recorded: int
    replayed: int
    eager: int
    refused: str


def _settings() -> tuple[Any, ...]:
    """What is in force around a call and decides what it runs: a record would go on as it was recorded."""
    cast = {kind: torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)}
    ours = settings.active(), settings.policy(), torch.are_deterministic_algorithms_enabled(), features.products()
    return torch.is_grad_enabled(), tuple(cast.items()), *ours


def _signature(names: tuple[str, ...], inputs: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """What a record depends on: of a tensor its shape, strides, dtype and device; of anything else its type and value; and settings."""
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            do = "Let the step read it from where it is, as it reads parameters."
            checks.fail(_WHAT, "inputs", "tensors that need no gradient, since they are copied", "one that requires a gradient", do)
        if isinstance(x, torch.Tensor) and kind and x.device.type != kind:
            do = f"Move it, x.to({kind!r}): a record would keep its value."
            checks.fail(_WHAT, "inputs", f"on {kind}", f"a tensor on {x.device}", do)
    described = ((tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x) for x in inputs)
    key = names, *described, _settings()
    try:
        hash(key)
    except TypeError:
        odd = next(x for x in inputs if not isinstance(x, torch.Tensor) and x.__hash__ is None)
        checks.fail(_WHAT, "inputs", "tensors and plain values", f"a {type(odd).__name__}", "Hand over its tensors one by one, or by name.")
    return key


def _reason(error: Exception) -> str:
    """The words of a failed capture, and what usually causes it."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    cause = ""
    if "captur" in first.lower():
        cause = "; something in it waits for the device: .item(), .cpu(), nonzero(), a boolean mask as an index, GradScaler.step, a print"
    return f"{first}{cause}"


class GraphedStep:
    """What `graphed_step` returns: call it as the step itself."""

    def __init__(self, step: Step, optimizer: Any, warmup: int, max_graphs: int, on_refusal: str, recorder: Recorder) -> None:
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        self._step, self._warmup, self._max_graphs, self._on_refusal, self._recorder = step, warmup, max_graphs, on_refusal, recorder
        self._records: OrderedDict[Any, _Record] = OrderedDict()
        self._seen: dict[Any, int] = {}
        self._counts = {"warm": 0, "recorded": 0, "replayed": 0, "eager": 0}
        self._refused = ""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """One step, on tensors and plain values by place or by name.

        Returns:
            what the step returns; tensors of a replayed step are overwritten by the next one, so clone what is kept.
        """
        names, inputs = tuple(named), (*args, *named.values())
        key = _signature(names, inputs, self._recorder.kind)
        found = self._records.get(key)
        if found is not None:
            return self._replayed(found, inputs)
        if self._refused:
            return self._eager(names, inputs)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen <= self._warmup:
            self._counts["warm"] += 1
            return self._recorder.warm(lambda: self._run(names, inputs))
        if len(self._records) >= self._max_graphs:
            return self._eager(names, inputs)
        return self._first(key, names, inputs)

    def _run(self, names: tuple[str, ...], inputs: Sequence[Any]) -> Any:
        places = len(inputs) - len(names)
        return self._step(*inputs[:places], **dict(zip(names, inputs[places:], strict=True)))

    def _eager(self, names: tuple[str, ...], inputs: Sequence[Any]) -> Any:
        self._counts["eager"] += 1
        return self._run(names, inputs)

    def _replayed(self, record: _Record, inputs: Sequence[Any]) -> Any:
        for buffer, x in zip(record.buffers, inputs, strict=True):
            if isinstance(x, torch.Tensor) and buffer is not x:
                buffer.copy_(x)
        record.replay()
        self._counts["replayed"] += 1
        return record.result

    def _first(self, key: Any, names: tuple[str, ...], inputs: Sequence[Any]) -> Any:
        """Record a shape, and replay it: recording runs nothing."""
        buffers = tuple(x.detach().clone(memory_format=torch.preserve_format) if isinstance(x, torch.Tensor) else x for x in inputs)
        grads = [p.grad for p in self._parameters]
        versions = [b._version for b in buffers if isinstance(b, torch.Tensor)]
        try:
            replay, result = self._recorder.record(lambda: self._run(names, buffers))
            if versions != [b._version for b in buffers if isinstance(b, torch.Tensor)]:
                raise _WritesError("it writes into an input, and would write into the record's copy of it")
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._refused = _reason(error)
            for p, grad in zip(self._parameters, grads, strict=True):
                p.grad = grad  # what was recorded before the failure was never computed: its gradients hold what memory held
            if self._on_refusal == "raise":
                checks.refuse(_WHAT, f"the step cannot be recorded: {self._refused}", 'Take that out, or pass on_refusal="eager".')
            return self._eager(names, inputs)
        self._counts["recorded"] += 1
        record = self._records[key] = _Record(buffers, replay, result)
        return self._replayed(record, inputs)

    def usage(self) -> Usage:
        """How the calls so far ran."""
        return Usage(**self._counts, refused=self._refused)

    def reset(self) -> None:
        """Forget all records: after parameters were moved, or the optimizer's settings (that are not tensors) changed."""
        self._records.clear()
        self._seen.clear()
        self._refused = ""


def _make_capturable(optimizer: Any) -> None:
    """Learning rates and step counts as tensors on the device, where a record reads them anew at each replay."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        checks.fail(_WHAT, "optimizer", "a torch.optim.Optimizer", type(optimizer).__name__, "Pass the optimizer that the step calls.")
    for group in optimizer.param_groups:
        device = group["params"][0].device
        if "capturable" not in optimizer.defaults:
            reason = f"{type(optimizer).__name__} has no capturable form, so its numbers would be frozen"
            checks.refuse(_WHAT, reason, "Use Adam or AdamW, or leave the optimizer's step out of the graph.")
        group["capturable"] = True
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
        for p in group["params"]:
            count = optimizer.state.get(p, {}).get("step")
            if isinstance(count, torch.Tensor) and count.device != device:
                optimizer.state[p]["step"] = count.to(device)


def graphed_step(
    step: Step, *, optimizer: Any = None, warmup: int = 3, max_graphs: int = 8, on_refusal: str = "raise", recorder: Recorder | None = None
) -> GraphedStep:
    """Record a training step once for each shape of its inputs, and replay it from then on.

    Args:
        step: `step(*inputs, **named)` runs forward, backward, the optimizer's step and `zero_grad(set_to_none=True)`, and returns the loss
            or any structure of tensors. It must not wait for the device, and what it reads besides its inputs must stay where it is.
            Inputs are CUDA tensors that need no gradient and are not written to; other values are part of the shape, and so are
            settings: grad mode, autocast, `ops_math.enabled` and its policy.
        optimizer: the optimizer it calls: its learning rates become tensors, which schedulers fill in place, and it is made capturable.
        warmup: calls for each shape that run as they are; the kernels are compiled and the optimizer's state is made in these.
        max_graphs: shapes that are recorded; any further one runs as it is. Pad to a few lengths.
        on_refusal: what to do where the step cannot be recorded: `raise` (an `UnsupportedError` with the reason), or `eager`, which needs
            `optimizer`: its parameters' gradients are put back as they were before the attempt.
        recorder: what records; by default CUDA graphs of the current device.

    Returns:
        a `GraphedStep`: call it with the inputs; `.usage()` says how calls ran, `.reset()` forgets the records.

    Precision: as the step. Random numbers are drawn anew at each replay, from PyTorch's generator of the device; an `Rng` is read as its
        tensor is at that time.
    Determinism: as the step.
    Memory: what the step needs, kept for the records (all share one pool), besides the inputs' buffers.
    Raises: ArgumentError for options out of their range, and at a call for an input that is not on CUDA or needs a gradient;
        UnsupportedError without a CUDA device, under more than one rank, for an optimizer that cannot be captured, or for a step that
        cannot be recorded or writes into an input.
    """
    if not callable(step):
        checks.fail(_WHAT, "step", "a function of the inputs", type(step).__name__, "Pass a function that runs one training step.")
    checks.one_of(_WHAT, "on_refusal", on_refusal, ("raise", "eager"))
    if on_refusal == "eager" and optimizer is None:
        do = "Pass it, so that gradients of a failed recording can be taken back."
        checks.fail(_WHAT, "optimizer", 'the optimizer that the step calls, with on_refusal="eager"', "None", do)
    for name, value, least in (("warmup", warmup, 1), ("max_graphs", max_graphs, 1)):
        if not isinstance(value, int) or value < least:
            checks.fail(_WHAT, name, f"an integer of at least {least}", repr(value), "The first call prepares what cannot be recorded.")
    if recorder is None:
        if not torch.cuda.is_available():
            checks.refuse(_WHAT, "CUDA graphs need a CUDA device, and there is none", "Call the step itself.")
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            checks.refuse(_WHAT, "a step with collectives over several ranks is not recorded", "Call the step itself.")
        recorder = _Cuda()
    if optimizer is not None:
        _make_capturable(optimizer)
    return GraphedStep(step, optimizer, warmup, max_graphs, on_refusal, recorder)
