"""An operator with candidates of every kind of character, planted for the tests of measuring."""

from __future__ import annotations

import threading
import time
import types
from typing import Any, NamedTuple

import torch

from ops_math.schedule import register
from ops_math.spec import Cost, Implementation, dtype_name


class ToyProblem(NamedTuple):
    """y = 2 x."""

    rows: int
    cols: int
    x: str


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def slept(seconds: float, function: Any = double) -> Any:
    """A launcher that takes its time."""

    def launch(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return function(x)

    return launch


def nan_in_one_place(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    y = double(x)
    y.view(-1)[7] = torch.nan
    return y


def wrong_by_a_percent(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    return double(x) * 1.01


def too_narrow(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    return double(x)[:, :-1]


def raising(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a bad configuration")


def hungry(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.empty(1 << 50) if x.dtype == torch.float32 else double(x)


RELEASE = threading.Event()  # lets hanging candidates go when a test is over


def hanging(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    RELEASE.wait(60)
    return double(x)


class Toy:
    """As a catalogue entry; `candidates` maps a name to its launcher, in order of preference."""

    def __init__(self, candidates: dict[str, Any], name: str = "toy", **facts: Any) -> None:
        self.name = name
        self.forgotten = 0
        self._implementations = tuple(self._made(n, launch, facts.get(n, {})) for n, launch in candidates.items())
        problem_of = lambda x: ToyProblem(x.shape[0], x.shape[1], dtype_name(x.dtype))  # noqa: E731
        self.phases = {"fwd": types.SimpleNamespace(problem_of=problem_of, num_tensors=1)}

    def _made(self, name: str, launch: Any, facts: dict[str, Any]) -> Implementation:
        made = Implementation(self.name, name, "nowhere.at_all")
        made._module = types.SimpleNamespace(launch_fwd=launch, **facts)  # type: ignore[assignment]
        return made

    def implementations(self) -> tuple[Implementation, ...]:
        return self._implementations

    def cost(self, problem: ToyProblem, phase: str) -> Cost:
        n = 4 * problem.rows * problem.cols
        return Cost((("x", n),), (("y", n),), ())

    def file(self, stem: str) -> Any:
        return types.SimpleNamespace(storage=lambda p: p.x)

    def forget(self) -> None:
        self.forgotten += 1


def eager(problem: Any, config: Any, x: torch.Tensor) -> torch.Tensor:
    return double(x)


def registered(candidates: dict[str, Any], **facts: Any) -> Toy:
    """A toy that the scheduler knows."""
    toy = Toy(candidates, **facts)
    register(toy)
    return toy
