"""The file of measurements: complete in its key, readable, safe for many processes, and never the reason why a run fails."""

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import ops_math as om
from ops_math import backends, schedule
from ops_math.schedule import store
from ops_math.schedule.identity import Identity, identity_of
from ops_math.schedule.live import add, contents_of, record_for
from ops_math.schedule.record import Ceilings, Measurement, bucket, from_row, to_row
from ops_math.schedule.store import ScheduleWarning
from tests.schedule.toy import ToyProblem, eager, registered

HERE = Identity("cuda", "NVIDIA H200", "90", 132, "580.65", "2.13.0", "3.9.0")
CPU = identity_of(backends.device_of(torch.device("cpu")))
CEILINGS = Ceilings(4272.0, 770.0, 400.0, 6.0)


def row(problem: object = "p", when: str = "2026-11-29T12:00:00", **changes: object) -> Measurement:
    made = Measurement(
        "toy", "fwd", str(problem), bucket(problem), "fp32", "precision=default determinism=0", "abc", {"vendor": 5.0, "eager": 7.0},
        {"vendor": 0.01, "eager": 0.02}, {"vendor": 4.0, "eager": 7.0}, "vendor", (), {"magic": "gave NaN"}, "eager in fp64", when,
    )  # fmt: skip
    return made._replace(**changes)


def test_a_file_gives_back_what_was_written_and_a_person_can_read_it(tmp_path):
    path = tmp_path / HERE.file_name
    store.write(path, HERE, [row("a"), row("b")], CEILINGS)
    found = store.read(path, HERE)
    assert sorted(m.problem for m in found.measurements.values()) == ["a", "b"]
    assert found.ceilings == CEILINGS
    assert path.name.startswith("schedule-nvidia-h200-")
    lines = path.read_text().splitlines()
    assert len([line for line in lines if '"winner": "vendor"' in line]) == 2
    assert json.loads(path.read_text())["identity"]["driver"] == "580.65"


@pytest.mark.parametrize("field", Identity._fields)
def test_every_part_of_an_identity_has_a_file_of_its_own_and_is_named_when_it_differs(field, tmp_path):
    other = HERE._replace(**{field: 99 if field == "cores" else "other"})
    assert other.file_name != HERE.file_name
    path = tmp_path / HERE.file_name
    store.write(path, other, [row()], None)
    with pytest.warns(
        ScheduleWarning, match=rf"set aside: it was measured elsewhere: {field} .*, here .*\. A copy is at .*set-aside-1\.json"
    ):
        assert store.read(path, HERE) == store.NONE
    assert store.read(path.with_name(f"{path.stem}.set-aside-1.json"), other).measurements
    assert not path.exists()


