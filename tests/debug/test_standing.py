"""What is kept of a model from one trace to the next is what one would find anew, whatever was done to the model in between."""

from __future__ import annotations

import copy
import dataclasses
import gc
import types
import weakref

import pytest
import torch
from torch import nn

from ops_nn.adopt import adopt
from ops_nn.debug import ConsistencyChecker, Key, names, standing
from tests.adopt.models import JOBS
from tests.debug.broken import run


@dataclasses.dataclass
class Config:
    eps: float = 1e-5


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.scale, self.sizes, self.config, self.table = 2.0, [1, 2], Config(), torch.ones(3)
        self.register_buffer("angles", torch.arange(4.0))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.head = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def anew(model: nn.Module, every: bool) -> dict[str, object]:
    """What a trace needs, found by plain ways."""
    found = names.layout(model)
    chosen = found.places if every else names.blocks(found)
    return {
        "paths": {id(place.module): path for path, place in found.places.items() if path in chosen},
        "places": [(path, id(place.module)) for path, place in found.places.items()],
        "facts": {path: repr(names.facts(place.module)) for path, place in found.places.items()},
        "aliases": {path: place.aliases for path, place in found.places.items() if place.aliases},
        "ties": names.ties(found),
        "removed": found.removed,
        "compiled": found.compiled,
        "graded": any(p.grad is not None for p in model.parameters()),
        "held": [(id(t), *key) for key, t in names.tensors_of(found).items()],
    }


def kept(model: nn.Module, every: bool) -> dict[str, object]:
    found = standing.of(model, every)
    fields = {name: getattr(found, name) for name in ("paths", "aliases", "ties", "removed", "compiled", "graded")}
    fields["places"] = [(path, id(module)) for path, module in found.places.items()]
    fields["facts"] = {path: repr(facts) for path, facts in found.facts.items()}
    return {**fields, "held": [(id(t), key.module, key.name) for t, key, _ in found.held]}


def other_forward(self, x):
    return x


def third_forward(self, x):
    return x + 0.0


def rename(m):
    inner = m.blocks[0]
    value = inner.__dict__.pop("scale")
    inner.__dict__["factor"] = value


def replace_child(m):
    m.blocks[1].linear = nn.Linear(6, 6)


def untie(m):
    m.head.weight = nn.Parameter(m.head.weight.detach().clone())


def compile_one(m):
    m.blocks[2].compile(backend="eager")


class Wrapped(Inner):
    pass


CHANGES = {
    "an attribute": lambda m: setattr(m.blocks[1], "scale", 3.0),
    "an attribute of another type": lambda m: setattr(m.blocks[1], "scale", 2),
    "an attribute inside a list": lambda m: m.blocks[1].sizes.append(5),
    "an attribute inside a dataclass": lambda m: setattr(m.blocks[2].config, "eps", 1e-3),
    "a tensor that becomes a number": lambda m: setattr(m.blocks[0], "table", 7),
    "a name": rename,
    "a new attribute": lambda m: setattr(m.head, "extra", "words"),
    "an attribute less": lambda m: delattr(m.blocks[0], "scale"),
    "training": lambda m: m.eval(),
    "the dtype": lambda m: m.bfloat16(),
    "the dtype of one buffer": lambda m: setattr(m.blocks[0], "angles", m.blocks[0].angles.double()),
    "frozen": lambda m: m.blocks[0].linear.weight.requires_grad_(False),
    "a parameter that goes": lambda m: setattr(m.blocks[0].linear, "bias", None),
    "a new buffer": lambda m: m.head.register_buffer("count", torch.zeros(2)),
    "a tied weight": lambda m: setattr(m.head, "weight", m.blocks[1].linear.weight),
    "an untied weight": untie,
    "other values at another place": lambda m: setattr(m.head.weight, "data", torch.randn(6, 6)),
    "another shape at one place": lambda m: setattr(m.head.weight, "data", m.head.weight.data.view(4, 9)),
    "a module": replace_child,
    "a module under two names": lambda m: setattr(m, "again", m.blocks[0]),
    "a module less": lambda m: m.blocks.__delitem__(2),
    "modules in another order": lambda m: m._modules.update(blocks=m._modules.pop("blocks")),
    "a class": lambda m: setattr(m.blocks[0], "__class__", Wrapped),
    "a forward": lambda m: setattr(m.blocks[0], "forward", types.MethodType(other_forward, m.blocks[0])),
    "compiled": compile_one,
    "a gradient": lambda m: m(torch.ones(2, 6)).backward(),
}


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_between_two_traces_is_seen(change, every):
    model = Outer()
    before = kept(model, every)
    assert before == anew(model, every)
    assert kept(model, every) == before
    CHANGES[change](model)
    after = anew(model, every)
    assert kept(model, every) == after
    assert after != before or change in ("other values at another place",)


def test_a_function_is_told_from_another_that_came_to_stand_at_its_place_in_memory():
    model = Outer()
    block = model.blocks[0]
    for forward in (other_forward, third_forward) * 3:
        block.forward = types.MethodType(forward, block)
        assert kept(model, True)["facts"]["blocks.0"].endswith(f".{forward.__name__}'}}")


def test_nothing_of_a_model_is_kept_alive():
    model = Outer()
    checker = ConsistencyChecker()
    run(checker, model, lambda m: m(torch.ones(2, 6)))
    run(checker, model, lambda m: m(torch.ones(2, 6)))
    gone = [weakref.ref(model), weakref.ref(model.blocks[0].linear.weight), weakref.ref(model.blocks[0].table)]
    gc.collect()  # models of other tests
    before = len(standing._KNOWN)
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert len(standing._KNOWN) == before - 1


@pytest.mark.parametrize("mode", ["light", "full"])
def test_the_second_trace_of_a_model_says_what_the_first_of_its_twin_says(mode):
    job = JOBS["our Llama, tied"]()
    adopt(job.model)
    checker = ConsistencyChecker(mode=mode, observe="all")
    run(checker, job.model, job.loss)
    with torch.no_grad():
        for p in job.model.parameters():
            p.mul_(1.01)
    job.model.zero_grad()
    twin = copy.deepcopy(job.model)
    first, second = run(checker, twin, job.loss), run(checker, job.model, job.loss)
    assert standing._KNOWN[job.model].kept or mode == "full"
    for name in ("modules", "ties", "calls", "notes", "arguments", "autocast"):
        assert getattr(second, name) == getattr(first, name), name
    assert {k: r[:-1] for k, r in second.records.items()} == {k: r[:-1] for k, r in first.records.items()}


def test_weights_that_were_moved_between_two_traces_are_read_where_they_are():
    model, checker = Outer(), ConsistencyChecker()

    def figures():
        return run(checker, model, lambda m: m(torch.ones(2, 6))).records[Key("head", 0, "parameter", "weight")].figures

    first = figures()
    assert figures() == first
    before = model.head.weight.data
    model.head.weight.data = before * 2.0
    assert figures().l2 == pytest.approx(2 * first.l2, rel=1e-6)
    model.head.weight.data = before
    assert figures() == first
    before.fill_(3.0)  # past the version counter
    assert figures().l2 == pytest.approx(18.0, rel=1e-6)
