"""What of a traced model ran in compiled code, where nobody sees it: which modules, and the words for it."""

from __future__ import annotations

from collections.abc import Collection

from ops_nn.debug.standing import Standing
from ops_nn.debug.trace import Trace

LOOK = "not; trace under torch.compiler.set_stance('force_eager') to look inside"
NO_CALL = "no call of a module was seen, as where a function that calls the model is compiled: parameters and gradients alone are"


def notes(trace: Trace, standing: Standing, graded: bool) -> list[str]:
    """Mark in the trace the modules whose inside was not seen, and say so, and how it can be; `graded` says that weights got gradients."""
    called = {call.module for call in trace.calls}
    found = unseen(standing, called)
    for path in found:
        trace.modules[path]["compiled"] = True
    return [words(found)] * bool(found) + [NO_CALL] * (graded and not called)


def unseen(standing: Standing, called: Collection[str]) -> dict[str, list[str]]:
    """The compiled modules whose inner ones were not called as such, with the names of those."""
    inside = {path: [n for n in standing.places if n != path and (not path or n.startswith(f"{path}."))] for path in standing.compiled}
    return {path: below for path, below in inside.items() if not set(called) & set(below)}


def words(found: dict[str, list[str]]) -> str:
    """What is to be known of them."""
    first = next(iter(found), "") or "the model"
    if len(found) == 1:
        return f"{first} is compiled: seen at its boundary, its {len(*found.values())} inner modules are {LOOK}"
    count = len(set().union(*found.values()))
    many = f"{len(found)} modules are compiled, the first {first}"
    return f"{many}: seen at their boundaries, {count} modules inside are {LOOK}"
