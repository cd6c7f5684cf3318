"""Numbers, verdict, table and report of `ops-math train`, from made-up runs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ops_math import UnsupportedError
from ops_math.cli.train import charts, report, result, table
from ops_math.cli.train.config import COMPILED, LABELS, OPS_MATH, PLAIN
from ops_math.cli.train.memory import Measurement
from ops_math.cli.train.result import Ratio, Result, VariantResult
from tests.cli import train_fixtures as fixtures

MIB = 2**20
STEPS = 20
BASE = [6.0 - 0.1 * step for step in range(STEPS)]
OPERATOR = {
    "op": "rms_norm",
    "phase": "forward",
    "implementation": "eager",
    "calls": 1200,
    "bytes": 5 * MIB,
    "reason": "predicted <1 us> less",
    "rejected": [["triton_gpu", "needs a GPU"]],
    "fallback": "",
    "problem": "",
}


@pytest.fixture(autouse=True)
def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    fixtures.add_presets(monkeypatch)


def variant(name: str, step_time: float = 0.4, gap: float = 0.0, peak: int = 400 * MIB, **changes: Any) -> VariantResult:
    draw = random.Random(name)
    times = [step_time * draw.uniform(0.98, 1.02) for _ in range(STEPS)]
    losses = [loss + gap * (step > 0) for step, loss in enumerate(BASE)]
    measurement = changes.pop("measurement", Measurement(peak, "by counting", 900, 100 * MIB))
    used = fixtures.config(compare=True)
    made = result.summarise(name, losses, times, [0], used, BASE, 10, losses[-1] + 0.5, measurement)
    return dataclasses.replace(made, **changes)


def outcome(*variants: VariantResult, floor: float | None = 1e-6, compare: bool = True, stopped: str = "") -> Result:
    used = fixtures.config(compare=compare)
    by_name = {v.name: v for v in variants if not v.unavailable}
    ratios = {}
    if PLAIN in by_name:
        found = {name: result.ratio(v.timed, by_name[PLAIN].timed) for name, v in by_name.items() if name != PLAIN}
        ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
    return Result(
        config=used,
        steps_done=STEPS,
        stopped=stopped,
        variants=list(variants),
        noise_losses=[] if floor is None else [loss + floor for loss in BASE[:10]],
        noise_floor=floor,
        ratios=ratios,
        verdict=result.verdict(list(variants), ratios, floor, used),
        data={"source": "a <text>", "train_tokens": 1000, "held_out_tokens": 50, "digest": "0"},
        environment={"device": "a chip", "torch": "2.13"},
        operators=[OPERATOR],
        adopted=["model.layers.0: two lines"],
    )


def compared(**ours: Any) -> Result:
    return outcome(
        variant(PLAIN), variant(COMPILED, 0.36, 1e-6), variant(OPS_MATH, **{"step_time": 0.3, "gap": 2e-6, "peak": 300 * MIB, **ours})
    )


def test_the_first_three_steps_after_each_start_are_not_timed() -> None:
    assert result.timed_steps(10, [0]) == [3, 4, 5, 6, 7, 8, 9]
    assert result.timed_steps(10, [0, 5]) == [3, 4, 8, 9]
    assert result.timed_steps(2, [0]) == [1]
    assert result.timed_steps(0, [0]) == []


@pytest.mark.parametrize("count", [6, 20, 57, 200])
def test_the_interval_holds_the_median_with_95_percent_and_is_the_narrowest_that_does(count: int) -> None:
    def outside(rank: int) -> float:
        return 2 * sum(math.comb(count, k) for k in range(rank)) / 2**count

    rank = result.interval_rank(count)
    assert outside(rank) <= 0.05 < outside(rank + 1)


def test_five_steps_have_no_interval() -> None:
    assert result.interval_rank(5) == 0
    assert result.ratio([1.0] * 5, [2.0] * 5) == Ratio(0.5, None, None)
    assert result.ratio([], []) is None


def test_ratios_are_taken_step_by_step_so_that_a_slow_spell_cancels() -> None:
    spell = [1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 1.0, 1.0]
    found = result.ratio([0.8 * t for t in spell], spell)
    assert found == Ratio(pytest.approx(0.8), pytest.approx(0.8), pytest.approx(0.8))


@pytest.mark.parametrize(
    ("step_time", "phrase"),
    [
        (0.3, r"^ops-math is 1\.3\d times as fast as plain PyTorch \(0\.7\d\d of its step time, 95 % interval 0\.7\d\d to 0\.7\d\d\)"),
        (0.4, r"^ops-math is as fast as plain PyTorch within noise \("),
        (0.5, r"^ops-math is slower than plain PyTorch \(1\.2\d\d of its step time"),
    ],
)
def test_the_verdict_on_time_is_honest_in_both_directions(step_time: float, phrase: str) -> None:
    assert re.search(phrase, compared(step_time=step_time).verdict)


@pytest.mark.parametrize(
    ("peak", "phrase"),
    [(300, "needs 25 % less memory at its peak"), (500, "needs 25 % more memory at its peak"), (401, "needs the same memory at its peak")],
)
def test_the_verdict_on_memory_is_honest_in_both_directions(peak: int, phrase: str) -> None:
    assert phrase in compared(peak=peak * MIB).verdict


@pytest.mark.parametrize(
    ("gap", "phrase"),
    [
        (0.0, "and its loss is the same to the last bit"),
        (2e-6, "and its loss differs by no more than rounding makes it differ (2.0e-06, noise floor 1.0e-06)"),
        (6e-6, "and its loss differs by about as much as rounding makes it differ (6.0e-06, noise floor 1.0e-06)"),
        (1e-3, "but its loss differs by 1.0e-03, 1000 times the noise floor of 1.0e-06: find out why before you trust it"),
    ],
)
def test_the_verdict_on_the_loss_is_held_to_the_noise_floor(gap: float, phrase: str) -> None:
    assert phrase in compared(gap=gap).verdict


def test_a_model_with_dropout_is_held_to_other_masks() -> None:
    ours = variant(OPS_MATH, gap=1e-3)
    said = result.verdict([variant(PLAIN), ours], {}, 1e-3, fixtures.config(model="small-bert", compare=True))
    assert "and its loss differs by no more than other dropout masks make it differ (1.0e-03, noise floor 1.0e-03)" in said


def test_the_verdict_says_where_torch_compile_stands() -> None:
    assert "; torch.compile is slower (" in compared().verdict
    assert "torch.compile is faster (" in compared(step_time=0.5).verdict


def test_a_loss_that_is_no_number_is_the_verdict() -> None:
    ours = variant(OPS_MATH)
    ours = dataclasses.replace(ours, losses=[*ours.losses[:-1], math.nan])
    assert outcome(variant(PLAIN), ours).verdict == "The loss stopped being a number in ops-math: lower --lr or choose another --dtype."
    assert result.largest_difference([1.0, math.nan], [1.0, 2.0]) == math.inf
    assert result.largest_difference([math.nan], [math.nan]) == 0.0


def test_the_verdict_of_a_run_alone_says_what_was_learnt() -> None:
    assert re.fullmatch(
        r"ops-math took small from a loss of 6\.000 to 4\.100 in 20 steps \(0\.4\d* s a step, \d+ tokens/s\)\.",
        outcome(variant(OPS_MATH), compare=False, floor=None).verdict,
    )


def test_an_impossible_run_is_a_row_of_dashes_and_a_note() -> None:
    missing = VariantResult(COMPILED, LABELS[COMPILED], unavailable="it failed to compile (no C++ compiler)")
    found = outcome(variant(PLAIN), missing, variant(OPS_MATH, 0.3))
    assert all(row.cells[1] in (table.MISSING, "") for row in table.rows(found))
    assert "torch.compile did not run: it failed to compile (no C++ compiler)." in table.notes(found)
    assert "torch.compile" not in found.verdict


def test_the_table_has_every_figure_that_was_promised() -> None:
    shown = {row.label.strip(): row.cells for row in table.rows(compared())}
    assert shown["peak memory"] == ["400 MiB", "400 MiB", "300 MiB"]
    assert shown["saved for backward"] == ["100 MiB"] * 3
    assert shown["operator calls a step"] == ["900"] * 3
    assert shown["first loss"] == ["6.0000"] * 3
    assert shown["last loss"] == ["4.1000"] * 3
    assert shown["validation loss"] == ["4.6000"] * 3
    assert shown["loss difference, 10 steps"] == ["", "1.0e-06", "2.0e-06"]
    assert shown["loss difference, 20 steps"] == ["", "1.0e-06", "2.0e-06"]
    assert shown["noise floor, 10 steps"] == ["1.0e-06", "", ""]
    assert shown["step time / plain"][0] == "1"
    assert {"step time, median", "middle half", "95 % interval", "tokens/s"} <= shown.keys()


def test_a_measurement_that_failed_is_a_dash_and_a_note() -> None:
    found = compared(measurement=Measurement(error="no answer within 900 s"))
    shown = {row.label: row.cells for row in table.rows(found)}
    assert shown["peak memory"][2] == table.MISSING
    assert "ops-math: memory was not measured, no answer within 900 s." in table.notes(found)
    assert "its peak memory was not measured" in found.verdict


@pytest.mark.parametrize(("seconds", "text"), [(None, "–"), (0.0123, "12.30 ms"), (0.4231, "423 ms"), (2.5, "2,500 ms"), (12.34, "12.3 s")])
def test_times_have_as_many_digits_as_they_are_worth(seconds: float | None, text: str) -> None:
    assert table.milliseconds(seconds) == text


class Page(HTMLParser):
    """Tags and visible text; what the page would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded.extend(
            f"{tag} {name}" for name, value in attrs if name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
        )

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_is_one_file_that_loads_nothing_and_says_everything() -> None:
    found = compared()
    text = report.to_html(found)
    page = Page(text)
    assert page.loaded == []
    assert "script" not in page.tags
    assert "@import" not in text
    assert page.tags.count("svg") == page.tags.count("figure") == 4
    words = " ".join(page.words.split())
    for expected in (
        "1.3",
        "400 MiB",
        "rms_norm",
        "predicted <1 us> less",
        "triton_gpu",
        "needs a GPU",
        "a chip",
        "a <text>",
        "model.layers.0: two lines",
    ):
        assert expected in words
    assert page.words.count("of its peak memory") == 1


