"""A whole run: text, training, validation, checkpoint, measurements, report."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from ops_math import checks, settings
from ops_math.cli.train import capacity, checkpoint, data, environment, memory, operators, report, result, session
from ops_math.cli.train.checkpoint import FILE_NAME, State
from ops_math.cli.train.config import COMMAND, LABELS, PLAIN, TrainConfig
from ops_math.cli.train.data import Data
from ops_math.cli.train.display import Display, figures
from ops_math.cli.train.memory import Measurement
from ops_math.cli.train.result import Result
from ops_math.cli.train.session import Session

STOPPED = Measurement(error="the run was stopped first")


class Stop:
    """Ctrl-C (or SIGTERM) as a wish to stop after the step; the second one stops at once."""

    def __init__(self, said: Callable[[str], None]) -> None:
        self.wanted = False
        self._said = said
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.wanted

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        self._said("Stopping after this step; once more stops at once and saves nothing.")


def prepare_folder(folder: Path, resumed: Path | None) -> None:
    """Make the report folder and see that nothing in it would be lost.

    Raises:
        UnsupportedError: when it cannot be written, or holds a checkpoint that is unfinished or not ours.
    """
    what = f"{COMMAND}: the report folder {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        checks.refuse(what, f"it cannot be written ({error.strerror})", "Choose another with --report")
    path = folder / FILE_NAME
    if not path.exists() or (resumed is not None and resumed.samefile(path)):
        return
    state = checkpoint.read_state(path, "it is in the way of this run's checkpoint and is left as it is")
    done, steps = state.step, state.config["steps"]
    if done < steps:
        checks.refuse(
            what,
            f"it holds a run that stopped after step {done} of {steps}",
            f"Go on with it by --resume {folder}, or choose another --report",
        )


def run(
    config: TrainConfig, data_path: Path | None, folder: Path, cache: Path, resumed: tuple[Path, State] | None, display: Display
) -> Result:
    """Train, measure and write the report.

    Args:
        config: what to train.
        data_path: the text, or None for the built-in one.
        folder: where report and checkpoint go; made when missing.
        cache: where tokenizers are kept.
        resumed: a checkpoint and its state, to go on from.
        display: where progress is shown.

    Raises:
        ArgumentError, UnsupportedError: for input that cannot be used, and when memory does not suffice.
    """
    prepare_folder(folder, None if resumed is None else resumed[0])
    capacity.check(config)
    free = capacity.available(config.torch_device)
    try:
        with settings.precision(config.precision), Stop(display.say) as stop:
            text = data.load(data_path, config, cache)
            display.say(f"{len(text.train):,} tokens to learn from, {len(text.held_out):,} held out: {text.source}")
            return _train(config, text, data_path, folder, resumed, display, stop)
    except (RuntimeError, MemoryError) as error:
        capacity.explain(error, config, free)
        raise


def _train(
    config: TrainConfig, text: Data, data_path: Path | None, folder: Path, resumed: tuple[Path, State] | None, display: Display, stop: Stop
) -> Result:
    operators.forget()
    training = Session(config, text, data_path)
    if resumed is not None:
        training.resume(*resumed)
    task = display.begin("training", config.steps, training.step)
    training.advance(lambda: display.advance(task, training.step, figures(training.runs, config)), stop)
    stopped = "" if training.step == config.steps else f"Stopped after step {training.step} of {config.steps}: --resume {folder} goes on."
    ran = operators.used()
    path = folder / FILE_NAME
    unwritten = _unwritten(lambda: training.save(path))
    if unwritten and stopped:
        stopped = f"Stopped after step {training.step} of {config.steps}."
    validation: dict[str, float] = {}
    noise: list[float] = []
    measured: dict[str, Measurement] = {}
    if not stopped:
        batches = text.validation()
        validation = {name: run.validation_loss(batches) for name, run in training.runs.items()}
        histories = _release(training)
        noise, measured = _untimed(training, display, stop)
    else:
        histories = _release(training)
    outcome = _summarise(training, histories, stopped, validation, noise, measured, ran)
    outcome = dataclasses.replace(outcome, checkpoint=None if unwritten else str(path), unwritten=unwritten)
    written = dataclasses.replace(outcome, report=str(folder / report.HTML_NAME))
    unwritten += _unwritten(lambda: report.write(folder, written))
    return dataclasses.replace(outcome, unwritten=unwritten) if len(unwritten) > len(outcome.unwritten) else written


def _unwritten(write: Callable[[], None]) -> tuple[str, ...]:
    """Write something; what was found is worth more than a full disk, so a refusal is kept, in words, for the end."""
    try:
        write()
    except checks.UnsupportedError as error:
        return (str(error),)
    return ()


def _release(training: Session) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and step times; the models are let go, so that what is measured next has the memory."""
    histories = {name: (run.losses, run.step_times) for name, run in training.runs.items()}
    training.runs.clear()
    if training.config.torch_device.type == "cuda":
        torch.cuda.empty_cache()
    return histories


