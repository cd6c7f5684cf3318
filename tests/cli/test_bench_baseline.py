"""A baseline catches a slowdown of 30 %, does not cry wolf, and is never read as what it is not."""

import json
import math
import random
import re

import pytest

from ops_math import checks
from ops_math.cli.bench import baseline
from ops_math.cli.bench.spread import BLIND, compare, spread


def sessions(source, slow=1.0, count=5, visits=20, sigma=0.1, between=0.02):
    centres = [math.exp(source.gauss(0, between)) * slow for _ in range(count)]
    return [[c * math.exp(source.gauss(0, sigma)) * (3 if source.random() < 0.03 else 1) for _ in range(visits)] for c in centres]


def test_a_slowdown_of_30_percent_is_caught_through_10_percent_of_noise():
    source = random.Random(1)
    found = [compare(sessions(source), sessions(source, 1.3)) for _ in range(200)]
    assert sum(one.regressed for one in found) >= 199


def test_the_same_code_is_not_flagged_in_a_thousand_repeats():
    source = random.Random(2)
    assert [one for one in (compare(sessions(source), sessions(source)) for _ in range(1000)) if one.regressed] == []


def test_sessions_that_move_more_than_their_visits_say_widen_what_is_allowed():
    source = random.Random(3)
    flagged = [compare(sessions(source, sigma=0.005, between=0.06), sessions(source, sigma=0.005, between=0.06)) for _ in range(500)]
    assert sum(one.regressed for one in flagged) <= 2
    quiet = compare(sessions(source, sigma=0.005, between=0.0), sessions(source, sigma=0.005, between=0.0))
    assert quiet.allowed < 0.06 < min(one.allowed for one in flagged[:20])


def test_a_row_too_noisy_to_hold_says_so_and_is_not_called_well():
    source = random.Random(4)
    found = compare(sessions(source, sigma=0.8, between=0.3), sessions(source, sigma=0.8, between=0.3))
    assert found.allowed > BLIND
    assert found.blind
    assert not found.regressed


def test_a_few_disturbed_visits_move_neither_the_median_nor_the_noise():
    calm = [1.0 + 0.01 * (n % 5) for n in range(20)]
    assert spread([*calm[:-1], 50.0]).middle == pytest.approx(spread(calm).middle, rel=0.01)
    assert spread([*calm[:-1], 50.0]).noise < 2 * spread(calm).noise + 0.01


def row(ratio, op="softmax", call="softmax 8x64 fp32", **facts):
    return {"op": op, "call": call, "metrics": {"time over that of torch": [[ratio] * 9] * 3}, "facts": {"commit": "c", **facts}}


def test_rows_of_other_operators_stay_in_the_file(tmp_path):
    path = tmp_path / "folder" / "b.json"
    baseline.write(path, {"a": row(1.0)})
    baseline.write(path, {"b": row(2.0)})
    assert {name: one["metrics"]["time over that of torch"][0][0] for name, one in baseline.read(path).items()} == {"a": 1.0, "b": 2.0}
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]


def test_a_row_that_is_no_longer_measured_fails_the_check_and_a_new_one_does_not():
    before = {"softmax fwd": row(1.0), "softmax bwd": row(1.0), "rope fwd": row(1.0, "rope", "rope 1x1")}
    verdict = baseline.hold(before, {"softmax fwd": row(1.0), "softmax both": row(1.0)})
    assert verdict.gone == ("softmax bwd",), "rope was not asked for"
    assert verdict.new == ("softmax both",)
    assert verdict.failed
    assert not baseline.hold({"softmax fwd": row(1.0)}, {"softmax fwd": row(1.0), "softmax both": row(1.0)}).failed


def test_a_check_that_holds_nothing_fails():
    assert baseline.hold({"softmax fwd": row(1.0)}, {"rope fwd": row(1.0, "rope", "rope 1x1")}).failed


def test_a_baseline_of_other_versions_is_held_and_the_difference_said():
    verdict = baseline.hold({"a": row(1.0, torch="2.11.0")}, {"a": row(1.5, torch="2.13.0")})
    assert verdict.notes == ("the baseline was measured with torch 2.11.0, this run with 2.13.0",)
    assert [one.name for one in verdict.regressed] == ["a: time over that of torch"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "bench: --check must be a baseline that was saved on this device; got none at "),
        ("{", "bench: --check must be a baseline that can be read; got "),
        ('{"format": 2, "rows": {}}', "bench: --check must be a baseline of format 1; got "),
        (json.dumps({"format": 1, "rows": {"a": row(-1.0)}}), "bench: --check must be a baseline of format 1; got "),
        (
            json.dumps({"format": 1, "rows": {"a": row(1.0) | {"metrics": {"t": []}}}}),
            "bench: --check must be a baseline of format 1; got ",
        ),
    ],
)
def test_what_is_no_baseline_is_refused_in_words(text, words, tmp_path):
    path = tmp_path / "b.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(checks.ArgumentError, match=re.escape(words)):
        baseline.read(path)


def edits(node):
    """Every way to put nonsense in the place of one part of a document, or to leave it out."""
    yield from (None, [], {}, "x", -1, True, [[]], {"a": 1}, [[["x"]]], 10**400, math.nan)
    if isinstance(node, dict):
        for key, value in node.items():
            yield {other: kept for other, kept in node.items() if other != key}
            yield from ({**node, key: edited} for edited in edits(value))
    elif isinstance(node, list) and node:
        yield node[1:]
        yield from ([edited, *node[1:]] for edited in edits(node[0]))


def test_an_edited_file_is_refused_in_words_or_can_be_held(tmp_path):
    path, now = tmp_path / "b.json", {"a": row(1.0, torch="2.13.0")}
    refused = held = 0
    for edited in edits({"format": 1, "rows": now}):
        path.write_text(json.dumps(edited))
        try:
            before = baseline.read(path)
        except checks.ArgumentError:
            refused += 1
        else:
            baseline.hold(before, now)
            baseline.write(path, now)
            held += 1
    assert refused > 50
    assert held > 5
    path.write_text("[" * 100_000)
    with pytest.raises(
        checks.ArgumentError, match=r"--save must be a baseline that can be read; got .*\. Move it away, or save under another name\."
    ):
        baseline.write(path, now)


def test_a_name_is_a_file_a_device_in_the_cache_and_a_path_is_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path))
    assert baseline.path_of("main", "NVIDIA H200") == tmp_path / "bench" / "main-nvidia-h200.json"
    assert str(baseline.path_of("here/b.json", "NVIDIA H200")) == "here/b.json"
