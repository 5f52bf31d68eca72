"""Test the files of notes on compiled graphs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autoac.profiler.compiler.graph_notes import read_notes, write_notes


def test_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "autoac" / "key.json"
    assert read_notes(path) is None
    write_notes(path, {"ops": [["layer", "aten.mm.default"]]})
    assert read_notes(path) == {"ops": [["layer", "aten.mm.default"]]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ops": 1}', "\xff"])
def test_invalid_notes_are_ignored_with_a_warning(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key.json"
    path.write_text(text, "latin-1")
    with caplog.at_level(logging.WARNING, "autoac.profiler"):
        assert read_notes(path) is None
    assert str(path) in caplog.text
