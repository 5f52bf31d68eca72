"""Keep Python's garbage collector away from what the collection of the tests has imported."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Freeze the heap: most of a million objects, which each `gc.collect` of a test would visit."""
    gc.collect()
    gc.freeze()
