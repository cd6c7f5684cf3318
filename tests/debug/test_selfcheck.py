"""`ops-math selfcheck` on scripts that each have one planted cause, and on one that has none."""

from __future__ import annotations

import json
import textwrap

import pytest

import ops_math as om
from ops_math.cli import app
from ops_nn.debug import selfcheck

HEAD = """
import pathlib, random
import torch
from torch import nn
import torch.nn.functional as F
import ops_math as om

def runs():
    '''How many processes ran this script before.'''
    place = pathlib.Path(__file__).with_suffix(".count")
    count = int(place.read_text()) if place.exists() else 0
    place.write_text(str(count + 1))
    return count

def stepping(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def step():
        optimizer.step()
        optimizer.zero_grad()
        loss = model(batch() if callable(batch) else batch).square().mean()
        loss.backward()
        return loss
    return model, step

torch.manual_seed(0)
X = torch.randn(6, 8)
"""
CLEAN = """
def make_step():
    return stepping(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)), X)
"""
WEIGHTS = """
def make_step():
    torch.seed()
    return stepping(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), X)
"""
NOISE = """
class Noisy(nn.Module):
    def forward(self, x):
        return x * random.random()

def make_step():
    return stepping(nn.Sequential(nn.Linear(8, 8), Noisy()), X)
"""
RACE = """
COUNT = runs()

class Racing(nn.Module):
    '''Two writes to one place, in the order that a race would have.'''
    def forward(self, x):
        values = torch.tensor([1.0, 2.0]) if COUNT % 2 else torch.tensor([2.0, 1.0])
        return x * torch.zeros(1).put_(torch.tensor([0, 0]), values)

def make_step():
    return stepping(nn.Sequential(nn.Linear(8, 8), Racing()), X)
"""
TUNED = """
om.force(layer_norm=("eager", "vendor")[runs() % 2])

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1027))
    def forward(self, x):
        return om.layer_norm(x, self.weight)

def make_step():
    return stepping(nn.Sequential(nn.Linear(8, 1027), Norm()), X)
"""
HASHED = """
names = list({f"sample-{i}" for i in range(60)})
rows = {f"sample-{i}": torch.full((8,), float(i)) for i in range(60)}

def make_step():
    queue = iter(names)
    return stepping(nn.Sequential(nn.Linear(8, 2)), lambda: torch.stack([rows[next(queue)] for _ in range(30)]))
"""
SHUFFLED = """
order = list(range(60))
random.shuffle(order)

def make_step():
    queue = iter(order)
    return stepping(nn.Sequential(nn.Linear(8, 2)), lambda: torch.stack([torch.full((8,), float(next(queue))) for _ in range(30)]))
"""
UNKNOWN = """
COUNT = runs()

class Counting(nn.Module):
    def forward(self, x):
        return x * (1.0 + COUNT)

def make_step():
    return stepping(nn.Sequential(nn.Linear(8, 8), Counting()), X)
"""


def checked(tmp_path, body, **options):
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return selfcheck(script, folder=tmp_path / "traces", **options)


def test_a_script_that_repeats_is_said_to(tmp_path):
    found = checked(tmp_path, CLEAN)
    assert found.repeats
    assert found.tensors > 20
    assert str(found).startswith(f"repeats: {found.tensors} tensors of 2 steps have the same bits in two processes")
    assert found.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "module", "direction", "kind", "words"),
    [
        (
            WEIGHTS,
            "0",
            "parameter",
            "unseeded source",
            r"the weights at the start came from a source that is not seeded (torch.seed() at train.py:",
        ),
        (
            NOISE,
            "1",
            "forward",
            "unseeded source",
            "a random number in 1 came from a source that is not seeded (random, which was drawn from",
        ),
        pytest.param(
            *(RACE, "1", "forward", "atomics", "1 uses put_, which adds or writes in no fixed order: om.determinism(1) refuses it"),
            marks=pytest.mark.long,
        ),
        (TUNED, "1", "forward", "tuning", "another implementation ran: layer_norm "),
        pytest.param(HASHED, "", "input", "data order", "the batches follow Python's hashes", marks=pytest.mark.long),
        (
            SHUFFLED,
            "",
            "input",
            "data order",
            "both runs read the same rows in another order (random, which was drawn from and not seeded)",
        ),
        pytest.param(UNKNOWN, "1", "forward", "unknown", "seeds, hashes, choices and alerts explain nothing", marks=pytest.mark.long),
    ],
    ids=["weights", "noise", "race", "tuned", "hashed", "shuffled", "unknown"],
)
def test_a_planted_cause_is_found_where_it_is_and_named(tmp_path, body, module, direction, kind, words):
    found = checked(tmp_path, body)
    assert not found.repeats
    assert (found.first.key.module, found.first.key.direction) == (module, direction)
    assert found.cause.kind == kind
    assert words in found.cause.words
    assert f"likely cause: {kind}: " in str(found)


@pytest.mark.slow
def test_the_command_ends_with_1_where_it_does_not_repeat_and_names_the_cause(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(HEAD + NOISE.replace("make_step", "build"))
    with pytest.raises(SystemExit) as end:
        app.run(["selfcheck", f"{script}:build", "--json", "--steps", "1"])
    assert end.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["cause"]["kind"] == "unseeded source"
    assert found["first"]["module"] == "1"


@pytest.mark.slow
def test_a_script_that_cannot_be_run_is_refused_in_words(tmp_path):
    with pytest.raises(om.ArgumentError, match=r"^selfcheck: train\.py must have a function make_step\(\); got none\. Write one"):
        checked(tmp_path, "")
    with pytest.raises(om.ArgumentError, match=r"make_step\(\) must return a model and a function that runs one step; got int\."):
        checked(tmp_path, "def make_step():\n    return 1\n")
    with pytest.raises(
        om.UnsupportedError, match=r"^selfcheck: train\.py failed at line \d+ \(ZeroDivisionError: division by zero\)\. Call make"
    ):
        checked(tmp_path, "1 / 0\n")
    with pytest.raises(om.UnsupportedError, match=r"^selfcheck: train\.py failed \(its process ended with code 7\)\. Call make"):
        checked(tmp_path, "import os\nos._exit(7)\n")
    with pytest.raises(om.ArgumentError, match=r"the step of make_step\(\) must call the model that is returned with it; got a step in"):
        checked(tmp_path, "def make_step():\n    return nn.Linear(2, 2), lambda: None\n")
    with pytest.raises(om.UnsupportedError, match=r"did not end within 2 s\. Give it fewer steps, or more time by --seconds\."):
        checked(tmp_path, "import time\ntime.sleep(60)\n", seconds=2.0)
    with pytest.raises(om.ArgumentError, match=r"^selfcheck: SCRIPT must be a Python file; got nowhere\.py\."):
        selfcheck("nowhere.py")
