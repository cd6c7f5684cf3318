"""The page says what the operators state: the price in its words, and levels that hold where it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math import catalog
from tests.determinism.calls import SAMPLES, drawn, outcome

PAGE = (Path(__file__).parents[2] / "docs" / "determinism.md").read_text()
OFFERED, RANKS = (PAGE.split(f"{title}\n")[1].split("\n#")[0] for title in ("## What each operator offers", "### Two, four, eight ranks"))
LINES = {
    name.strip(" `"): line.split("|") for line in OFFERED.splitlines() if line.startswith("| `") for name in line.split("|")[1].split(",")
}


@pytest.mark.parametrize("name", list(catalog.operators()))
def test_the_price_of_an_operator_stands_on_the_page(name):
    for function in catalog.operators()[name].public:
        line = next(cells for shown, cells in LINES.items() if function.startswith(shown) or shown == function)
        assert catalog.operators()[name].file("levels").LEVELS.price == line[5].strip()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_the_level_on_a_cpu_is_the_one_that_the_page_gives(sample):
    level = int(next(cells for shown, cells in LINES.items() if sample.name.startswith(shown))[3].split(";")[0])
    with om.determinism(level):
        outcome(sample, *drawn(sample, 3), 0)
    if level < 3:
        with (
            om.determinism(level + 1),
            pytest.raises(om.UnsupportedError, match=f"offers no determinism level {level + 1} for this problem"),
        ):
            outcome(sample, *drawn(sample, 3), 0)


def test_the_page_says_of_every_operator_how_ranks_may_cut_it():
    named = "".join(line.split("|")[1] for line in RANKS.splitlines() if line.startswith("| ")).replace("norms", "rms_norm layer_norm")
    named = named.replace("`swiglu`", "glu")
    assert [name for name in catalog.operators() if name not in named] == []


def test_adamw_runs_at_level_two():
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    from ops_nn.optim import AdamW

    with om.determinism(2):
        AdamW([weight], lr=0.1).step()
    assert not torch.equal(weight.detach(), torch.ones(4))
