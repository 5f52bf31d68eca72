"""Writing files whole or not at all."""

import os

import pytest

from ac_client.files import write_whole


def test_failed_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    path.write_text("old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_error_about_a_missing_folder_names_the_file(tmp_path):
    path = tmp_path / "missing" / "policy.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, "text")
    assert caught.value.filename == str(path)


def test_written_file_has_default_permissions(tmp_path):
    write_whole(tmp_path / "a", "text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
