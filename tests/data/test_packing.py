"""Packed documents: laid out without loss, and each as if it were alone, outputs and gradients."""

import dataclasses
import itertools
import random

import pytest
import torch

import ops_math as om
from ops_nn.adopt import adopt
from ops_nn.data import pack_documents, split_rows
from ops_nn.models import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

LLAMA = LlamaConfig(61, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
BERT = BertConfig(61, 32, 48, num_layers=2, num_heads=4, max_position_embeddings=64, hidden_dropout=0.0, attention_dropout=0.0)
LENGTHS = (7, 1, 30, 12, 23, 2)


def documents(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(61, (n,), generator=generator) for n in lengths]


def model_of(config, dtype=torch.float32):
    model = (LlamaForCausalLM if isinstance(config, LlamaConfig) else BertForMaskedLM)(config)
    model.reset_parameters(torch.Generator().manual_seed(3))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0) if p.dim() > 1 else None
    return model.to(dtype).train()


def targets_of(config, texts):
    """Labels for a masked model, every third token; None where the next token is predicted."""
    if isinstance(config, LlamaConfig):
        return None
    return [torch.where(torch.arange(len(t)) % 3 == 0, t, -100) for t in texts]


@pytest.mark.parametrize("options", [{}, {"multiple": 8}, {"row_length": 32}, {"row_length": 48}], ids=str)
def test_every_token_lies_somewhere_once_with_its_position_and_label(options):
    texts = documents()
    batch = pack_documents(texts, **options)
    assert [t.tolist() for t in batch.unpack(batch.input_ids)] == [t.tolist() for t in texts]
    assert [t.tolist() for t in batch.unpack(batch.position_ids)] == [list(range(len(t))) for t in texts]
    assert [t.tolist() for t in batch.unpack(batch.labels)] == [[*t[1:].tolist(), -100] for t in texts]
    assert batch.num_tokens == sum(LENGTHS)
    padding = batch.document_ids < 0
    assert int((~padding).sum()) == batch.num_tokens
    assert bool((batch.labels[padding] == -100).all())
    assert int((batch.labels != -100).sum()) == sum(n - 1 for n in LENGTHS)


@pytest.mark.parametrize("options", [{}, {"row_length": 32}], ids=str)
def test_segments_are_the_documents_and_the_padding_and_cross_no_row(options):
    batch = pack_documents(documents(), **options)
    ends = batch.cu_seqlens.tolist()
    rows, length = batch.input_ids.shape
    assert batch.cu_seqlens.dtype == torch.int32
    assert (ends[0], ends[-1]) == (0, rows * length)
    assert ends == sorted(ends)
    assert len(ends) - 1 == 1 << (len(ends) - 2).bit_length(), "a power of two"
    ids = batch.document_ids.flatten().tolist()
    for first, last in itertools.pairwise(ends):
        if last > first:
            assert len(set(ids[first:last])) == 1
            assert first // length == (last - 1) // length
            assert last - first <= batch.max_seqlen
    for _, _, count, at in batch.pieces:
        assert {at, at + count} <= set(ends)


def test_rows_of_fixed_length_are_filled_well():
    """Lengths of 1 to 256 in rows of 256: at least 0.95 of the places hold a token."""
    source = random.Random(0)
    batch = pack_documents(documents([source.randint(1, 256) for _ in range(300)]), row_length=256)
    assert batch.num_tokens / batch.input_ids.numel() > 0.95


def test_a_padded_batch_and_its_lengths_give_what_the_documents_give():
    texts = documents()
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=60)
    lengths = torch.tensor(LENGTHS)
    from_batch, from_list = pack_documents(padded, lengths=lengths), pack_documents(texts)
    for a, b in zip(from_batch[:4], from_list[:4], strict=True):
        assert torch.equal(a, b)


def test_a_long_document_is_cut_without_losing_a_label():
    (text,) = documents((70,))
    batch = pack_documents([text], row_length=32, split=True)
    assert batch.unpack(batch.input_ids)[0].tolist() == text.tolist()
    assert batch.unpack(batch.labels)[0].tolist() == [*text[1:].tolist(), -100], "a piece's last token predicts the next piece's first"
    assert [piece[1:3] for piece in batch.pieces] == [(0, 32), (32, 32), (64, 6)]


