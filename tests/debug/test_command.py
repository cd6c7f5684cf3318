"""`ops-math compare` and `ops-math replay`, and the report as JSON and HTML."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from ops_math.cli import app
from ops_nn.debug import ConsistencyChecker
from tests.adopt.models import llama
from tests.debug.broken import FAULTS, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two saved full traces, B with another eps."""
    fault = FAULTS["eps 1e-5 for 1e-6"]()
    place = tmp_path_factory.mktemp("runs")
    checker = ConsistencyChecker(mode="full")
    for name, model in (("a", fault.a), ("b", fault.b)):
        run(checker, model, fault.step).save(place / name)
    return place, fault


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        app.run([str(a) for a in arguments])
    return int(end.value.code or 0)


def test_two_saved_runs_are_compared_and_the_dump_replays(runs, tmp_path, capsys):
    place, fault = runs
    assert command("compare", place / "a", place / "b", "--report", tmp_path / "report") == 1
    shown = capsys.readouterr().out
    assert f"first: {fault.module}, forward" in shown
    assert "likely cause: eps: variance_epsilon is 1e-06 in A and 1e-05 in B" in shown
    file = re.search(r"to reproduce: ops-math replay (\S+)", shown).group(1)
    assert {p.suffix for p in (tmp_path / "report").iterdir()} == {".txt", ".json", ".html", ".safetensors"}
    assert command("replay", file) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"{fault.module}, forward\n")
    assert re.search(r"^forward +same +same +\d\.\d\de-0[345]", shown, re.MULTILINE)


def test_equal_runs_end_with_0_and_a_missing_one_with_2(runs, tmp_path, capsys):
    place, _ = runs
    assert command("compare", place / "a", place / "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "bitwise"
    assert command("compare", place / "a", tmp_path) == 2
    assert "path must be a folder with trace.json in it" in capsys.readouterr().err
    assert command("replay", tmp_path / "none") == 2


@pytest.mark.slow
def test_the_replay_runs_alone_in_a_process_of_its_own(runs, tmp_path):
    place, _ = runs
    checker = ConsistencyChecker(folder=tmp_path)
    dumped = checker.compare(place / "b", trace=place / "a").dumped
    code = f"from ops_math.cli import app; app.run(['replay', {str(dumped)!r}])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert "forward" in result.stdout


class _Page(HTMLParser):
    """Counts tags and checks that they are closed."""

    void = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_needs_nothing_else_and_colours_the_tree(runs):
    place, fault = runs
    report = ConsistencyChecker(dump_on_failure=False).compare(place / "b", trace=place / "a")
    text = report.to_html()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert not re.search(r"https?://|<script|<link|@import|src=", text)
    assert "prefers-color-scheme: dark" in text
    modules = llama().model.modules()
    assert sum(attrs.get("class") == "path" for _, attrs in page.seen) >= len(list(modules))
    assert sum(attrs.get("class") == "guilty" for _, attrs in page.seen) == 1
    first = fault.module.rpartition(".")[2]
    guilty = text[text.index('class="guilty"') :]
    assert first in guilty[:700]
    assert re.search(r'class="chip c[3456]"', guilty[:400])


def test_json_is_strict_and_says_what_the_text_says(runs, tmp_path):
    place, fault = runs
    report = ConsistencyChecker(folder=tmp_path).compare(place / "b", trace=place / "a")
    text = (report.save(tmp_path / "report") / "comparison.json").read_text()
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["verdict"] == "different"
    assert found["findings"][0]["module"] == fault.module
    assert found["findings"][0]["cause"]["kind"] == "eps"
    assert len(found["rows"]) == len(report.rows)
    assert found["dumped"] == str(report.dumped)
