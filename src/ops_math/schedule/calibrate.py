"""`calibrate`: which problems a step meets, and what is fastest for each on this device."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ops_math import backends, checks, settings
from ops_math.schedule import live
from ops_math.schedule.agree import agree, this_device
from ops_math.schedule.apart import Apart
from ops_math.schedule.ceilings import measure_ceilings
from ops_math.schedule.choose import choose, predict_us
from ops_math.schedule.collect import Collector, Met
from ops_math.schedule.identity import identity_of
from ops_math.schedule.levels import chosen_for
from ops_math.schedule.measure import Limits, measure
from ops_math.schedule.record import EMPTY, Measurement, bucket, from_row, label, to_row
from ops_math.schedule.trial import CandidateFailedError, DeviceHungError, NotMeasuredError, in_words

Progress = Callable[[str, int, int], None]  # what is being done, how many problems are done, of how many
KEPT_BYTES = 8 << 30
LEAST_SECONDS, MOST_SECONDS = 0.3, 4.0  # for one problem
CLOSE = 1.1  # of the fastest
COMPILING_SECONDS = 20.0  # with fewer in all, compiling would leave none for measuring: 1 to 5 s a problem, 17 for a machine's first
SLOWEST_COMPILATION = 90.0  # [s]


class Calibration(NamedTuple):
    """What `calibrate` found. `measurements` are new; `known` problems had been measured before; `skipped` were not, with the reason.
    `model_close` counts the measurements in which the model alone, without any, would have been within 10 % of the fastest. `hint` says
    why no operator may have been met, where none was."""

    measurements: tuple[Measurement, ...]
    known: int
    skipped: tuple[tuple[str, str], ...]
    seconds: float
    model_close: int
    hint: str = ""

    def __str__(self) -> str:
        if not (self.measurements or self.known or self.skipped):
            return "the step met no operator of ops_math" + (f": {self.hint}" if self.hint else "")
        lines = [f"{len(self.measurements)} problems measured, {self.known} known before, in {self.seconds:.1f} s"]
        if self.measurements:
            lines.append(f"the model alone would have been within 10 % of the fastest in {self.model_close} of {len(self.measurements)}")
        for m in self.measurements:
            lines.append(f"{m.op} {m.phase} {m.problem}: {m.winner}, {m.times_us[m.winner]:.1f} us" + (" (a tie)" if m.ties else ""))
            lines += [f"  refused {name}: {why}" for name, why in m.refused.items()]
        return "\n".join([*lines, *(f"not measured: {what}: {why}" for what, why in self.skipped)])


def calibrate(
    step_fn: Callable[[], Any],
    *,
    seconds: float = 60.0,
    save: bool = True,
    anew: bool = False,
    progress: Progress | None = None,
    memory_gib: float | None = None,
    apart: bool | None = None,
    modules: Sequence[str] = (),
) -> Calibration:
    """Run one step, measure the problems that it meets, and use what is fastest from then on.

    Args:
        step_fn: runs a training step, forward and backward; whatever it changes (weights, optimizer) is changed as by any step.
        seconds: for measuring, in all [s]; problems that take longest come first, and known ones are not measured again. On a CPU,
            candidates that compile C++ are tried from 20 s on.
        save: keep what was found in the user's cache folder, where other processes find it.
        anew: measure known problems too; a recorded winner then stays unless another is clearly faster.
        progress: called with what is being done, how many problems are done, and of how many; the library itself prints nothing.
        memory_gib: most memory [GiB] that a candidate may take beyond its results on a GPU.
        apart: measure in a process of its own, which a candidate that hangs the device or ends its process takes with it, and nothing
            else; by default on a GPU, where no other remedy exists. The arguments and that process need memory beside the step's.
        modules: what such a process imports first, e.g. modules that register operators of your own.

    Returns: a `Calibration`; `str()` of it is a table. A candidate that fails, hangs, gives wrong numbers or takes too much memory is
    skipped and named there.

    A measurement is of the determinism level in force, and used at that level alone. From level 1 on it may exchange only what gives the
    same bits, so a calibration changes none; from level 2 on candidates run as that level runs them, and one measurement stands for all
    numbers of rows, that of the call that moves most.

    Interrupted while it measures (Ctrl-C), one process keeps what it has measured until then.

    With several ranks all call it; each problem is measured by the first rank that met it, rank 0 merges, and all take its record.

    Raises: ArgumentError for a step that cannot be called without arguments, for seconds that are not positive, and for a progress or
        modules that could not be used; UnsupportedError while frozen, inside another `calibrate`, or where ranks' devices differ.
    """
    _check(step_fn, seconds, progress, memory_gib, modules)
    live.refuse_when_frozen("calibrate")
    start = time.perf_counter()
    collector = Collector(KEPT_BYTES)
    with collector:
        step_fn()
    met = _mine(_one_of_each(list(collector.met.values())))
    ensure_ceilings({one.device for one in met}, save)
    wanted = [one for one in met if anew or not _known(one)]
    tell = progress or (lambda words, done, total: None)
    found: list[tuple[Met, Measurement]] = []
    try:
        if apart or (apart is None and any(one.device.type == "cuda" for one in wanted)):
            _give_memory_back({one.device for one in wanted})
            with Apart(modules) as child:
                skipped = _measure_all(_by_weight(wanted), seconds, memory_gib, tell, child, found)
        else:
            skipped = _measure_all(_by_weight(wanted), seconds, memory_gib, tell, None, found)
    except BaseException:  # an interrupt from the keyboard, a progress that raises: what was measured until then is not lost
        if live.world_size() == 1:
            _take([(one.device, m) for one, m in found], save)
        raise
    close = sum(_model_is_close(one, m) for one, m in found)
    _take([(one.device, m) for one, m in found], save)
    took = time.perf_counter() - start
    return Calibration(tuple(m for _, m in found), len(met) - len(wanted), tuple(skipped), took, close, "" if met else _why_none())


def _check(step_fn: Any, seconds: Any, progress: Any, memory_gib: Any, modules: Any) -> None:
    """What can be known before the step has run is said before."""
    checks.runs_alone("calibrate", "step_fn", step_fn, "one training step", "lambda: model(batch).loss.backward()")
    for name, value in (("seconds", seconds), ("memory_gib", memory_gib)):
        if value is not None or name == "seconds":
            checks.number("calibrate", name, value)
            checks.positive("calibrate", name, value)
    if progress is not None:
        checks.takes("calibrate", "progress", progress, ("what", "done", "total"), "progress=print")
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        checks.fail("calibrate", "modules", "a list of names of modules", repr(modules), f"Pass e.g. [{str(modules)!r}].")
    for name in modules:
        if not _importable(name):
            checks.fail("calibrate", "modules", "of modules that can be imported", repr(name), "Name it as in an import statement.")


def _importable(name: Any) -> bool:
    try:
        return isinstance(name, str) and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # no parent; a name that is none, or a module without a specification
        return False


def _why_none() -> str:
    """What is most often the reason why a step meets no operator."""
    if not settings.active():
        return "ops_math is switched off; ops_math.enabled(True) switches it on"
    return "call its functions or adopt the model with ops_nn.adopt; where tensors are on the meta device, nothing runs"


def _policy() -> settings.Policy:
    return settings.policy()._replace(determinism=settings.determinism_level(), forced=())


def _stands_for(one: Met) -> Any:
    """The problem that its choice is made for: from level 2 on all numbers of rows share one."""
    policy = _policy()
    return chosen_for(live.LIVE.operators[one.op].implementations()[0].levels, one.problem, policy.determinism, policy.token_block)


def _one_of_each(met: Sequence[Met]) -> list[Met]:
    """Of those that one choice is made for, the one that moves most bytes, for it is measured for all."""
    found: dict[tuple[Any, ...], Met] = {}
    for one in sorted(met, key=lambda m: live.LIVE.operators[m.op].cost(m.problem, m.phase).bytes, reverse=True):
        found.setdefault((one.op, one.phase, _stands_for(one), one.device), one)
    kept = {id(one) for one in found.values()}
    return [one for one in met if id(one) in kept]


def _model_is_close(one: Met, found: Measurement) -> bool:
    """Whether what the roofline chooses, with neither shipped nor local measurements, was nearly the fastest."""
    operator, device = live.LIVE.operators[one.op], backends.device_of(one.device)
    bare = EMPTY._replace(ceilings=live.record_for(device).ceilings)
    problem = _stands_for(one)
    cost = operator.cost(problem, one.phase)
    choice = choose(operator.implementations(), problem, cost, found.dtype, one.phase, device, _policy(), bare)
    taken = found.times_us.get(label(choice.implementation.name, choice.config))
    return taken is not None and taken <= CLOSE * min(found.times_us.values())


def _known(one: Met) -> bool:
    operator = live.LIVE.operators[one.op]
    record = live.record_for(backends.device_of(one.device))
    problem = _stands_for(one)
    return record.measurement(one.op, one.phase, operator.file("problem").storage(problem), _policy(), problem)[1]


def _by_weight(met: Sequence[Met]) -> list[Met]:
    """One of each bucket first, then the rest; among them those that take longest, by the model."""

    def time_us(one: Met) -> float:
        operator = live.LIVE.operators[one.op]
        cost = operator.cost(one.problem, one.phase)
        eager = next((i for i in operator.implementations() if i.name == "eager"), operator.implementations()[-1])
        return predict_us(eager, one.problem, cost, backends.device_of(one.device), one.phase)

    heavy = sorted(met, key=time_us, reverse=True)
    seen: set[tuple[str, ...]] = set()
    first: list[Met] = []
    rest: list[Met] = []
    for one in heavy:
        key = (one.op, one.phase, bucket(one.problem))
        (rest if key in seen else first).append(one)
        seen.add(key)
    return first + rest


def _measure_all(
    wanted: Sequence[Met], seconds: float, memory_gib: float | None, progress: Progress, child: Apart | None,
    found: list[tuple[Met, Measurement]],
) -> list[tuple[str, str]]:  # fmt: skip
    """Measure in this order until the time is over, into `found`; the words that are returned say what was not."""
    skipped: list[tuple[str, str]] = []
    end = time.perf_counter() + seconds
    hung = ""
    do = f"give calibrate {COMPILING_SECONDS:g} s or more, with anew=True"
    hurried = "" if seconds >= COMPILING_SECONDS else f"not tried: it compiles for seconds, and there were {seconds:g} in all: {do}"
    for done, one in enumerate(wanted):
        name = f"{one.op} {one.phase} {one.problem}"
        left = end - time.perf_counter()
        why = hung or ("the time is over: give calibrate more seconds" if left <= 0 else "")
        if one.args is None:
            why = why or "its arguments are larger than what is kept for measuring"
        if why:
            skipped.append((name, why))
            continue
        share = min(max(left / (len(wanted) - done), LEAST_SECONDS), MOST_SECONDS)
        patience = SLOWEST_COMPILATION if one.device.type == "cpu" and not hurried else 20.0
        limits = Limits(share, max(10 * share, patience), memory_gib, hurried)
        try:
            tell = functools.partial(_tell, progress, f"{one.op} {one.phase}", done, len(wanted))
            found.append((one, _measure_one(one, limits, tell, child)))
        except DeviceHungError as error:
            hung = str(error)
            skipped.append((name, hung))
        except (NotMeasuredError, CandidateFailedError, RuntimeError, OSError, MemoryError) as error:  # no memory, no disk, a dead child
            skipped.append((name, in_words(error)))
    progress("done", len(wanted), len(wanted))
    return skipped


def _tell(progress: Progress, what: str, done: int, total: int, words: str) -> None:
    progress(f"{what}: {words}", done, total)


def _measure_one(one: Met, limits: Limits, tell: Callable[[str], None], child: Apart | None) -> Measurement:
    """Measure here, or in the child."""
    if child is None:
        return measure(live.LIVE.operators[one.op], one.phase, one.args_on_device(), limits=limits, policy=_policy(), progress=tell)
    assert one.args is not None
    record = live.record_for(backends.device_of(one.device))
    return child.measure(one.op, one.phase, one.args, one.device, limits, _policy(), record, tell)


def _give_memory_back(devices: set[torch.device]) -> None:
    """Free what this process's allocator holds and does not use: another process will want it."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()


