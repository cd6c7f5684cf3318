"""Text, tokenizer and batches of `ops-math train`."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from ops_math import ArgumentError, UnsupportedError
from ops_math.cli.train import corpus, data, tokenizer
from ops_math.cli.train.corpus import Document
from ops_math.cli.train.data import Data, MaskIds
from ops_nn.models import IGNORE_INDEX
from tests.cli import train_fixtures as fixtures

IDS = MaskIds(mask=1, first=3, end=300)


@pytest.fixture(autouse=True)
def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    fixtures.add_presets(monkeypatch)


def stream(length: int, first: int = 3) -> torch.Tensor:
    return torch.arange(length) % 290 + first


def test_the_built_in_text_is_the_same_each_time_and_holds_reference_and_docstrings() -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    topics = corpus.reference_topics(library / "pydoc_data" / "topics.py")
    assert "assert" in topics
    assert len(topics["yield"]) > 100
    text = corpus.docstrings(library / "textwrap.py")
    assert text == corpus.docstrings(library / "textwrap.py")
    assert "class TextWrapper" in text
    assert "def dedent(text)\nRemove any common leading whitespace" in text


def test_docstrings_come_from_parsing_and_nothing_is_imported(tmp_path: Path) -> None:
    module = tmp_path / "loud.py"
    long = "A sentence that is long enough to count as documentation of something that matters to a reader."
    module.write_text(f'"""{long}"""\nraise SystemExit("imported")\ndef f(a, b):\n    """{long}"""\n    def g():\n        """{long}"""\n')
    assert corpus.docstrings(module) == f"# loud\n{long}\n\ndef f(a, b)\n{long}\n"


def test_a_file_that_this_python_cannot_parse_holds_no_docstrings(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print 'two'\n")
    assert corpus.docstrings(tmp_path / "old.py") == ""


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second\n"), ("a.txt", "first\n"), (".hidden", "never\n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.txt").write_text("third\n" * 40)
    loaded = corpus.load(tmp_path)
    assert [document.name for document in loaded.train] == ["a.txt", "b.txt", "c/d.txt"]
    assert [document.name for document in loaded.held_out] == ["c/d.txt"]
    assert loaded.characters == len("first\nsecond\n") + 240


def test_the_held_out_tail_starts_at_a_line_and_nothing_is_lost() -> None:
    documents = [Document("a", "line one\n" * 100), Document("b", "line two\n" * 100)]
    train, held_out = corpus.split(documents, held_out=0.25)
    assert [d.name for d in train] == ["a", "b"]
    assert [d.name for d in held_out] == ["b"]
    assert train[1].text + held_out[0].text == documents[1].text
    assert held_out[0].text.startswith("line two")
    assert len(held_out[0].text) == pytest.approx(450, abs=9)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", r"train: --data must be text; got .*, which is empty. Give plain text in UTF-8."),
        (b" \n\n ", r"train: --data must be text; got .*, which is empty. Give plain text in UTF-8."),
        (b"abc\0def", r"train: --data must be text; got .*, which is binary \(a NUL byte at offset 3\). Give plain text in UTF-8."),
        (b"ab\xff\xfe", r"train: --data must be text in UTF-8; got .*, which is not \(byte 0xff at offset 2\). Give plain text in UTF-8."),
    ],
)
def test_a_file_without_text_is_refused_in_words(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=f"^{sentence}$"):
        corpus.load(path)


def test_a_path_that_does_not_exist_and_an_empty_folder_are_refused_in_words(tmp_path: Path) -> None:
    missing = (
        r"^train: --data must be a text file or a folder of text files; got .*nowhere, which does not exist. Correct the path, or leave"
    )
    with pytest.raises(ArgumentError, match=missing):
        corpus.load(tmp_path / "nowhere")
    with pytest.raises(
        ArgumentError, match=r"^train: --data must be a folder with text files in it; got .*, which has none. Put text files"
    ):
        corpus.load(tmp_path)


def test_a_special_file_is_refused_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match=r"got .*pipe, which is neither. Correct the path"):
        corpus.load(tmp_path / "pipe")


def test_tokens_decode_to_the_text_they_came_from() -> None:
    texts = ["déjà vu: naïve façade, 你好\n\tindented  twice", "plain words and plain words again"]
    trained = tokenizer.train(texts, 300)
    ids = tokenizer.encode(trained, texts)
    end = trained.token_to_id(tokenizer.END)
    cut = ids.index(end)
    assert trained.decode(ids[:cut]) == texts[0]
    assert trained.decode(ids[cut + 1 : -1]) == texts[1]
    assert ids[-1] == end


def test_a_tokenizer_is_trained_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the same words the same words the same words"]
    first = tokenizer.train_or_load(texts, 300, tmp_path)
    monkeypatch.setattr(tokenizer, "train", lambda *_: pytest.fail("trained again"))
    assert tokenizer.train_or_load(texts, 300, tmp_path).to_str() == first.to_str()
    assert [p.suffix for p in tmp_path.iterdir() if p.suffix != ".lock"] == [".json"]


@pytest.mark.parametrize("damage", ["", '{"version": "1.0"', '{"added_tokens": []}', "\udcff"])
def test_a_damaged_cache_is_trained_again(tmp_path: Path, damage: str) -> None:
    texts = ["the same words the same words the same words"]
    whole = tokenizer.train_or_load(texts, 300, tmp_path).to_str()
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert tokenizer.train_or_load(texts, 300, tmp_path).to_str() == whole
    assert path.read_text(encoding="utf-8") == whole


def test_other_text_or_another_size_has_another_key() -> None:
    keys = {tokenizer.content_key(*arguments) for arguments in ((["ab"], 300), (["a", "b"], 300), (["ab"], 301), (["ba"], 300))}
    assert len(keys) == 4


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^train: the vocabulary must be at least 259 \(256 bytes and 3 special tokens\); got 100"):
        tokenizer.train_or_load(["text"], 100, tmp_path)


def test_a_cache_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UnsupportedError, match=r"the cache folder .*/file: it cannot be written \(File exists\). Name another with --cache$"
    ):
        tokenizer.train_or_load(["text"], 300, tmp_path / "file")


def test_labels_are_the_tokens_that_follow() -> None:
    batch = Data(stream(200), stream(40), fixtures.config(), IDS, "").batch(0)
    assert batch.input_ids.shape == batch.labels.shape == (2, 16)
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])
    assert torch.equal(batch.labels, (batch.input_ids - 3 + 1) % 290 + 3)


@pytest.mark.parametrize("model", ["small", "small-bert"])
def test_documents_kept_apart_have_positions_of_their_own_and_predict_none_but_themselves(model: str) -> None:
    text, end = stream(200), 60
    apart = Data(text, stream(40), fixtures.config(model=model, documents=True), IDS, "", end)
    whole = Data(text, stream(40), fixtures.config(model=model), IDS, "", end)
    for step in range(6):
        batch, other = apart.batch(step), whole.batch(step)
        assert torch.equal(batch.input_ids, other.input_ids)
        assert other.position_ids is other.cu_seqlens is None
        assert batch.position_ids is not None
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.tolist()[-1] == batch.input_ids.numel()
        starts = set(batch.cu_seqlens.tolist())
        for at, position in enumerate(batch.position_ids.flatten().tolist()):
            assert (position == 0) == (at in starts)
        tokens = (batch.input_ids if model == "small" else other.input_ids).flatten()
        ends = tokens == end
        assert bool((batch.labels.flatten()[ends] == IGNORE_INDEX).all())
        assert torch.equal(batch.labels.flatten()[~ends], other.labels.flatten()[~ends])


def test_every_window_comes_once_before_any_comes_again() -> None:
    text = Data(stream(16 * 7 + 1), stream(40), fixtures.config(), IDS, "")
    starts = [int(row[0]) for step in range(7) for row in text.batch(step).input_ids]
    assert sorted(starts[:7]) == sorted(starts[7:]) == [3 + 16 * i for i in range(7)]
    assert starts[:7] != starts[7:]


def test_a_batch_depends_on_seed_and_step_and_not_on_what_was_drawn_before() -> None:
    one, other = (Data(stream(3000), stream(40), fixtures.config(), IDS, "") for _ in range(2))
    for step in range(5):
        one.batch(step)
    torch.manual_seed(99)
    assert torch.equal(one.batch(120).input_ids, other.batch(120).input_ids)
    reseeded = Data(stream(3000), stream(40), fixtures.config(seed=1), IDS, "")
    assert not torch.equal(reseeded.batch(120).input_ids, other.batch(120).input_ids)


def test_fewer_tokens_than_one_batch_are_refused_in_words() -> None:
    Data(stream(33), stream(2), fixtures.config(), IDS, "here")
    sentence = (
        r"^train: --data must be at least 33 tokens, one batch of 2 x 16, besides a held-out part; "
        r"got 32 and 2 held out, from here. Give more text, or lower --batch or --seq.$"
    )
    with pytest.raises(ArgumentError, match=sentence):
        Data(stream(32), stream(2), fixtures.config(), IDS, "here")
    with pytest.raises(ArgumentError, match=r"got 33 and 1 held out"):
        Data(stream(33), stream(1), fixtures.config(), IDS, "here")


def test_validation_covers_held_out_text_only_and_shortens_to_fit() -> None:
    few = Data(stream(200), torch.tensor([7, 8, 9, 10]), fixtures.config(), IDS, "").validation()
    assert [batch.input_ids.tolist() for batch in few] == [[[7, 8, 9]]]
    many = Data(stream(200), stream(16 * 30), fixtures.config(), IDS, "").validation()
    assert [tuple(batch.input_ids.shape) for batch in many] == [(2, 16)] * data.VALIDATION_BATCHES


def test_masking_hides_fifteen_percent_in_the_proportion_80_10_10() -> None:
    tokens = torch.randint(3, 300, (200, 500), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    batch = data.mask_tokens(tokens, IDS, torch.Generator().manual_seed(1))
    hidden = batch.labels != IGNORE_INDEX
    assert not hidden[:, 0].any()
    assert torch.equal(batch.labels[hidden], tokens[hidden])
    assert torch.equal(batch.input_ids[~hidden], tokens[~hidden])
    share = hidden[:, 1:].float().mean().item()
    masked = (batch.input_ids[hidden] == IDS.mask).float().mean().item()
    kept = (batch.input_ids[hidden] == tokens[hidden]).float().mean().item()
    assert share == pytest.approx(0.15, abs=0.005)
    assert masked == pytest.approx(0.8, abs=0.01)
    assert kept == pytest.approx(0.1 + 0.1 / 297, abs=0.01)
    drawn = batch.input_ids[hidden & (batch.input_ids != tokens)]
    assert ((drawn == IDS.mask) | (drawn >= IDS.first)).all()


def test_at_least_one_token_is_hidden_in_every_batch() -> None:
    for seed in range(60):
        batch = data.mask_tokens(torch.tensor([[0, 5, 0]]), IDS, torch.Generator().manual_seed(seed))
        assert batch.labels.tolist() == [[IGNORE_INDEX, 5, IGNORE_INDEX]]


def test_masks_differ_from_step_to_step_and_repeat_with_the_seed() -> None:
    used = fixtures.config(model="small-bert")
    one, other = (Data(stream(33), stream(40), used, IDS, "") for _ in range(2))
    assert torch.equal(one.batch(3).labels, other.batch(3).labels)
    assert not torch.equal(one.batch(0).labels.sort().values, one.batch(1).labels.sort().values)
