"""Share a machine with another worker, and keep the garbage collector away from what all tests import."""

from __future__ import annotations

import gc
import os

# Threads of two workers and of their children wait for one another spinning: three to ten times the CPU time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


def pytest_collection_finish() -> None:
    """Freeze the heap: most of a million objects, which each `gc.collect` of a test would visit."""
    gc.collect()
    gc.freeze()
