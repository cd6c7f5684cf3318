"""A file is as it was or as it should be, with the permissions that a user would expect, and an error names it."""

import errno
import os
from pathlib import Path

import pytest

from ops_math import files


def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_new_file_has_the_permissions_of_any_new_file_and_an_old_one_keeps_its_own(tmp_path):
    before = os.umask(0o022)
    try:
        files.replace(tmp_path / "new", "é")
        (tmp_path / "own").touch(0o600)
        files.replace(tmp_path / "own", "b")
        (tmp_path / "shared").touch(0o600)
        files.replace(tmp_path / "shared", "b", keep_mode=False)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"new": 0o644, "own": 0o600, "shared": 0o644}
    assert (tmp_path / "new").read_text(encoding="utf-8") == "é"


def test_through_a_link_the_file_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    files.replace(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("write", [files.replace, files.append])
def test_a_full_disk_is_said_with_the_files_name_and_leaves_what_was_there(write, monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"^\[Errno 28\] No space left on device: '{path}'$"):
        write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [files.replace, files.append])
def test_a_device_is_written_as_it_is(write):
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write("/dev/full", "words")
    write(Path(os.devnull), "words")
    assert Path(os.devnull).is_char_device()


def test_text_is_appended(tmp_path):
    files.append(tmp_path / "rows", "a\n")
    files.append(tmp_path / "rows", "b\n")
    assert (tmp_path / "rows").read_text() == "a\nb\n"
