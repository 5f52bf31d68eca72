"""Name files on disk by the source that wrote them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


@functools.cache
def source_digest(folder: Path) -> str:
    """Return a digest of all Python source in `folder`. Files written by other source are not found again."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
