"""The program of a child that measures: `python -m ops_math.schedule.worker FD [MODULE ...]`. See `apart`.

It reads paths of requests from its standard input and says in JSON lines, on the file descriptor that it is given, what it does and finds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch

from ops_math import features, settings
from ops_math.schedule.apart import STARTED
from ops_math.schedule.collect import laid_out_like
from ops_math.schedule.live import LIVE
from ops_math.schedule.measure import Limits, measure
from ops_math.schedule.record import EMPTY, Ceilings, from_row, of_measurements, to_row
from ops_math.schedule.trial import CandidateFailedError, DeviceHungError, NotMeasuredError
from ops_math.settings import Policy


def answer(request: dict[str, Any], say: Any) -> dict[str, Any]:
    """Measure one call under the circumstances of the parent."""
    torch.set_num_threads(request["threads"])
    features.set_products(request["precision"])
    torch.use_deterministic_algorithms(request["deterministic"])
    settings.STATE.policy = policy = Policy(*request["policy"])
    device = torch.device(request["device"])
    ceilings = request["ceilings"] and Ceilings(*request["ceilings"])
    record = of_measurements(EMPTY, [from_row(row) for row in request["known"]], ceilings)  # whose winner is the incumbent
    try:
        args = [laid_out_like(a, a, device) if isinstance(a, torch.Tensor) else a for a in request["args"]]
        found = measure(
            LIVE.operators[request["op"]], request["phase"], args, limits=Limits(*request["limits"]), policy=policy, record=record,
            progress=lambda words: say({"progress": words}), left_out=request["left_out"],
        )  # fmt: skip
    except DeviceHungError as error:
        return {"hung": str(error)}
    except (NotMeasuredError, CandidateFailedError, torch.OutOfMemoryError, KeyError) as error:
        return {"failed": f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)}
    return {"row": to_row(found)}


def main() -> None:
    """Serve until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as out:

        def say(what: dict[str, Any]) -> None:
            out.write(json.dumps(what) + "\n")

        for module in sys.argv[2:]:
            importlib.import_module(module)
        say({"progress": STARTED})
        for line in sys.stdin:
            say(answer(torch.load(line.strip(), weights_only=False), say))


if __name__ == "__main__":
    main()