def _untimed(training: Session, display: Display, stop: Stop) -> tuple[list[float], dict[str, Measurement]]:
    """Noise floor and memory, one after the other: side by side their threads take turns waiting, and both take three times as long."""
    return _noise_floor(training, display, stop), _measure(training, display, stop)


def _noise_floor(training: Session, display: Display, stop: Stop) -> list[float]:
    config = training.config
    if not config.compare or stop():
        return []
    task = display.begin("noise floor", min(config.steps, session.NOISE_FLOOR_STEPS))
    done = iter(range(1, config.steps + 1))
    return session.noise_floor(config, training.data, lambda: display.advance(task, next(done)), stop)


def _measure(training: Session, display: Display, stop: Stop) -> dict[str, Measurement]:
    names = [name for name in training.config.variants if name not in training.unavailable]
    task = display.begin("memory", len(names))
    batch = training.data.batch(0)
    found = {}
    for done, name in enumerate(names, start=1):
        if stop():
            found[name] = STOPPED
            continue
        found[name] = memory.measure_apart(name, training.config, batch)
        if found[name].error and stop():
            # Ctrl-C in a terminal reaches the child too.
            found[name] = STOPPED
        display.advance(task, done, LABELS[name])
    return found


def _summarise(
    training: Session,
    histories: dict[str, tuple[list[float], list[float]]],
    stopped: str,
    validation: dict[str, float],
    noise: list[float],
    measured: dict[str, Measurement],
    ran: list[dict[str, Any]],
) -> Result:
    config, window = training.config, len(noise)
    plain = histories[PLAIN][0] if PLAIN in histories else None
    variants = []
    for name in config.variants:
        if name in training.unavailable:
            variants.append(result.VariantResult(name, LABELS[name], unavailable=training.unavailable[name]))
            continue
        numbers = (*histories[name], training.starts, config, plain, window, validation.get(name), measured.get(name))
        variants.append(result.summarise(name, *numbers))
    by_name = {v.name: v for v in variants if not v.unavailable}
    ratios = {}
    if PLAIN in by_name:
        found = {name: result.ratio(v.timed, by_name[PLAIN].timed) for name, v in by_name.items() if name != PLAIN}
        ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
    floor = None if not noise or plain is None else result.largest_difference(noise, plain)
    text = training.data
    facts = {"source": text.source, "train_tokens": len(text.train), "held_out_tokens": len(text.held_out), "digest": text.digest}
    return Result(
        config=config,
        steps_done=training.step,
        stopped=stopped,
        variants=variants,
        noise_losses=noise,
        noise_floor=floor,
        ratios=ratios,
        verdict=result.verdict(variants, ratios, floor, config),
        data=facts,
        environment=environment.describe(config),
        operators=ran,
        adopted=training.adopted,
    )
