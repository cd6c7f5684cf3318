"""Traces and replay files on disk: what is read back, and what is said of files that are damaged, foreign or of another version."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ops_math as om
from ops_nn.debug import ConsistencyChecker, Trace, replay_file, trace
from tests.adopt.models import llama
from tests.debug.broken import FAULTS, run


@pytest.fixture
def full() -> Trace:
    job = llama()
    return run(ConsistencyChecker(mode="full"), job.model, job.loss)


@pytest.mark.parametrize("mode", ["light", "full"])
def test_a_trace_is_read_back_as_it_was(mode, tmp_path):
    job = llama()
    made = run(ConsistencyChecker(mode=mode), job.model, job.loss)
    found = Trace.load(made.save(tmp_path / "run"))
    assert (found.mode, found.model, found.modules, found.ties) == (made.mode, made.model, made.modules, made.ties)
    assert (found.calls, found.notes, found.versions, found.arguments) == (made.calls, made.notes, made.versions, made.arguments)
    assert list(found.records) == list(made.records)
    for key, record in made.records.items():
        assert found.records[key]._replace(tensor=None) == record._replace(tensor=None)
        assert (record.tensor is None) == (mode == "light")
        assert record.tensor is None or torch.equal(found.records[key].tensor, record.tensor)
    assert ConsistencyChecker().compare(found, trace=made).verdict == "bitwise"


def test_nan_and_infinities_are_read_back(tmp_path):
    model = nn.Identity()
    checker = ConsistencyChecker()
    with checker.trace(model) as made:
        model(torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]))
    found = Trace.load(made.save(tmp_path / "run"))
    json.loads((tmp_path / "run" / "trace.json").read_text(), parse_constant=pytest.fail)
    figures = next(iter(found.records.values())).figures
    assert (figures.nans, figures.infinities, figures.max) == (1, 2, 1.0)
    assert checker.compare(found).verdict == "bitwise"


def test_a_truncated_index_is_refused_in_words(full, tmp_path):
    place = full.save(tmp_path / "run") / "trace.json"
    text = place.read_text()
    for share in (0.1, 0.5, 0.999):
        place.write_text(text[: int(share * len(text))])
        with pytest.raises(om.UnsupportedError, match=r"trace\.json: it is not complete \(.*\)\. Trace the run again\.$"):
            Trace.load(tmp_path / "run")


def test_an_index_that_lacks_a_field_or_was_edited_is_refused_in_words(full, tmp_path):
    place = full.save(tmp_path / "run") / "trace.json"
    fields = json.loads(place.read_text())
    for name in fields.keys() - {"format"}:
        place.write_text(json.dumps({k: v for k, v in fields.items() if k != name}))
        with pytest.raises(om.UnsupportedError, match=rf"a field is missing or was edited \(KeyError: '{name}'\)\. Trace the run again\.$"):
            Trace.load(tmp_path / "run")
    place.write_text(json.dumps({**fields, "records": [1]}))
    with pytest.raises(om.UnsupportedError, match="a field is missing or was edited"):
        Trace.load(tmp_path / "run")
    place.write_text("[" * 100_000)
    with pytest.raises(om.UnsupportedError, match="it is not complete"):
        Trace.load(tmp_path / "run")


@pytest.mark.parametrize("version", [0, 4, None, "1"])
def test_a_trace_of_another_format_is_refused_in_words(version, full, tmp_path):
    place = full.save(tmp_path / "run") / "trace.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"format": version}))
    with pytest.raises(om.UnsupportedError, match=rf"a trace of format {version}, and this version reads format 1 to 3\. Compare with"):
        Trace.load(tmp_path / "run")


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_trace_is_read_and_not_compared_with_one_of_other_fingerprints(version, full, tmp_path):
    place = full.save(tmp_path / "run") / "trace.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"format": version}))
    old = Trace.load(tmp_path / "run")
    checker = ConsistencyChecker()
    assert checker.compare(old, trace=Trace.load(tmp_path / "run")).verdict == "bitwise"
    assert Trace.load(old.save(tmp_path / "again")).format == version
    words = rf"^compare: traces of formats 3 and {version}, whose fingerprints are not alike\. Trace both runs with one version, or "
    with pytest.raises(om.UnsupportedError, match=words):
        checker.compare(old, trace=full)
    with pytest.raises(om.UnsupportedError, match=words):
        checker.compare(full, trace=full, noise=old)


def test_a_trace_of_another_version_of_the_library_is_read(full, tmp_path):
    full.versions["ops_math"] = "0.0.1"
    found = Trace.load(full.save(tmp_path / "run"))
    assert ConsistencyChecker().compare(found, trace=full).verdict == "bitwise"


def test_a_damaged_file_of_tensors_costs_these_tensors_alone(full, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "SHARD_BYTES", 100_000)
    folder = full.save(tmp_path / "run")
    shards = sorted(folder.glob("tensors-*"))
    assert len(shards) > 5
    shards[2].write_bytes(shards[2].read_bytes()[:-100])
    found = Trace.load(folder)
    kept = [r.tensor is not None for r in found.records.values()]
    assert 0 < kept.count(False) < 60
    assert found.notes[-2].startswith("tensors-00002.safetensors is not complete and is left out (")
    assert found.notes[-1] == f"{kept.count(False)} of {len(kept)} tensors are missing: the trace was not written to its end"
    assert ConsistencyChecker().compare(found, trace=full).verdict == "bitwise"


def test_a_disk_that_is_full_in_the_middle_leaves_what_was_written_readable(full, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "SHARD_BYTES", 100_000)
    plain = trace.write_tensors
    written = []

    def write(path: Path, tensors: dict, metadata: dict) -> None:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.extend([path])
        plain(path, tensors, metadata)

    monkeypatch.setattr(trace, "write_tensors", write)
    with pytest.raises(om.UnsupportedError, match=r"\(No space left on device\); its figures and \d+ of its tensors can be"):
        full.save(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".*"))
    found = Trace.load(tmp_path / "run")
    assert sum(r.tensor is not None for r in found.records.values()) > 20
    assert "the trace was not written to its end" in found.notes[-1]
    assert ConsistencyChecker().compare(found, trace=full).verdict == "bitwise"


def test_a_device_that_takes_nothing_is_said(full, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="No space left"):
        trace.replace(tmp_path / "x", lambda place: Path("/dev/full").write_text("x"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_else_in_it_is_left_alone(full, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(om.ArgumentError, match=r"path must be a new folder or one with a trace in it; got .*\. Name another one\.$"):
        full.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_without_a_trace_is_refused(tmp_path):
    with pytest.raises(om.ArgumentError, match=r"path must be a folder with trace\.json in it; got .*\. Name what Trace\.save wrote\.$"):
        Trace.load(tmp_path)


def test_a_shorter_trace_written_over_a_longer_one_leaves_nothing_of_it(full, tmp_path):
    full.save(tmp_path / "run")
    job = llama(layers=1)
    short = run(ConsistencyChecker(), job.model, job.loss)
    assert list(Trace.load(short.save(tmp_path / "run")).records) == list(short.records)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["trace.json"]


def test_replay_files_that_are_truncated_foreign_or_of_another_format_are_refused(tmp_path):
    fault = FAULTS["eps 1e-5 for 1e-6"]()
    report = ConsistencyChecker(folder=tmp_path).lockstep(fault.a, fault.b, fault.step)
    whole = report.dumped.read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:-7])
    with pytest.raises(om.UnsupportedError, match=r"it is not complete \(.*\)\. Write it again\.$"):
        replay_file(cut)
    cut.write_bytes(whole.replace(b'{\\"format\\": 1', b'{\\"format\\": 7'))
    with pytest.raises(om.UnsupportedError, match=r"a file of format 7, and this version reads format 1\. Use the version"):
        replay_file(cut)
    save_file({"x": torch.ones(1)}, cut)
    with pytest.raises(om.UnsupportedError, match=r"a safetensors file of another program\. Name one that ConsistencyChecker wrote\.$"):
        replay_file(cut)
    with pytest.raises(om.ArgumentError, match=r"FILE must be a file that ConsistencyChecker wrote; got .*, where there is none\."):
        replay_file(tmp_path / "none")


def test_a_file_that_names_something_that_is_no_module_runs_none_of_it(tmp_path):
    fault = FAULTS["eps 1e-5 for 1e-6"]()
    report = ConsistencyChecker(folder=tmp_path).lockstep(fault.a, fault.b, fault.step)
    evil, known = tmp_path / "evil.safetensors", b"ops_nn.models.llama.LlamaRMSNorm"
    for other, words in (
        (b"torch.utils.data.dataset.Dataset", r"it is no module\. The file is not one of ours\.$"),
        (b"torch.utils.data.dataset.DataSet", r"it cannot be imported here\. Install or put on the path what defines it\.$"),
    ):
        assert len(other) == len(known)
        evil.write_bytes(report.dumped.read_bytes().replace(known, other))
        with pytest.raises(om.UnsupportedError, match=words):
            replay_file(evil)