def broken_files():
    good = json.dumps(store.document(HERE, store.Contents({row().key: row()}, CEILINGS)))
    yield "truncated", good[: len(good) // 2], "it is not JSON"
    yield "empty", "", "it is not JSON"
    yield "a list", "[]", "its format is 'none', and this version reads 1"
    yield "another format", good.replace('"format": 1', '"format": 7'), "its format is 7, and this version reads 1"
    yield "no identity", good.replace('"identity"', '"identitty"'), "it does not say which device"
    yield "nested without end", "[" * 100_000, "it is not JSON"
    yield "binary", "\ud800", "it cannot be read"
    changes = {"times_us": {"vendor": -5.0}, "winner": "magic", "ties": ["magic"], "refused": ["a"], "when": 3, "noise": {"vendor": "x"}}
    for name, value in changes.items():
        nonsense = {**to_row(row("nonsense")), name: value}
        document = store.document(HERE, store.Contents({row().key: row()}, CEILINGS))
        document["measurements"].append(nonsense)
        yield f"nonsense in {name}", json.dumps(document), "measurement 1: "
    yield "infinite", good.replace("5.0", "Infinity"), "`times_us` does not hold finite numbers"
    slow = {**to_row(row()), "times_us": {"vendor": 70.0, "eager": 7.0}}
    yield "a slow winner", good.replace(json.dumps(to_row(row())), json.dumps(slow)), "more than 4 times as long as the fastest"
    yield "ceilings", good.replace("4272.0", '"fast"'), "the ceilings are not finite numbers"


@pytest.mark.parametrize(("text", "words"), [(t, w) for _, t, w in broken_files()], ids=[name for name, _, _ in broken_files()])
def test_a_broken_file_is_set_aside_with_a_copy_and_what_is_good_in_it_is_used(text, words, tmp_path):
    path = tmp_path / HERE.file_name
    raw = text.encode("utf-8", "surrogatepass")
    path.write_bytes(raw)
    with pytest.warns(ScheduleWarning, match="was set aside") as caught:
        found = store.read(path, HERE)
    assert words in str(caught[0].message)
    assert path.with_name(f"{path.stem}.set-aside-1.json").read_bytes() == raw
    one_is_good = words in ("measurement 1: ", "the ceilings are not finite numbers")
    assert len(found.measurements) == int(one_is_good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read(path, HERE).measurements == found.measurements  # what is left of the file is whole


def test_the_newer_of_two_measurements_stays_and_other_sources_are_kept_apart():
    old, new = row(when="1"), row(when="2", times_us={"vendor": 1.0})
    first, second = ({m.key: m for m in ms} for ms in ([new], [old, row(source="other")]))
    merged = store.merge(store.Contents(first, None), store.Contents(second, CEILINGS))
    assert merged.measurements[new.key] == new
    assert len(merged.measurements) == 2
    assert merged.ceilings == CEILINGS


def test_the_record_is_capped_and_the_oldest_go(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "MOST_MEASUREMENTS", 5)
    path = tmp_path / HERE.file_name
    store.write(path, HERE, [row(f"p{n}", when=f"{n:03d}") for n in range(9)], None)
    assert sorted(m.problem for m in store.read(path, HERE).measurements.values()) == [f"p{n}" for n in range(4, 9)]
    monkeypatch.setattr(store, "MOST_BYTES", 1200)
    store.write(path, HERE, [row("p9", when="009")], None)
    assert path.stat().st_size < 1600
    assert "p9" in {m.problem for m in store.read(path, HERE).measurements.values()}


def test_the_folder_is_capped_too(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "MOST_FILES", 3)
    for n in range(6):
        identity = HERE._replace(cores=n)
        store.write(tmp_path / identity.file_name, identity, [row()], None)
        os.utime(tmp_path / identity.file_name, (n, n))
    assert len(list(tmp_path.glob("schedule-*.json"))) <= 4


def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_a_warning_and_leaves_the_old_file_whole(monkeypatch, tmp_path):
    path = tmp_path / HERE.file_name
    store.write(path, HERE, [row("a")], None)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(ScheduleWarning, match=r"could not be kept in .* \(.*No space left on device\)\. They last for this process only"):
        found = store.write(path, HERE, [row("b")], None)
    assert [m.problem for m in found.measurements.values()] == ["b"]
    assert [m.problem for m in store.read(path, HERE).measurements.values()] == ["a"]
    assert list(tmp_path.glob("*.part")) == []


def test_a_folder_that_cannot_be_written_costs_a_warning_and_the_process_knows_what_it_measured(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("OPS_MATH_CACHE", str(tmp_path / "file" / "below"))
    schedule.reread()
    with pytest.warns(ScheduleWarning):
        add(CPU, [row()])
    assert row().key in contents_of(CPU).measurements


def test_a_lock_that_somebody_holds_costs_a_warning(monkeypatch, tmp_path):
    from filelock import FileLock

    path = tmp_path / HERE.file_name
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.2)
    with FileLock(str(path) + ".lock"), pytest.warns(ScheduleWarning, match="could not be kept"):
        store.write(path, HERE, [row()], None)


WRITER = """
import sys
from tests.schedule.test_record import HERE, row
from ops_math.schedule import store
from pathlib import Path
for n in range(25):
    store.write(Path(sys.argv[1]), HERE, [row(f"{sys.argv[2]} {n}")], None)
    store.read(Path(sys.argv[1]), HERE)
"""


@pytest.mark.slow
def test_many_processes_write_one_file_and_nothing_is_lost(tmp_path):
    path = tmp_path / HERE.file_name
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-W", "error", "-c", WRITER, str(path)]
    running = [subprocess.Popen([*command, name], cwd=root, stderr=subprocess.PIPE, text=True) for name in "ABC"]
    for process in running:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert len(store.read(path, HERE).measurements) == 75
    assert list(tmp_path.glob("*set-aside*")) == list(tmp_path.glob("*.part")) == []


def test_a_row_that_is_not_one_is_refused_and_one_that_is_comes_back():
    assert from_row(json.loads(json.dumps(to_row(row())))) == row()
    with pytest.raises(ValueError, match="has not the fields"):
        from_row({**to_row(row()), "more": 1})
    with pytest.raises(ValueError, match="should hold words"):
        from_row({**to_row(row()), "op": ""})


EDITED = {
    "a list among the ties": ({"ties": [["eager"]]}, "what ties with it"),
    "a number that no float holds": ({"times_us": {**row().times_us, "eager": 10**400}}, "finite numbers"),
    "another such": ({"noise": {"eager": 10**400}}, "finite numbers"),
}


@pytest.mark.parametrize("edit", EDITED)
def test_an_edited_file_stops_no_run(edit, tmp_path):
    change, words = EDITED[edit]
    path = tmp_path / HERE.file_name
    store.write(path, HERE, [row()], None)
    found = json.loads(path.read_text())
    found["measurements"][0].update(change)
    path.write_text(json.dumps(found))
    with pytest.warns(ScheduleWarning, match=words):
        assert store.read(path, HERE).measurements == {}


def test_ceilings_that_no_float_holds_stop_no_run(tmp_path):
    path = tmp_path / HERE.file_name
    store.write(path, HERE, [row()], Ceilings(100.0, 1.0, 1.0, 1.0))
    path.write_text(path.read_text().replace("100.0", "1" + "0" * 400))
    with pytest.warns(ScheduleWarning, match="ceilings are not finite"):
        assert len(store.read(path, HERE).measurements) == 1


def test_an_empty_name_of_the_cache_folder_is_none(monkeypatch):
    monkeypatch.setenv("OPS_MATH_CACHE", "")
    assert store.folder() != Path()


def test_a_bucket_keeps_what_changes_the_winner_and_rounds_what_does_not():
    assert bucket(ToyProblem(1000, 4096, "bf16")) == bucket(ToyProblem(976, 4104, "bf16")) == "ToyProblem(rows=~768, cols=~4096, x='bf16')"
    assert bucket(ToyProblem(1001, 4096, "bf16")) != bucket(ToyProblem(1000, 4096, "bf16"))
    assert bucket(ToyProblem(32, 4096, "bf16")) != bucket(ToyProblem(33, 4096, "bf16"))
    assert bucket(ToyProblem(64, 4096, "bf16")) != bucket(ToyProblem(64, 4096, "fp32"))
    lengths = {bucket(ToyProblem(n, 4096, "bf16")) for n in range(1, 100001)}
    assert len(lengths) < 120


def test_a_name_says_what_a_file_holds_on_this_machine(cache):
    x = torch.randn(32, 64)
    om.calibrate(lambda: om.softmax(x), seconds=1)
    (file,) = cache.glob("schedule-*.json")
    assert file.name == CPU.file_name
    assert CPU.torch == torch.__version__
    assert CPU.cores == torch.get_num_threads()


def test_a_file_in_a_shared_folder_can_be_read_by_others_and_its_lock_taken_by_who_may_write_the_folder(tmp_path):
    before = os.umask(0o027)
    try:
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o775)
        path = tmp_path / "shared" / HERE.file_name
        path.touch(0o600)
        path.write_text(json.dumps(store.document(HERE, store.NONE)))
        store.write(path, HERE, [row()], None)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert Path(f"{path}.lock").stat().st_mode & 0o777 == 0o664


def test_a_reader_that_met_a_broken_file_leaves_what_another_process_wrote_meanwhile(monkeypatch, tmp_path):
    path = tmp_path / HERE.file_name
    path.write_text("half a fi")
    look = store._look

    def slowly(*given):
        found = look(*given)
        monkeypatch.setattr(store, "_look", look)
        store.write(path, HERE, [row("theirs")], None)  # by another process, which sets the broken file aside
        return found

    monkeypatch.setattr(store, "_look", slowly)
    with pytest.warns(ScheduleWarning) as caught:
        found = store.read(path, HERE)
    assert [m.problem for m in found.measurements.values()] == ["theirs"]
    assert [m.problem for m in store.read(path, HERE).measurements.values()] == ["theirs"]
    assert len(caught) == 1


def test_without_room_a_broken_file_is_moved_and_no_part_of_a_copy_stays(monkeypatch, tmp_path):
    path = tmp_path / HERE.file_name
    document = store.document(HERE, store.Contents({row().key: row()}, CEILINGS))
    path.write_text(json.dumps({**document, "measurements": [*document["measurements"], 3]}))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(ScheduleWarning, match=r"It is at .*set-aside-1\.json, and what is good in it could not be put back"):
        assert len(store.read(path, HERE).measurements) == 1
    assert [p.name for p in tmp_path.glob("*.json")] == [f"{path.stem}.set-aside-1.json"]


def test_a_full_disk_leaves_an_older_export_whole(monkeypatch, tmp_path):
    add(CPU, [row()], save=False)
    path = tmp_path / "export.json"
    schedule.export(path)
    old = path.read_text()
    assert path.stat().st_mode & 0o444
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*export\.json'"):
        schedule.export(path)
    assert path.read_text() == old
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".part"] == []


def test_measurements_edited_to_candidates_that_an_operator_does_not_have_are_named_and_not_used(tmp_path):
    registered({"vendor": eager, "eager": eager})
    edited = row("edited", source="no-sources", times_us={"bogus": 5.0, "eager:Config(1)": 7.0}, winner="bogus")
    good = row("good", source="no-sources")
    path = store.folder() / CPU.file_name
    store.write(path, CPU, [edited, good], None)
    schedule.reread()
    with pytest.warns(ScheduleWarning, match=r"^schedule: 1 measurements are not used: toy has no bogus\. Their problems are predicted"):
        record = record_for(backends.device_of(torch.device("cpu")))
    assert [m.problem for m in record.exact.values()] == ["good"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_for(backends.device_of(torch.device("cpu")))  # said once
