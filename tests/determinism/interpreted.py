"""Our kernels at level 2 in Triton's interpreter, cut as on a GPU: `TRITON_INTERPRET=1 python -m tests.determinism.interpreted`.

Prints a JSON object: for each call what ran, and which results differ. What a compiler does to bits only a GPU shows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import ops_math as om
from ops_math import catalog
from ops_math.testing import interpreter
from tests.determinism import ranks as cuts
from tests.determinism.calls import SAMPLES, Sample, differing, drawn, in_pieces, joined, outcome

BLOCK = 16


def tried(sample: Sample) -> dict[str, Any]:
    """What differs between a batch and its pieces."""
    om.reset_stats()
    given = drawn(sample, 5)
    whole, parts = outcome(sample, *given, 0), joined(in_pieces(sample, [2, 3], *given))
    given = drawn(sample, 2 * BLOCK + 5)
    sums = []
    if sample.token_rows == 1:
        pieces = joined(in_pieces(sample, [BLOCK, BLOCK, 5], *given))
        sums = differing(outcome(sample, *given, 0).shared, pieces.shared)
    ran = sorted({r.implementation for r in om.stats().rows})
    return {"ran": ran, "outputs": differing(whole.outputs, parts.outputs), "inputs": differing(whole.inputs, parts.inputs), "sums": sums}


def ranks() -> bool:
    """Whether two halves of a sum over inputs have the bits of one device."""
    x, w = torch.randn(5, 128), torch.randn(64, 128)
    with om.determinism(3):
        one = om.linear(x, w, parts=(4, 4), wide=True)
        halves = [
            om.linear(a.contiguous(), b.contiguous(), parts=(2, 4), wide=True) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
        ]
    return torch.equal(one, halves[0] + halves[1])


def degrees() -> dict[str, list[Any]]:
    """Of each call that is cut by columns or heads what differs between one rank and two or four, with what ran."""
    found = {}
    with om.determinism(3, token_block=BLOCK):
        for cut in (*cuts.BY_COLUMNS, *cuts.BY_HEADS):
            om.reset_stats()
            one, *more = [cuts.at(cut, degree) for degree in cuts.DEGREES]
            ran = sorted({r.implementation for r in om.stats().rows})
            found[cut.name] = [ran, *(differing(one[part], m[part]) for m in more for part in ("outputs", "gradients"))]
        one, *more = [cuts.stepped(degree) for degree in cuts.DEGREES]
        found["adamw"] = [["triton_gpu"], *(differing(one, m) for m in more for _ in range(2))]
    return found


if __name__ == "__main__":
    interpreter.repair()
    om.force(**{name: "triton_gpu" for name in catalog.operators() if name != "linear_cross_entropy"})
    with om.determinism(2, token_block=BLOCK):
        found = {sample.name: tried(sample) for sample in SAMPLES}
    sys.stdout.write(json.dumps({"calls": found, "ranks": ranks(), "degrees": degrees()}) + "\n")
