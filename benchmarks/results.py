"""Run the cases of a benchmark that the command names, and write their table to a file or stdout."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from ac_client.files import write_whole

ROOT = Path(__file__).parents[1]

R = TypeVar("R")


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--only`, for `chosen`, and `--out`, for `write_result`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases, such as 'GPT*'")
    add_out_argument(parser)
    return parser


def chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches.

    Raises:
        SystemExit: there is none.
    """
    known = list(names)
    found = [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(f"--only must match a name of {', '.join(known)}; got {' '.join(patterns)}")
    return found


def shown(rows: Iterable[R], cells: Callable[[R], Sequence[object]]) -> list[R]:
    """Return the rows, and print the cells of each on stderr as soon as it is measured."""
    done = []
    for row in rows:
        done.append(row)
        print(*cells(row), sep=" | ", file=sys.stderr, flush=True)
    return done


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
