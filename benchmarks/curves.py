"""Do loss curves of training with our operators coincide with plain PyTorch's? From a clone, with torch alone.

    python benchmarks/curves.py --model llama-1b --variants packed+adamw --results benchmarks/results/h200.jsonl
    python benchmarks/curves.py --model bert-large --variants ops,packed+graphed --results benchmarks/results/h200.jsonl
    python benchmarks/curves.py --model bert-large --variants ops --no-dropout      # without the masks' noise
    python benchmarks/curves.py --model bert-large --variants ops --no-dropout --lr 5e-5 --runs 4 --again 3      # and how probable it is
    python benchmarks/curves.py --model llama-1b --planted 1.01      # and whether gradients that are 1 % wrong would be seen
    python benchmarks/curves.py --model llama-tiny --batch 2 --seq 64 --steps 60      # on a CPU; also bert-tiny

The setups are those of benchmarks/steps.py; the text is that of Python's own standard library. Runs come one after the other: plain
PyTorch, each variant, and plain PyTorch `--runs` more times, from weights that were moved by one ulp or, with dropout, with other masks.
Loss is averaged over windows of 20 steps; the distance of two curves is the greatest over windows. A variant coincides when it is no
farther from the nearest plain run than twice the greatest distance between two plain runs. With `--again` a variant is trained several
times too, and its runs are held to the plain ones together, by the share of all ways to divide these runs in two groups in which the
means of the two are as far apart; that decides then. Exits with 1 when a variant does not coincide.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from benchmarks import rows
from ops_math.checks import ArgumentError
from ops_math.cli.bench import curves, text
from ops_math.cli.bench.contenders import HOW, PLAIN
from ops_math.cli.bench.curves import SETUPS, Asked, Curve
from ops_math.spec import DTYPE_OF
from ops_nn.models import PRESETS


def asked_for() -> tuple[Asked, str | None]:
    """The command line: what to train, and where rows go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SETUPS), default="llama-1b")
    parser.add_argument("--variants", default="packed+adamw", help=f"separated by commas; each {HOW}")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], help="of the parameters, instead of the model's usual one")
    parser.add_argument("--batch", type=int, help="sequences a step, instead of the model's usual number")
    parser.add_argument("--seq", type=int, help="tokens a sequence, instead of the model's usual number")
    parser.add_argument("--steps", type=int, default=curves.STEPS)
    parser.add_argument("--runs", type=int, default=curves.RUNS, help="of plain PyTorch beyond the first, at least 2")
    parser.add_argument("--lr", type=float, help="peak learning rate, by default the preset's")
    parser.add_argument("--planted", type=float, metavar="FACTOR", help="one more plain run, input gradients of branches times FACTOR")
    parser.add_argument("--again", type=int, default=0, help="of each variant beyond the first, moved likewise")
    parser.add_argument("--no-dropout", action="store_true", help="plain runs then differ by weights moved by one ulp")
    parser.add_argument("--results")
    given = parser.parse_args()
    setup = SETUPS[given.model]
    changed = {"batch": given.batch, "seq": given.seq, "dtype": DTYPE_OF[given.dtype] if given.dtype else None}
    setup = setup._replace(**{name: value for name, value in changed.items() if value is not None})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variants, dropout = tuple(given.variants.split(",")), not given.no_dropout
    asked = Asked(given.model, setup, variants, device, given.steps, given.runs, given.lr, given.planted, dropout, given.again)
    try:
        curves.check(asked)
    except ArgumentError as error:
        parser.error(str(error))
    return asked, given.results


def facts(asked: Asked, tokens: text.Tokens) -> dict[str, Any]:
    """What every row says of the setup."""
    dtype = str(asked.setup.dtype).removeprefix("torch.")
    shape = {"model": asked.model, "batch": asked.setup.batch, "seq": asked.setup.seq, "dtype": dtype, "autocast": asked.setup.autocast}
    shape["dropout"] = asked.dropout
    return shape | {"steps": asked.steps, "lr": asked.lr, "text": text.SOURCE, "text_tokens": len(tokens.ids), "text_hash": tokens.digest}


def describe(curve: Curve) -> str:
    """A run in one line."""
    means = " ".join(f"{x:.4f}" for x in curve.means(curves.WINDOW))
    return f"{curve.name}: {curve.steps_per_s:.2f} steps/s, mean losses of {curves.WINDOW} steps {means}"


def judge(asked: Asked, found: list[Curve]) -> tuple[list[dict[str, Any]], bool]:
    """A row for each verdict, printed too, and whether all variants coincide."""
    planted = [curve for curve in found if curve.run.startswith(curves.PLANTED)]
    plain = [curve for curve in found if curve.variant == PLAIN and curve not in planted]
    judged, fine = [], True
    for curve in [curve for curve in found if curve not in plain]:
        verdict = curves.verdict(plain, curve)
        fine &= verdict.coincides or curve in planted or asked.again > 0
        print(f"{asked.model} {curve.name} {verdict}; last window {curve.means(curves.WINDOW)[-1]:.4f}", flush=True)
        row = {"benchmark": "curve verdict", "variant": curve.variant, "run": curve.run, **verdict._asdict()}
        row |= {
            "factor": curves.FACTOR,
            "plain_runs": len(plain),
            "noise": asked.noise,
            "window": curves.WINDOW,
            "coincides": verdict.coincides,
        }
        judged.append(row | {"final_loss": curve.means(curves.WINDOW)[-1], "plain_final": [p.means(curves.WINDOW)[-1] for p in plain]})
    for variant in asked.variants if asked.again else ():
        others = [curve for curve in found if curve.variant == variant]
        group = curves.together(plain, others)
        fine &= group.coincides
        print(f"{asked.model} {variant}: {len(others)} runs and {len(plain)} plain ones {group}", flush=True)
        row = {"benchmark": "curve group", "variant": variant, "runs": len(others), "plain_runs": len(plain), **group._asdict()}
        judged.append(row | {"alpha": curves.ALPHA, "noise": asked.noise, "window": curves.WINDOW, "coincides": group.coincides})
    return judged, fine


def main() -> None:
    """Train, print a line a run, and judge."""
    asked, results = asked_for()
    torch.set_float32_matmul_precision("high")
    print(torch.__version__, rows.environment(asked.device)["device"], flush=True)
    tokens = text.tokens_of(text.standard_library(), PRESETS[asked.model].config.vocab_size)
    print(f"{text.SOURCE}: {len(tokens.ids)} tokens, {tokens.end} of them different, {tokens.digest}", flush=True)
    known, found = facts(asked, tokens), []
    for curve in curves.measure(asked, tokens):
        found.append(curve)
        print(f"{asked.model} {describe(curve)}", flush=True)
        row = {"benchmark": "curve", "variant": curve.variant, "run": curve.run, "steps_per_s": curve.steps_per_s, "every": curves.POINT}
        row |= {"losses": [round(x, 6) for x in curve.means(curves.POINT)], "final_loss": curve.means(curves.WINDOW)[-1]}
        rows.append(results, [row | known], asked.device)  # at once, so that a run that is stopped leaves what it had
    judged, fine = judge(asked, found)
    rows.append(results, [row | known for row in judged], asked.device)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
