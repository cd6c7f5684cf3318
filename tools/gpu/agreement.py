"""Do calibrations agree with each other, and by how much do times differ from one to the next?

    PYTHONPATH=src:. python tools/gpu/agreement.py [--runs 5] [--seconds 30]

Calibrates one step of norms, activation and softmax again and again in one process, forgetting in between. For each operator: the winners,
whether every two runs agree or declare a tie, and for its finalists the smallest and largest time [us], the host's part, and the noise that
the runs stated: two runs can only agree where what they call a tie is as wide as what lies between them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch

import ops_math as om
from ops_math import schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def a_step() -> Callable[[], Any]:
    """Forward and backward; small enough that the host is as slow as the device."""
    x = torch.randn(8192, 2048, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(2048, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    return lambda: om.softmax(om.swiglu(om.rms_norm(x, w), om.layer_norm(x, w, w))).backward(torch.ones_like(x))


def agree(a: Any, b: Any) -> bool:
    """The same winner, or one of them is declared a tie with the other's."""
    return a.winner == b.winner or a.winner in b.ties or b.winner in a.ties


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    runs: list[dict[tuple[str, str], Any]] = []
    for _ in range(arguments.runs):
        schedule.reread()
        found = om.calibrate(a_step(), seconds=arguments.seconds, save=False, apart=False)
        runs.append({(m.op, m.phase): m for m in found.measurements})
    parted = 0
    for key in runs[0]:
        each = [run[key] for run in runs]
        pairs = [agree(a, b) for a, b in itertools.combinations(each, 2)]
        parted += pairs.count(False)
        print(f"{' '.join(key)}: {pairs.count(True)} of {len(pairs)} pairs of runs agree; {len({m.winner for m in each})} winners")
        finalists = dict.fromkeys(name for m in each for name in (m.winner, *m.ties))
        for name in dict.fromkeys([*finalists, *(n for n in ("vendor", "eager") if n in each[0].times_us)]):
            seen = [m for m in each if name in m.times_us]
            times, hosts, noise = ([getattr(m, of)[name] for m in seen] for of in ("times_us", "host_us", "noise"))
            won = sum(m.winner == name for m in each)
            print(
                f"    {min(times):8.1f} to {max(times):8.1f} us, host {min(hosts):6.1f} to {max(hosts):6.1f}, noise {max(noise):.3f}, "
                f"won {won}, tied {sum(name in m.ties for m in each)}  {name[:100]}"
            )
    print(f"{parted} disagreements")
    sys.exit(parted > 0)


if __name__ == "__main__":
    main()
