"""The README's measured table says what `benchmarks/results` says, losses included."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
specification = importlib.util.spec_from_file_location("measured_table", ROOT / "scripts" / "measured_table.py")
measured_table = importlib.util.module_from_spec(specification)
specification.loader.exec_module(measured_table)


def results(name: str) -> list[str]:
    return (measured_table.RESULTS / name).read_text().splitlines()


def test_the_readme_shows_what_was_measured():
    text = (ROOT / "README.md").read_text()
    assert text == measured_table.refreshed(text, measured_table.table()), "refresh it with: python scripts/measured_table.py --update"


def test_a_newer_run_in_the_results_makes_the_readme_stale():
    rows = map(json.loads, reversed(results("h200.jsonl")))
    faster = next(r for r in rows if (r["benchmark"], r.get("model"), r.get("variant")) == ("step", "llama-1b", "packed+adamw"))
    rates = (("plain", 60000.0), ("packed+adamw", 50000.0), ("packed+lean+adamw", 40000.0))
    newer = [json.dumps(faster | {"variant": v, "commit": "abc1234", "tokens_per_s": rate}) for v, rate in rates]

    def read(name: str) -> list[str]:
        return results(name) + (newer if name == "h200.jsonl" else [])

    fresh = measured_table.table(read)
    assert fresh != measured_table.table()
    line = next(line for line in fresh.splitlines() if line.startswith("| llama-1b: tokens/s"))
    assert line.split("|")[2].strip().startswith("**60,000"), "the loss stays, and plain PyTorch is bold"
    assert "abc1234" in fresh


def test_figures_of_two_runs_are_never_put_side_by_side():
    rows = [
        {"benchmark": "step", "model": "m", "variant": "plain", "commit": "old", "command": "c", "device": "d"},
        {"benchmark": "step", "model": "m", "variant": "ops", "commit": "new", "command": "c", "device": "d"},
    ]
    with pytest.raises(measured_table.MissingResultError, match="no run of m has plain, ops"):
        measured_table.together(rows, "m")
    rows.append({**rows[0], "variant": "ops"})
    assert measured_table.together(rows, "m") == [rows[0], rows[2]]


@pytest.mark.parametrize("name", ["h200_norms_2026-11-30c.txt", "h200_attention_2026-11-29.txt"])
def test_a_sweep_without_its_figures_is_an_error_and_no_empty_cell(name):
    with pytest.raises(measured_table.MissingResultError):
        measured_table.table(lambda asked: results(asked)[: 1 if asked == name else None])


def test_where_our_own_kernel_is_faster_it_is_bold_and_nothing_is_said_of_a_choice():
    lines = ["B1 S16384 H32/8 D128 causal    cudnn fwd   3.3 ms    600.0 TFLOP/s  2 kernels"]
    lines.append("B1 S16384 H32/8 D128 causal    BEST fwd   700.0 TFLOP/s (3.97, Tile())")
    assert measured_table.attention_row(lines).markdown().endswith("| 600 (cuDNN) | **700 (our own kernel)** |")
