"""ConsistencyChecker: trace runs, compare them, and say where they first part."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.debug import lockstep as stepping
from ops_nn.debug import names, replay
from ops_nn.debug.compare import Comparison, floors_of
from ops_nn.debug.observe import FULL, Observer
from ops_nn.debug.report import LOCKSTEP, Report
from ops_nn.debug.trace import ENDED, INPUT_GRADIENT, LIGHT, OUTPUT_GRADIENT, Key, Trace

BLOCKS, ALL, OPERATORS = "blocks", "all", "operators"
_WHERE = "ConsistencyChecker"


class ConsistencyChecker:
    """Says whether two runs of a model agree, and if not, which module first does not.

    Args:
        precision: how much rounding is let pass, as a relative l2 error in fp32; 1e-6 is 17 units of fp32. In fp64 the same number of
            fp64's units; a 16-bit tensor may be off by a quarter as many of its own units on top (1.6 % in bf16, 0.2 % in fp16).
        check_gradients: look at gradients too.
        dump_on_failure: write the first culprit's call to a file for `ops-math replay`, where tensors were kept.
        folder: for those files; by default one of the user's, below the system's folder for temporary files.
        mode: `light` keeps a fingerprint of 128 bits, sizes, counts and samples of each tensor, of a large weight those of an element of
            every row; `full` reads all and keeps the tensors too, on the CPU.
        observe: `blocks` (the model, its blocks and what stands beside them), `all` modules, or `operators`: all
            modules and what each fused operator inside them returned, which is slow; None for blocks in light mode, else all.
        limit_bytes: of tensors that a full trace keeps [B].

    Raises:
        ArgumentError: for a precision that is not above 0 or an unknown mode.
    """

    def __init__(
        self,
        precision: float = 1e-6,
        check_gradients: bool = True,
        dump_on_failure: bool = True,
        folder: str | Path | None = None,
        mode: str = LIGHT,
        observe: str | None = None,
        limit_bytes: int = 4 * 2**30,
    ) -> None:
        _one_of("mode", mode, (LIGHT, FULL))
        _one_of("observe", observe, (None, BLOCKS, ALL, OPERATORS))
        if not isinstance(precision, int | float) or not precision > 0:
            raise om.ArgumentError(f"{_WHERE}: precision must be a number above 0; got {precision!r}. Pass 1e-6, or more to let more pass.")
        self.precision, self.check_gradients, self.dump_on_failure = precision, check_gradients, dump_on_failure
        self.mode, self.limit_bytes = mode, limit_bytes
        self.operators = observe == OPERATORS
        self.every_module = observe in (ALL, OPERATORS) or (observe is None and mode == FULL)
        self._folder = None if folder is None else Path(folder)
        self.last: Trace | None = None

    @contextmanager
    def trace(self, model: nn.Module) -> Iterator[Trace]:
        """Watch a model's modules while the `with` lasts; the trace is complete after it.

        Forward and backward both belong inside; end it before `optimizer.zero_grad()`. Nothing of the model is touched, no bit of the
        run changes and the same operators run. A trace that an exception ends holds what was seen until then.

        Args:
            model: the model, bare or in DDP, FSDP or torch.compile.

        Raises:
            ArgumentError: for something that is no module.
            UnsupportedError: where another trace is open.
        """
        _check_model("trace", "model", model)
        trace = Trace(self.mode, names.class_name(model))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        trace.versions["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        observer = Observer(trace, model, self.check_gradients, self.every_module, self.limit_bytes, self.operators)
        observer.start()
        trace.open = True
        try:
            yield trace
        except BaseException as error:
            observer.note(f"{ENDED} {type(error).__name__}")
            raise
        finally:
            observer.stop()
            observer.finish()
            trace.open = False
            self.last = trace

    def compare(
        self, other: Trace | str | Path, trace: Trace | str | Path | None = None, noise: Trace | str | Path | None = None
    ) -> Report:
        """Hold another trace, B, against the last one of this checker, A.

        Args:
            other: B, or the folder it was saved in.
            trace: A, where it is not the last one.
            noise: a trace of A with its weights moved by one unit in the last place (`nudged`): what moves as much there is rounding.

        Raises:
            ArgumentError: where there is no trace.
            UnsupportedError: for traces that have nothing in common.
        """
        own = self.last if trace is None else _trace(trace)
        if own is None:
            raise om.ArgumentError(f"{_WHERE}.compare: there must be a trace of A; got none. Trace a run, or pass trace=.")
        theirs = _trace(other)
        floors = {} if noise is None else floors_of(own, _trace(noise), self.precision)
        return self._report(own, theirs, floors, "traces")

    def lockstep(self, model_a: nn.Module, model_b: nn.Module, batch: Any, only: str = "") -> Report:
        """Feed each module of B the inputs and output gradients of A's, so that errors do not add up and a culprit stands alone.

        A's module runs in float64 too: where both are as far from that, the difference is rounding, whatever its size. Where most weights
        have another dtype in B, the model in the wider one runs cast as the other, and what is left is not the dtype's doing; a few weights
        in another dtype are a fault. All inputs are kept as copies; neither model, nor its gradients, nor PyTorch's generators are changed.

        Args:
            model_a, model_b: models with the same module names, on one device.
            batch: keywords or positional arguments of the model, whose result is, or has as `.loss`, a scalar; or a function that takes
                the model and returns one.
            only: the path of a module, to look at it and at what is inside alone.

        Raises:
            ArgumentError: where the step gives no scalar.
        """
        for name, model in (("model_a", model_a), ("model_b", model_b)):
            _check_model("lockstep", name, model)
        found = stepping.lockstep(model_a, model_b, _step(batch), only)
        return self._report(found.a, found.b, found.floors, LOCKSTEP, found.refusals, found.dtypes)

    @contextmanager
    def nudged(self, model: nn.Module, seed: int = 0) -> Iterator[nn.Module]:
        """Move every weight by one unit in the last place, at random up or down, while the `with` lasts: for a noise floor."""
        kept = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p, value in kept:
                up = torch.randint(0, 2, p.shape, generator=generator).to(p.device).bool()
                p.copy_(_neighbour(value, up))
        try:
            yield model
        finally:
            with torch.no_grad():
                for p, value in kept:
                    p.copy_(value)

    def _report(self, a: Trace, b: Trace, floors: dict[Key, float], how: str, *about: Any) -> Report:
        report = Report(Comparison(a, b, self.precision, floors), how, *about)
        if report.first is None:
            return report
        key = report.first.key
        if self.dump_on_failure:
            name = f"{key.module or 'model'}-{key.call}-{key.direction.replace(' ', '-')}"
            try:
                found = replay.dump(lambda: self.folder, name, _to_run(key, a), a, b, self.precision)
            except OSError as error:
                found = f"{error.filename or 'a file'} cannot be written ({error.strerror or error})"
            if isinstance(found, str):
                report.reproduce = f"no file was written: {found}"
            else:
                report.dumped, report.reproduce = found, f"ops-math replay {found}"
        return report

    @property
    def folder(self) -> Path:
        """Where files for `ops-math replay` go; made when it is asked for."""
        if self._folder is None:
            self._folder = _users_folder()
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder


def _users_folder() -> Path:
    """One folder of this user below the system's for temporary files; a new one where the name is taken by what others can write to."""
    user = os.getuid() if hasattr(os, "getuid") else "files"
    place = Path(tempfile.gettempdir()) / f"ops-math-{user}"
    if not os.path.lexists(place):
        place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    others = stat.S_IMODE(found.st_mode) & 0o077 and os.name == "posix"
    if not stat.S_ISDIR(found.st_mode) or others or user not in (found.st_uid, "files"):
        return Path(tempfile.mkdtemp(prefix="ops-math-"))
    return place


