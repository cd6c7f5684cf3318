"""Runs a candidate so that its failure is a sentence and not the end of training: errors, too much memory, no end.

A candidate runs on a thread of its own. One that does not come back in time is left behind, named, and never asked again; the next one
gets a new thread. A GPU that no longer answers cannot be mended from inside its process: measuring then stops, in words.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from ops_math.schedule.ceilings import synchronize


class CandidateFailedError(Exception):
    """A candidate that cannot be used, with the reason in words."""


class NotMeasuredError(Exception):
    """A call that cannot be measured, with the reason in words."""


class DeviceHungError(Exception):
    """The device does not finish what it was given, so nothing more can be measured."""


class Trial:
    """A thread that runs candidates on one device, each for a limited time.

    Args:
        device: where they run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asked: queue.SimpleQueue[Any] | None = None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run(self, function: Callable[[], Any], limit_s: float) -> Any:
        """The function's result, after the device has finished.

        Raises:
            CandidateFailedError: it raised, ran out of memory, or took longer than `limit_s` [s].
            DeviceHungError: it took longer, and the device has not finished either.
        """
        if self._asked is None:
            self._start()
        assert self._asked is not None
        self._asked.put(function)
        try:
            result, error = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._asked.put(None)  # should it ever come back, its thread ends
            self._asked = None
            self._check_device(limit_s)
            raise CandidateFailedError(f"did not finish within {limit_s:.1f} s") from None
        if error is not None:
            raise CandidateFailedError(in_words(error)) from error
        return result

    def close(self) -> None:
        """End the thread."""
        if self._asked is not None:
            self._asked.put(None)
            self._asked = None

    def _start(self) -> None:
        self._asked, self._answers = queue.SimpleQueue(), queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(self._asked, self._answers), name="ops-math measuring", daemon=True).start()

    def _serve(self, asked: queue.SimpleQueue[Any], answers: queue.SimpleQueue[Any]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.no_grad():
            while (function := asked.get()) is not None:
                try:
                    result = function()
                    synchronize(self.device)
                except Exception as error:  # noqa: BLE001 (a candidate may raise anything; it is handed on, named, and shown)
                    answers.put((None, error))
                else:
                    answers.put((result, None))
                function = result = None

    def _check_device(self, limit_s: float) -> None:
        """Whether the device still finishes work; asked on another thread, since the question hangs where it does not."""
        if self.device.type != "cuda":
            return
        done = threading.Event()

        def ask() -> None:
            synchronize(self.device)
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        if not done.wait(limit_s):
            raise DeviceHungError(f"{self.device} has not finished a candidate's work after {2 * limit_s:.0f} s")


def in_words(error: BaseException) -> str:
    """The reason a candidate, or a measurement, failed, in one line."""
    if isinstance(error, CandidateFailedError | DeviceHungError | NotMeasuredError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"needs more memory than there is ({text[:120]})"
    return f"failed: {type(error).__name__}: {text[:200]}"
