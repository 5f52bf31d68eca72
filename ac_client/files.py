"""Write files whole or not at all, and name them in errors about their text."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoac.planner import PlannerError


def check_writable(path: Path) -> None:
    """Check that `write_whole` can write `path`, before the work whose result goes there.

    Raises:
        OSError: the file cannot be written.
    """
    handle, temporary = _temporary_file(path)
    os.close(handle)
    os.unlink(temporary)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`; if that fails, leave `path` as it was.

    Raises:
        OSError: the file cannot be written.
    """
    handle, temporary = _temporary_file(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _temporary_file(path: Path) -> tuple[int, str]:
    """Open a new file in the folder of `path`."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # the error names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def named(file: str | os.PathLike[str]) -> Iterator[None]:
    """Prefix errors of the planner in the block with the name of the file whose text they are about."""
    try:
        yield
    except PlannerError as error:
        error.args = (f"{os.fspath(file)}: {error}",)
        raise
