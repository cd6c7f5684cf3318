"""Two hundred different lengths meet few problems: few choices, few measurements at first use."""

import copy
import random

import pytest
import torch

from ops_math import catalog, schedule
from ops_math.dispatch import _Known
from ops_math.schedule import first_meeting
from ops_math.schedule.live import LIVE, changed
from ops_math.schedule.record import Measurement, bucket, policy_text
from ops_math.settings import policy
from ops_nn.adopt import adopt
from ops_nn.data import pack_documents, trim_to_longest
from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

LLAMA = LlamaConfig(61, 32, 48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
BERT = BertConfig(61, 32, 48, num_layers=1, num_heads=4, max_position_embeddings=512, hidden_dropout=0.0, attention_dropout=0.0)
BATCHES, LONGEST, GRAIN = 200, 512, 64


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """An empty cache and nothing chosen; what this process knew before is back afterwards."""
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path / "cache"))
    before = {name: copy.copy(value) for name, value in LIVE.__dict__.items()}
    schedule.reread()
    yield
    LIVE.__dict__.update(before)
    changed()


def packed_batches():
    """Rows of 512 tokens, two of them, cut into documents anew for each batch: 200 different lists of lengths."""
    source = random.Random(0)
    for _ in range(BATCHES):
        lengths = [source.randint(1, 200) for _ in range(12)]
        while sum(lengths) > 2 * LONGEST - 100:
            lengths.pop()
        yield pack_documents([torch.randint(61, (n,)) for n in lengths], row_length=LONGEST).model_inputs()


def trimmed_batches():
    """Each of 200 different lengths is the longest of one batch."""
    lengths = random.Random(0).sample(range(1, LONGEST + 1), BATCHES)
    for longest in lengths:
        mask = torch.arange(LONGEST)[None] < torch.tensor([[longest], [max(longest // 2, 1)]])
        ids = torch.randint(61, mask.shape)
        mask, ids, labels = trim_to_longest(mask, ids, ids.masked_fill(~mask, -100), multiple=GRAIN)
        yield {"input_ids": ids, "labels": labels, "attention_mask": mask}


# Packed: rows are 1 or 2; segments 8 or 16 and the longest 128, 256 or 512 in attention alone. Trimmed: 512 / 64 lengths.
PACKED = (LLAMA, packed_batches, 2, 2 * 2 * 3)
TRIMMED = (BERT, trimmed_batches, LONGEST // GRAIN, LONGEST // GRAIN)


def trained(config, batches, stop=None):
    model = (LlamaForCausalLM if isinstance(config, LlamaConfig) else BertForMaskedLM)(config).train()
    adopt(model)
    for number, batch in enumerate(batches()):
        if number == stop:
            break
        model(**batch).loss.backward()


def choices(phase):
    """How many problems of a phase were chosen for; calls by their tensors are remembered beside them."""
    return sum(not isinstance(found, _Known) for found in phase.memo.values())


@pytest.mark.parametrize(("config", "batches", "most", "most_attention"), [PACKED, TRIMMED], ids=["packed", "trimmed"])
def test_two_hundred_lengths_make_a_bounded_number_of_choices(config, batches, most, most_attention):
    for operator in catalog.operators().values():
        operator.forget()
    trained(config, batches)
    chosen = {(name, phase): choices(p) for name, o in catalog.operators().items() for phase, p in o.phases.items() if p.memo}
    assert {("attention", "fwd"), ("linear_cross_entropy", "fwd")} <= chosen.keys()
    sites = 2  # an operator may stand at two places of a model, as a norm alone and behind a sum
    for (name, _), count in chosen.items():
        assert count <= (most_attention if name == "attention" else sites * most), (name, count)


def test_without_rounding_two_hundred_lengths_make_two_hundred_choices():
    """The test above would see it."""
    for operator in catalog.operators().values():
        operator.forget()

    def batches():
        for length in range(1, 21):
            ids = torch.randint(61, (1, length))
            yield {"input_ids": ids, "labels": ids}

    trained(LLAMA, batches)
    assert choices(catalog.operators()["attention"].phases["fwd"]) == 20


@pytest.mark.parametrize(("config", "batches", "most", "most_attention"), [PACKED, TRIMMED], ids=["packed", "trimmed"])
def test_two_hundred_lengths_are_measured_a_bounded_number_of_times_at_first_use(config, batches, most, most_attention, monkeypatch):
    measured = []

    def measure(operator, phase, args, **options):
        problem = operator.phases[phase].problem_of(*args)
        measured.append(operator.name)
        dtype = operator.file("problem").storage(problem)
        return Measurement(
            operator.name, phase, str(problem), bucket(problem), dtype, policy_text(policy()), "", {"eager": 1.0}, {"eager": 0.0},
            {"eager": 1.0}, "eager", (), {}, "planted", f"{len(measured):06}",
        )  # fmt: skip

    monkeypatch.setattr(first_meeting, "measure", measure)
    monkeypatch.setattr(first_meeting, "ensure_ceilings", lambda *args: None)
    monkeypatch.setattr("ops_math.schedule.store.folder", lambda: None)
    with schedule.first_use(1.0):
        trained(config, batches)
    phases, sites = 2, 2
    for name in set(measured):
        bound = phases * (most_attention if name == "attention" else sites * most)
        assert measured.count(name) <= bound, (name, measured.count(name))
    assert "attention" in measured
