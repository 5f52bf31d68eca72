"""Read and write the notes on a compiled graph: a JSON file for each graph, shared by processes."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("autoac.profiler")


def read_notes(path: Path) -> dict[str, Any] | None:
    """Return the notes in a file; None if it does not exist, or with a warning if it is invalid."""
    try:
        notes = json.loads(path.read_text("utf-8"))
        if not (isinstance(notes, dict) and isinstance(notes.get("ops"), list)):
            raise ValueError("it has no list of ops")
        return notes
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the graph is traced and profiled again: cannot read %s: %s", path, error)
        return None


def write_notes(path: Path, notes: dict[str, Any]) -> None:
    """Write `notes` so that other processes see all of them or none. Warn if that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(notes, file)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("later processes profile the model again: cannot write %s: %s", path, error)


@functools.cache
def source_digest(folder: Path) -> str:
    """Return a digest of all Python source in `folder`. Files written by other source are not found again."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
