"""Runs an operator's Triton kernels in Triton's interpreter, in a process of its own: `python -m ops_math.testing.interpreted rms_norm`,
with `--every` on every small case instead of every second.

TRITON_INTERPRET must be set before Triton is imported, and it breaks compilation in the same process, hence the process.
Prints one JSON object: the cases run, those skipped with the reason, and every limit that was passed.
"""

from __future__ import annotations

import json
import os
import sys

EVERY = {"fp32": 1, "bf16": 3, "fp16": 9}  # cases: the kernels differ in their casts alone, and a GPU runs every case in every dtype
STRIDES = 6  # every sixth case with other strides and poisoned buffers too: a dozen runs each


def main(names: list[str]) -> int:
    """Check every second small case of the named operators (all by default) in its first dtype, mostly fp32; of these every third in bf16
    too, every ninth in fp16, and every sixth for strides and poisoned buffers."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # this package is imported already: start over with the variable set
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "ops_math.testing.interpreted", *names])
    import torch

    from ops_math import catalog, settings
    from ops_math.testing import conformance, interpreter

    torch.set_num_threads(1)
    interpreter.repair()
    assert settings.triton_interpret()
    dtypes = ("fp32", "bf16", "fp16")
    broken, ran, skipped = [], [], []
    step = 1 if "--every" in names else 2
    for name in [n for n in names if n != "--every"] or list(catalog.operators()):
        operator = catalog.operators()[name]
        for number, case in enumerate([case for case in operator.file("problem").CASES if case.small][::step]):
            for dtype in dtypes:
                label = f"{name}: {case.name}: {dtype}"
                first = dtype == next((d for d in dtypes if d in case.dtypes), "")
                if dtype not in case.dtypes or (number % EVERY[dtype] and not first):
                    continue
                why = conformance.able(operator, case, dtype, "triton_gpu", "cpu")
                if why:
                    skipped.append(f"{label}: {why}")
                    continue
                broken += conformance.check_budget(operator, case, dtype, "triton_gpu")
                if first and not number % STRIDES:
                    broken += conformance.check_poison(operator, case, dtype, "triton_gpu")
                    broken += conformance.check_layouts(operator, case, dtype, "triton_gpu")
                ran.append(label)
    sys.stdout.write(json.dumps({"ran": ran, "skipped": skipped, "broken": broken}) + "\n")
    return 1 if broken or not ran else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
