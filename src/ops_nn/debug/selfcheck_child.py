"""One run of a user's step, in a process of its own: traces of its steps, and the facts that explain a difference.

    python -m ops_nn.debug.selfcheck_child SCRIPT FUNCTION FOLDER STEPS MODE

`MODE` is `as it is`, `seeded` (every source of random numbers seeded, also where the script asks for fresh entropy) or `probe` (PyTorch
warns of each operator that has no deterministic implementation).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ops_math as om
from ops_nn.debug.checker import ConsistencyChecker
from ops_nn.debug.trees import arguments

AS_IT_IS, SEEDED, PROBE = "as it is", "seeded", "probe"
FACTS = "facts.json"
SEED = 0


class _Entropy:
    """Notes every source of random numbers that is seeded from the operating system, and where; in `seeded` mode it seeds them."""

    def __init__(self, script: Path, mode: str) -> None:
        self.script, self.seeded = str(script), mode == SEEDED
        self.found: list[str] = []
        self._watch(torch, "seed", "torch.seed()", lambda: torch.manual_seed(SEED) and SEED)
        self._watch(random, "seed", "random.seed()", lambda: random.setstate(random.Random(SEED).getstate()))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            fresh = numpy.random
            self._watch(fresh, "seed", "numpy.random.seed()", lambda: fresh.set_state(fresh.RandomState(SEED).get_state()))
            self._watch(fresh, "default_rng", "numpy.random.default_rng()", lambda: fresh.Generator(fresh.PCG64(SEED)))
        if self.seeded:
            self.seed_all()
        self.states = self._states()

    def seed_all(self) -> None:
        """Seed what Python seeds from the operating system."""
        torch.manual_seed(SEED)
        random.setstate(random.Random(SEED).getstate())
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(sys.modules["numpy"].random.RandomState(SEED).get_state())

    def _states(self) -> dict[str, Any]:
        found: dict[str, Any] = {"random": random.getstate()}
        if "numpy" in sys.modules:
            found["numpy.random"] = str(sys.modules["numpy"].random.get_state())
        return found

    def _watch(self, owner: Any, name: str, shown: str, fixed: Callable[[], Any]) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not any(value is not None for value in (*args, *kwargs.values())):
                where = next((f for f in reversed(traceback.extract_stack()) if f.filename == self.script), None)
                self.note(shown + (f" at {Path(where.filename).name}:{where.lineno}" if where else ""))
                if self.seeded:
                    return fixed()
            elif name != "default_rng":
                self.states.pop(f"{owner.__name__}", None)  # seeded with a number: what is drawn from it repeats
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    def note(self, words: str) -> None:
        """Keep a source once."""
        if words not in self.found:
            self.found.append(words)

    def close(self) -> None:
        """Note the generators that were drawn from and never seeded."""
        now = self._states()
        for name, state in self.states.items():
            if now[name] != state:
                self.note(f"{name}, which was drawn from and not seeded")


def _step_of(script: Path, function: str) -> tuple[nn.Module, Callable[[], Any]]:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise om.ArgumentError(f"selfcheck: SCRIPT must be a Python file; got {script}. Name the file that has {function}().")
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    sys.path.insert(0, str(script.parent))
    spec.loader.exec_module(module)
    made = getattr(module, function, None)
    if not callable(made):
        do = "Write one, or name another after a colon."
        raise om.ArgumentError(f"selfcheck: {script.name} must have a function {function}(); got none. {do}")
    found = made()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module) and callable(found[1])):
        raise om.ArgumentError(
            f"selfcheck: {function}() must return a model and a function that runs one step; got {type(found).__name__}. "
            "Return (model, step), where step() runs forward and backward."
        )
    return found


def _rows_of(value: Tensor) -> list[str]:
    """A digest of each row along the first dimension."""
    rows = value.detach().cpu().contiguous()
    rows = rows.reshape(rows.shape[0], -1) if rows.dim() else rows.reshape(1, 1)
    return [hashlib.blake2b(row.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest() for row in rows]


def main(script: Path, function: str, folder: Path, steps: int, mode: str) -> None:
    """Run and write traces and facts into `folder`."""
    entropy = _Entropy(script, mode)
    if mode == PROBE:
        torch.use_deterministic_algorithms(True, warn_only=True)
    batches: list[list[str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, step = _step_of(script, function)
        if mode == SEEDED:
            entropy.seed_all()

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batches.append([row for leaf in arguments(args, kwargs) if isinstance(leaf.carrier, Tensor) for row in _rows_of(leaf.carrier)])

        handle = model.register_forward_pre_hook(keep, with_kwargs=True)
        checker = ConsistencyChecker(observe="all", dump_on_failure=False)
        om.reset_stats()
        for number in range(steps):
            with checker.trace(model) as trace:
                step()
            trace.save(folder / f"step-{number}")
        handle.remove()
    entropy.close()
    words = [str(w.message) for w in caught if "does not have a deterministic implementation" in str(w.message)]
    facts = {
        "entropy": entropy.found,
        "batches": batches,
        "ran": sorted({f"{r.op} {r.phase}: {r.implementation}" for r in om.stats().rows}),
        "tuners": [name for name, on in (("torch.backends.cudnn.benchmark", torch.backends.cudnn.benchmark),) if on],
        "alerts": sorted({w.split(" does not have")[0].strip() for w in words}),
        "hash_randomization": bool(sys.flags.hash_randomization),
    }
    (folder / FACTS).write_text(json.dumps(facts))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    except om.ArgumentError as error:
        sys.exit(f"ops-math-refused: {error}")
