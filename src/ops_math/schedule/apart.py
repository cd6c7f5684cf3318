"""Measures in a process of its own, so that a candidate which never ends, or ends the process, takes nothing else with it.

A GPU kernel that hangs or reads where it may not spoils the whole CUDA context: only another process survives that. The child is told a
call by a file, says what it is about to run, and answers with a measurement; when it falls silent or dies, what it ran last is named,
left out, and the call is measured again by a new child.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ops_math import features
from ops_math.schedule.measure import Limits
from ops_math.schedule.record import Measurement, Record, from_row, to_row
from ops_math.schedule.trial import NotMeasuredError
from ops_math.settings import Policy

START_SECONDS = 120.0  # importing PyTorch and making a CUDA context, on a machine that is busy
PATIENCE_SECONDS = 10.0  # beyond what a candidate may take, before a child that says nothing is taken to be stuck
MOST_LEFT_OUT = 4  # candidates a call that may take a child with them before the call is given up
STARTED = "started"


class Apart:
    """A child process that measures; used in a `with`.

    Args:
        modules: imported by the child first, e.g. those that register operators of your own.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._child: subprocess.Popen[str] | None = None
        self._answers = -1
        self._rest = b""
        self._folder = tempfile.TemporaryDirectory(prefix="ops-math-")

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        self._folder.cleanup()

    def measure(
        self,
        op: str,
        phase: str,
        args: Sequence[Any],
        device: torch.device,
        limits: Limits,
        policy: Policy,
        record: Record,
        progress: Callable[[str], None],
    ) -> Measurement:
        """As `measure`, of arguments that are in the host's memory and go to `device` there.

        Raises: NotMeasuredError, also where no child can be started or too many candidates took theirs with them.
        """
        left_out: dict[str, str] = {}
        request = {
            "op": op,
            "phase": phase,
            "args": list(args),
            "device": str(device),
            "limits": tuple(limits),
            "policy": tuple(policy),
            "ceilings": record.ceilings and tuple(record.ceilings),
            "known": [to_row(m) for m in record.exact.values() if (m.op, m.phase) == (op, phase)],
            "left_out": left_out,
            "threads": torch.get_num_threads(),
            "precision": features.products(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        while len(left_out) <= MOST_LEFT_OUT:
            running, why = self._ask(request, limits, progress)
            if isinstance(why, dict):
                return from_row(why)
            if running is None:
                raise NotMeasuredError(why)
            left_out[running] = why
        raise NotMeasuredError("; ".join(f"{name}: {why}" for name, why in left_out.items()))

    def _ask(self, request: dict[str, Any], limits: Limits, progress: Callable[[str], None]) -> tuple[str | None, Any]:
        """Ask once: (None, the row), (None, why it cannot be measured), or (the candidate that took the child with it, how)."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        assert self._child is not None
        assert self._child.stdin is not None
        path = Path(self._folder.name) / "call.pt"
        torch.save(request, path)
        self._child.stdin.write(f"{path}\n")
        self._child.stdin.flush()
        running, silence = "", 3 * limits.trial_seconds + PATIENCE_SECONDS
        while True:
            said = self._line(silence)
            if said is None:
                code = self._exit_code()
                how = f"did not answer for {silence:.0f} s" if code is None else f"ended its process (exit code {code})"
                self._end()
                if running == "oracle" or running == "" or running.endswith(" in turns"):
                    return None, f"the process that measured it {how} at: {running or 'the beginning'}"
                return running, how
            if "row" in said:
                return None, said["row"]
            if "hung" in said:
                self._end()
                return (running, said["hung"]) if running != "oracle" else (None, said["hung"])
            if "failed" in said:
                return None, said["failed"]
            running = said["progress"]
            progress(running)

    def _start(self) -> None:
        self._end()
        self._answers, theirs = os.pipe()
        command = [sys.executable, "-m", "ops_math.schedule.worker", str(theirs), *self._modules]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, pass_fds=(theirs,))
        os.close(theirs)
        said = self._line(START_SECONDS)
        if said != {"progress": STARTED}:
            code = self._exit_code()
            self._end()
            raise NotMeasuredError(f"no process to measure in could be started (exit code {code})")

    def _exit_code(self) -> int | None:
        """How the child ended, or None where it runs; its pipe closes a moment before it is gone."""
        assert self._child is not None
        try:
            return self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None

    def _line(self, seconds: float) -> dict[str, Any] | None:
        """The next thing the child says, or None where it says nothing for so long or is gone."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0.0))
            piece = os.read(self._answers, 1 << 16) if ready else b""
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            assert self._child.stdin is not None
            self._child.stdin.close()
            os.close(self._answers)
            self._child, self._rest = None, b""