def ensure_ceilings(devices: set[torch.device], save: bool) -> None:
    """Measure a device's ceilings where the record has none; without the memory for that, those of its kind stay, with a warning."""
    for device in sorted(devices, key=str):
        identity = identity_of(backends.device_of(device))
        if live.contents_of(identity).ceilings is None and device.type in ("cpu", "cuda"):
            try:
                live.add(identity, (), measure_ceilings(device), save=save)
            except torch.OutOfMemoryError as error:
                live.store.warn(f"schedule: the ceilings of {device} were not measured ({error}); those of its kind are used.")


def _mine(met: list[Met]) -> list[Met]:
    """With several ranks, the problems that no lower rank has met."""
    if live.world_size() == 1:
        return met
    keys: list[Any] = [None] * dist.get_world_size()
    own = [(one.op, one.phase, str(_stands_for(one))) for one in met]
    dist.all_gather_object(keys, own)
    lower = {tuple(key) for theirs in keys[: dist.get_rank()] for key in theirs}
    return [one for one, key in zip(met, own, strict=True) if key not in lower]


def _take(found: list[tuple[torch.device, Measurement]], save: bool) -> None:
    """Take measurements in; with several ranks rank 0 takes all of them, and all ranks then take its record."""
    if live.world_size() == 1:
        for device in {device for device, _ in found}:
            live.add(identity_of(backends.device_of(device)), [m for d, m in found if d == device], save=save)
        return
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [to_row(m) for _, m in found])
    if dist.get_rank() == 0:
        merged = [from_row(row) for theirs in rows for row in theirs]
        live.add(identity_of(this_device()), merged, save=save)
    agree()