def _to_run(key: Key, trace: Trace) -> Key:
    """What shows a fault when it runs alone: the module, or the call around it where the code between modules is to blame."""
    if key.direction != OUTPUT_GRADIENT:
        return key
    around = next((c.parent for c in trace.calls if (c.module, c.number) == (key.module, key.call)), -1)
    return key if around < 0 else Key(trace.calls[around].module, trace.calls[around].number, INPUT_GRADIENT)


def _neighbour(value: Tensor, up: Tensor) -> Tensor:
    """The next number of the dtype above or below: by its bits, which count numbers of one sign in order."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    step = torch.where(up, 1, -1).to(whole)
    moved = (value.view(whole) + step).view(value.dtype)
    return torch.where(torch.isfinite(moved) & (value != 0), moved, value)


def _trace(given: Any) -> Trace:
    if not isinstance(given, Trace | str | Path):
        do = "Pass its .last." if isinstance(given, ConsistencyChecker) else "Pass what `with checker.trace(model) as trace` gave."
        raise om.ArgumentError(f"{_WHERE}.compare: a trace must be a Trace or the folder of one; got {type(given).__name__}. {do}")
    return given if isinstance(given, Trace) else Trace.load(given)


def _check_model(method: str, argument: str, model: Any) -> None:
    """A module whose numbers exist."""
    needs = f"{_WHERE}.{method}: {argument} must be"
    if not isinstance(model, nn.Module):
        raise om.ArgumentError(f"{needs} a torch.nn.Module; got {type(model).__name__}. Pass the model itself.")
    if next((p.device.type for p in model.parameters()), "") == "meta":
        raise om.ArgumentError(f"{needs} a model with numbers; got one on the meta device. Put it on a device: model.to_empty(device=...).")


def _one_of(argument: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        known = ", ".join(repr(c) for c in choices)
        raise om.ArgumentError(f"{_WHERE}: {argument} must be one of {known}; got {value!r}. Pick one of these.")


def _step(batch: Any) -> Callable[[nn.Module], Tensor]:
    """A function from a model to its scalar loss."""
    if not isinstance(batch, dict | tuple | list | Tensor) and not callable(batch):
        needs = "keywords, positional arguments or a function of the model"
        raise om.ArgumentError(f"{_WHERE}.lockstep: batch must be {needs}; got {type(batch).__name__}. Pass e.g. lambda m: m(x).mean().")

    def step(model: nn.Module) -> Tensor:
        if isinstance(batch, dict):
            found = model(**batch)
        elif isinstance(batch, tuple | list):
            found = model(*batch)
        elif isinstance(batch, Tensor):
            found = model(batch)
        else:
            found = batch(model)
        loss = found if isinstance(found, Tensor) else getattr(found, "loss", None)
        if not isinstance(loss, Tensor) or loss.dim():
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(found).__name__
            raise om.ArgumentError(
                f"{_WHERE}.lockstep: batch must lead to a scalar loss; got {got}. Pass a function of the model that returns one."
            )
        return loss

    return step