@pytest.mark.parametrize(("arguments", "sentence"), [
    (([torch.zeros(3)], {}), "pack_documents: documents[0] must be a tensor [tokens] of integers; got shape [3] of torch.float32. "
     "Convert it: torch.tensor(ids)."),
    (([], {}), "pack_documents: documents must be a list of tensors [tokens], or a batch [B, S]; got list of none. "
     "Pass one tensor of token ids for each document."),
    ((torch.zeros(2, 3, dtype=torch.int64), {}), "pack_documents: lengths must be a tensor [2] with a padded batch; got None. "
     "Pass mask.sum(1)."),
    ((torch.zeros(2, 3, dtype=torch.int64), {"lengths": torch.tensor([4, 1])}), "pack_documents: lengths must be in [0, 3]; got 1 to 4. "
     "Pass mask.sum(1)."),
    (([torch.zeros(9, dtype=torch.int64)], {"row_length": 8}), "pack_documents: documents[0] must be at most 8 tokens long, as a row is; "
     "got 9 tokens. Pass split=True to cut it, or a larger row_length."),
    (([torch.zeros(9, dtype=torch.int64)], {"labels": [torch.zeros(8, dtype=torch.int64)]}), "pack_documents: labels must be as many and "
     "as long as documents; got another number at document 0. Give a label for each token."),
    (([torch.zeros(0, dtype=torch.int64)], {}), "pack_documents: documents must be at least one token; got none. Leave empty batches out."),
    (([torch.zeros(3, dtype=torch.bool)], {}), "pack_documents: documents[0] must be a tensor [tokens] of integers; got shape [3] of "
     "torch.bool. Convert it: torch.tensor(ids)."),
    ((torch.full((2, 3), 1.7), {"lengths": torch.tensor([3, 1])}), "pack_documents: documents must be a tensor of integers; got one of "
     "torch.float32. Pass token ids, and mask.sum(1) as lengths."),
    ((torch.zeros(2, 3, dtype=torch.int64), {"lengths": torch.tensor([True, True])}), "pack_documents: lengths must be a tensor of "
     "integers; got one of torch.bool. Pass token ids, and mask.sum(1) as lengths."),
    (([torch.zeros(1, dtype=torch.int64)], {"multiple": 0}), "pack_documents: multiple must be a whole number of at least 1; got 0. "
     "Pass multiple=64, say."),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused_in_words(arguments, sentence):
    given, options = arguments
    with pytest.raises(om.ArgumentError) as error:
        pack_documents(given, **options)
    assert str(error.value) == sentence


def alone(model, config, texts):
    """Logits of each document, and gradients of the mean loss over all counted tokens, one document at a time."""
    model.zero_grad()
    targets = targets_of(config, texts) or [torch.cat([t[1:], t.new_full((1,), -100)]) for t in texts]
    counted = sum(int((t != -100).sum()) for t in targets)
    logits = []
    for text, target in zip(texts, targets, strict=True):
        out = model(text[None]).logits
        logits.append(out[0].detach())
        (torch.nn.functional.cross_entropy(out[0].double(), target, reduction="sum") / counted).backward()
    return logits, {n: p.grad.clone() for n, p in model.named_parameters()}


def together(model, config, texts, **options):
    model.zero_grad()
    batch = pack_documents(texts, labels=targets_of(config, texts), **options)
    with torch.no_grad():
        inputs = {k: v for k, v in batch.model_inputs().items() if k != "labels"}
        logits = batch.unpack(model(**inputs).logits)
    model(**batch.model_inputs()).loss.backward()
    return logits, {n: p.grad.clone() for n, p in model.named_parameters()}


def distance(found, exact):
    """The largest relative l2 distance."""
    return max(float((a.double() - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("options", [{}, {"row_length": 32}], ids=str)
@pytest.mark.parametrize("config", [LLAMA, dataclasses.replace(LLAMA, tie_word_embeddings=False), BERT], ids=["llama", "untied", "bert"])
@pytest.mark.parametrize("ours", ["plain", "ops", "packed"])
def test_packed_documents_give_what_each_gives_alone(config, ours, options):
    """Logits and every gradient, within twice the error that the same model makes with each document alone, and a rounding."""
    texts = documents()
    exact_logits, exact = alone(model_of(config, torch.float64), config, texts)
    model = model_of(config)
    if ours != "plain":
        adopt(model, pack=ours == "packed")
    own_logits, own = alone(model, config, texts)
    logits, grads = together(model, config, texts, **options)
    rounding = 2 * torch.finfo(torch.float32).eps
    assert distance(logits, exact_logits) <= 2 * distance(own_logits, exact_logits) + rounding
    for name, grad in exact.items():
        assert distance([grads[name]], [grad]) <= 2 * distance([own[name]], [grad]) + 4 * rounding, name


@pytest.mark.parametrize("fault", ["positions", "bounds"])
def test_the_comparison_sees_documents_that_see_each_other(fault):
    """What the test above would miss if it held nothing: positions that run on, a bound that is left out."""
    texts = documents()
    exact_logits, _ = alone(model_of(LLAMA, torch.float64), LLAMA, texts)
    model = model_of(LLAMA)
    adopt(model)
    batch = pack_documents(texts)
    bounds = batch.cu_seqlens.clone()
    bounds[1] = bounds[2]
    wrong = (
        batch._replace(position_ids=torch.arange(batch.input_ids.numel())[None])
        if fault == "positions"
        else batch._replace(cu_seqlens=bounds)
    )
    inputs = {k: v for k, v in wrong.model_inputs().items() if k != "labels"}
    with torch.no_grad():
        logits = batch.unpack(model(**inputs).logits)
    # a document's positions may be moved as a whole: rotary attention sees differences alone, so only a bound changes Llama's numbers
    far = distance(logits, exact_logits)
    assert far > 1e-3 if fault == "bounds" else far < 1e-4


def test_positions_that_run_on_change_a_model_with_a_table_of_positions():
    texts = documents((5, 6))
    model = model_of(BERT)
    batch = pack_documents(texts, labels=targets_of(BERT, texts), multiple=1)
    inputs = {k: v for k, v in batch.model_inputs().items() if k != "labels"}
    with torch.no_grad():
        right = model(**inputs).logits
        wrong = model(**inputs | {"position_ids": torch.arange(11)[None]}).logits
    assert float((right - wrong).abs().max()) > 1e-3


def test_rows_of_a_stream_are_split_where_documents_end():
    ids = torch.tensor([[5, 6, 0, 7, 8, 9, 0, 3], [0, 4, 4, 4, 4, 4, 4, 4]])
    batch = split_rows(ids, 0)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.labels.tolist() == [[6, 0, -100, 8, 9, 0, -100, -100], [-100, 4, 4, 4, 4, 4, 4, -100]]
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 8, 9, 16, 16, 16, 16]
    assert batch.max_seqlen == 8
    assert [t.tolist() for t in batch.unpack(batch.input_ids)] == [[5, 6, 0], [7, 8, 9, 0], [3], [0], [4] * 7]
    following = torch.full_like(ids, 1)
    assert split_rows(ids, 0, labels=following).labels.tolist() == [[1, 1, -100, 1, 1, 1, -100, 1], [-100] + [1] * 7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.uint16, torch.uint32], ids=str)
def test_ids_of_any_integers_become_those_that_a_loss_takes(dtype):
    ids = torch.tensor([[1, 2, 0, 1]], dtype=dtype)
    for labels in (None, ids):
        batch = split_rows(ids, 0, labels=labels)
        assert (batch.input_ids.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
        assert batch.labels.tolist() == ([[2, 0, -100, -100]] if labels is None else [[1, 2, -100, 1]])
    for documents, options in (([ids[0], ids[0, :2]], {}), (ids.expand(2, 4), {"lengths": torch.tensor([4, 2])})):
        packed = pack_documents(documents, row_length=8, **options)
        assert packed.input_ids.tolist() == [[1, 2, 0, 1, 1, 2, 0, 0]]
        assert packed.labels.tolist() == [[2, 0, 1, -100, 2, -100, -100, -100]]


ROWS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(("ids", "options", "name", "got"), [
    (torch.zeros(3), {}, "input_ids", "shape [3] of torch.float32"),
    (ROWS, {"labels": ROWS[:, :2]}, "labels", "shape [2, 2] of torch.int64"),
    (ROWS[:0], {}, "input_ids", "shape [0, 3] of torch.int64"),
    ([0], {}, "input_ids", "list"),
])  # fmt: skip
def test_rows_that_cannot_be_split_are_refused_in_words(ids, options, name, got):
    with pytest.raises(om.ArgumentError) as error:
        split_rows(ids, 0, **options)
    needs = "a tensor [R, L] of integers, of one shape with input_ids"
    assert str(error.value) == f"split_rows: {name} must be {needs}; got {got}. Pass rows of a stream of tokens."