def test_the_page_follows_light_and_dark() -> None:
    text = report.to_html(compared())
    assert "color-scheme: light dark" in text
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    painted = {colour.lower() for drawing in drawings for colour in re.findall(r"#[0-9a-fA-F]{6}\b", drawing)}
    assert painted == set(), "a colour that does not follow the page"
    light, dark = (set(re.findall(r"(--[a-z-]+):", block)) for block in re.findall(r":root \{(.*?)\}", text, flags=re.DOTALL))
    assert light == dark
    assert {name for drawing in drawings for name in re.findall(r"var\((--[a-z-]+)\)", drawing)} <= light


def test_each_chart_is_well_formed_and_described() -> None:
    for chart in charts.charts(compared()):
        element = ElementTree.fromstring(chart["svg"].replace("xlink:href", "href"))
        assert element.get("role") == "img"
        assert element.get("aria-label", "").startswith(chart["title"])
    ids = [name for chart in charts.charts(compared()) for name in set(re.findall(r'id="([^"]+)"', chart["svg"]))]
    assert len(ids) == len(set(ids)), "two charts share an id, and one would be drawn with the other's shapes"


def test_a_run_that_made_no_step_still_has_a_page() -> None:
    empty = result.summarise(OPS_MATH, [], [], [0], fixtures.config(), None, 0, None, None)
    found = outcome(empty, compare=False, floor=None, stopped="Stopped after step 0 of 8.")
    assert "There is no verdict: ops-math made no step." in report.to_html(found)
    json.loads(json.dumps(report.to_json(found), allow_nan=False))


def test_the_json_is_strict_and_holds_the_curves() -> None:
    ours = variant(OPS_MATH)
    found = outcome(variant(PLAIN), dataclasses.replace(ours, losses=[*ours.losses[:-1], math.inf]))
    plain = json.loads(json.dumps(report.to_json(found), allow_nan=False))
    assert plain["format"] == 1
    assert plain["config"]["model"] == "small"
    assert plain["variants"][0]["losses"] == BASE
    assert plain["variants"][1]["losses"][-1] is None
    assert plain["operators"][0]["rejected"] == [["triton_gpu", "needs a GPU"]]


def test_the_report_replaces_an_old_one_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(tmp_path, compared())
    old = (tmp_path / report.HTML_NAME).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [report.HTML_NAME, report.JSON_NAME]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        UnsupportedError, match=r"^train: the report in .*: it cannot be written \(No space left on device\). Free space or"
    ):
        report.write(tmp_path, compared(step_time=0.5))
    assert (tmp_path / report.HTML_NAME).read_text() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == [report.HTML_NAME, report.JSON_NAME]
