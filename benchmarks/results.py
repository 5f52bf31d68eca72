"""Write results: Markdown tables to a named file or stdout, and finished rows to files for a later run."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from ac_client.files import write_whole

ROOT = Path(__file__).parents[1]


def markdown_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table without a final newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in lines)


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write Markdown here; default: stdout")


def write_result(text: str, path: Path | None) -> None:
    """Write `text` to `path`, or print it where no path was given."""
    if path is None:
        print(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")


def source_digest(*versions: str, folders: Sequence[str], files: Sequence[Path] = ()) -> str:
    """Return the first digits of a SHA-256 of `versions`, `files`, and all Python files under `folders`.

    Results of one digest come from the same code. Folders are relative to the repository's root.
    """
    digest = hashlib.sha256("\0".join(versions).encode())
    for source in [*files, *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]
